"""A rank's process: started so that it never outlives who watches it, and signalled with all that it has started."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping

PR_SET_PDEATHSIG = 1


def start_rank(
    command: tuple[str, ...], env: Mapping[str, str], *, inherit_files: bool = False
) -> subprocess.Popen[bytes]:
    """Start a rank in a session of its own, its output on pipes; it is killed when this process ends.

    `inherit_files`: keep open what this process has open, through which MPI's launchers talk to their ranks.
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


def signal_group(pid: int, number: int) -> bool:
    """Send a signal (0: none) to a rank and all that it has started; whether any of them is still there."""
    try:
        os.killpg(pid, number)  # a session's leader gives its group its own pid
    except ProcessLookupError:
        return False
    return True
