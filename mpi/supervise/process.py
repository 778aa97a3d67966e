"""Processes of a job: started so that they never outlive their parent, signaled with all that they have started."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mpi.launchers.launcher import Files, LaunchCommand
from mpi.supervise.reaper import adopt_orphans

PR_SET_PDEATHSIG = 1
STOPPED = ("T", "t")


def start_rank(
    command: tuple[str, ...], env: Mapping[str, str], *, inherit_files: bool = False
) -> subprocess.Popen[bytes]:
    """Start a rank in a session of its own, its output on pipes; it is killed when this process ends.

    With `inherit_files` the files that are open in this process stay open: MPI's launchers talk to their ranks by them.
    """
    prctl = ctypes.CDLL(None).prctl

    def die_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen(
        command,
        env={**env, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        close_fds=not inherit_files,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509  the calling processes have one thread
    )


def start_launcher(command: LaunchCommand, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a launcher, whose files are written, in a session of its own; what it leaves behind becomes this process's
    child, for `end_descendants`."""
    adopt_orphans()
    return subprocess.Popen(
        command.argv, env={**env, **dict(command.variables)}, stdin=subprocess.DEVNULL, start_new_session=True
    )


def write_files(files: Files) -> None:
    """Write a launcher's files."""
    for path, text in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def signal_group(pid: int, number: int) -> bool:
    """Send a signal (0: none) to a rank and all that it has started; whether any of them is still there."""
    try:
        os.killpg(pid, number)  # a session's leader gives its group its own pid
    except ProcessLookupError:
        return False
    return True


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped (SIGSTOP), and computes nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in STOPPED
    except OSError:
        return False
