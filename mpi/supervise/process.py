"""Processes of a job: started so that they never outlive their parent, signaled with all that they have started."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from _cputrain_autoload import STACK_VARIABLE
from mpi.launchers.launcher import Files, LaunchCommand
from mpi.supervise import guard
from mpi.supervise.reaper import adopt_orphans

PR_SET_PDEATHSIG = 1


class RankGroup:
    """The processes of the ranks that this process starts, and a guard that kills them if this process is killed."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._sessions: list[int] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def start(
        self, command: tuple[str, ...], env: Mapping[str, str], stack_file: int, *, inherit_files: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a rank in a session of its own, its output on pipes; it is killed when this process ends.

        It inherits `stack_file`. With `inherit_files` all files that are open in this process stay open: MPI's
        launchers talk to their ranks by them.
        """
        prctl = ctypes.CDLL(None).prctl

        def die_with_parent() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        own = {"PYTHONUNBUFFERED": "1", guard.MARK_VARIABLE: self._mark, STACK_VARIABLE: str(stack_file)}
        process = subprocess.Popen(
            command,
            env={**env, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=not inherit_files,
            pass_fds=() if inherit_files else (stack_file,),
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  the calling processes have one thread
        )
        self._sessions.append(process.pid)
        self._tell(b"%d\n" % process.pid)
        return process

    def guard(self) -> None:
        """Start the guard, once the ranks have been started."""
        if self._guard is None:
            self._guard = subprocess.Popen(
                (sys.executable, "-I", "-S", guard.__file__, self._mark),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for session in self._sessions:
                self._tell(b"%d\n" % session)

    def note_exit(self, pid: int) -> None:
        """Forget the session of a rank that has been waited for, unless others are in it: its number may be reused."""
        if not signal_group(pid, 0):
            self._sessions.remove(pid)
            self._tell(b"-%d\n" % pid)

    @property
    def running(self) -> bool:
        """Whether a process in a rank's session still runs."""
        return bool(self._sessions) and any(guard.processes_of(self._sessions, None))

    def signal(self, number: int) -> None:
        """Send a signal to every rank and all in its session."""
        for pid in self._sessions:
            signal_group(pid, number)

    def kill(self) -> None:
        """Kill all that the ranks have started, in sessions of their own too."""
        guard.kill_all(self._sessions, self._mark)

    def close(self) -> None:
        """End the guard. The ranks have been ended before."""
        self._tell(guard.DONE)
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.close()
            self._guard.wait()

    def _tell(self, line: bytes) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):  # the guard was killed: the job is no worse off than without it
                self._guard.stdin.write(line)
                self._guard.stdin.flush()


def start_launcher(
    command: LaunchCommand, env: Mapping[str, str], output: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a launcher, whose files are written, in a session of its own; what it leaves behind becomes this process's
    child, for `end_descendants`. `output` is where its output goes, as subprocess takes it."""
    adopt_orphans()
    return subprocess.Popen(
        command.argv,
        env={**env, **dict(command.variables)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def write_files(files: Files) -> None:
    """Write a launcher's files."""
    for path, text in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")  # paths are bytes


def signal_group(pid: int, number: int) -> bool:
    """Send a signal (0: none) to a rank and all that it has started; whether any of them is still there."""
    try:
        os.killpg(pid, number)  # a session's leader gives its group its own pid
    except ProcessLookupError:
        return False
    return True
