"""Processes of a job: started so that none outlives the launcher; how they ended, and why.

For a rank's stack, the watcher gives it an unnamed file, and a rank that has Python lets faulthandler write the stack
of its main thread there at a signal: also while it computes in C, or loops. The signal is sent only to a process that
handles it.
"""

import ctypes
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path

from _cputrain_autoload import STACK_FILE, STACK_SIGNAL, STACK_VARIABLE
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import PROC, catches, read_stat, write_with
from cputrain.affinity.terminal import printable
from cputrain.affinity.topology.kernel_files import own_folders, read_limits
from cputrain.affinity.wording import GIB
from cputrain.mpi.launchers.programs import Files, LaunchCommand
from cputrain.mpi.supervise import guard

COUNTERS = ("memory.events", "memory.oom_control")  # of control groups v2, v1: a line "oom_kill N"
COUNTER = "oom_kill "


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A process was killed for lack of memory: the most that it had, 0 if unknown, and all that there is, in bytes.

    `whole` is what that is the memory of.
    """

    used_bytes: int
    limit_bytes: int
    whole: str

    def __str__(self) -> str:
        used = f"{self.used_bytes / GIB:.1f} GiB of " if self.used_bytes else ""
        return f"out of memory: {used}the {self.limit_bytes / GIB:.1f} GiB of its {self.whole}"


class KillCounter:
    """Tells whether the kernel has lately killed a process of this one's control groups for lack of memory.

    To be read every few seconds. Files are below `root`. Where no control group counts, the host's own count is taken,
    of all processes.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        names = [folder / name for folder in own_folders(root) for name in COUNTERS]
        files = [path for path in names if read_count(path) is not None]
        self._files = files or [root / "proc/vmstat"]
        self._before = self._last = self._counts()

    def read(self) -> None:
        """Count anew: kills before the reading before this one are no longer lately."""
        self._before, self._last = self._last, self._counts()

    def shortage(self, used_bytes: int) -> Shortage | None:
        """The shortage of a process that has just been killed, if that was why; it had so many bytes at most."""
        if all(now <= before for now, before in zip(self._counts(), self._before, strict=True)):
            return None
        limit = None
        with suppress(InputError):  # a file of the control group that is not as expected
            limit = read_limits(self._root).memory_bytes
        if limit is not None:
            return Shortage(used_bytes=used_bytes, limit_bytes=limit, whole="control group")
        return Shortage(used_bytes=used_bytes, limit_bytes=_host_bytes(self._root), whole="host")

    def _counts(self) -> list[int]:
        return [read_count(path) or 0 for path in self._files]


def read_count(path: Path) -> int | None:
    """The kills that a file counts; None where it does not."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(COUNTER)), None)


def _host_bytes(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))


SETTLE_S = 0.5  # a rank's death makes its peers fail within this time; the first cause is searched among them
TOGETHER_S = 0.15  # exits that are noticed so close to each other may have happened in the other order
LAST_LINES = 15
STATUSES = range(-signal.SIGRTMAX, 256)  # that a process can exit with; negative: the signal that ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """A rank's exit: its status (negative where a signal ended it), when it was noticed (monotonic), the last lines of
    its output and the log that has all of it. `shortage`: the kernel has just killed it, or a process near it, for lack
    of memory."""

    rank: int
    host: str
    status: int
    time: float
    log: str
    tail: tuple[str, ...]
    shortage: Shortage | None = None

    @property
    def by_itself(self) -> bool:
        """Whether the process ended itself: by a status, or by SIGABRT as C++ libraries do after a timeout."""
        return self.status >= 0 or self.status == -signal.SIGABRT


class JobFailedError(RunError):
    """A job failed. `shortage`: for lack of memory. `hosts`: those that may be down. `tail`: the last lines of the rank
    that failed first."""

    def __init__(
        self,
        message: str,
        *,
        shortage: Shortage | None = None,
        hosts: tuple[str, ...] = (),
        tail: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.shortage = shortage
        self.hosts = hosts
        self.tail = tail

    def advised(self, advice: str) -> "JobFailedError":
        """The same failure, with a line about what to do."""
        return JobFailedError(f"{self}\n{advice}", shortage=self.shortage, hosts=self.hosts, tail=self.tail)


def first_cause(exits: Iterable[RankExit]) -> RankExit:
    """The exit that others followed from: the earliest; of those noticed together with it, one by a signal."""
    known = list(exits)
    earliest = min(one.time for one in known)
    together = [one for one in known if one.time - earliest <= TOGETHER_S]
    return min(together, key=lambda one: (one.status > 0, one.by_itself, one.time, one.rank))


def describe_exit(one: RankExit) -> str:
    """A rank's exit in one line, and the last lines of its output."""
    how = describe_status(one.status)
    if one.shortage is not None:
        how += f", {one.shortage}" if one.status < 0 else f" after the kernel had killed a process, {one.shortage}"
    tail = "".join(f"\n  | {printable(line.rpartition(chr(13))[2])}" for line in one.tail[-LAST_LINES:])
    output = f"; its last lines:{tail}" if tail else "; it printed nothing"
    return f"rank {one.rank} on {one.host} {how}; log {one.log}{output}"


def signal_name(number: int) -> str:
    """A signal as messages name it: "SIGTERM"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal


def describe_status(status: int) -> str:
    """What a process did: "exited with status 3", "was ended by SIGKILL" (a negative status)."""
    return f"exited with status {status}" if status >= 0 else f"was ended by {signal_name(-status)}"


FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
MOST_FRAMES, MOST_BYTES = 12, 1 << 16
ANSWER_S = 1.0  # a process that computes answers at once, on a busy host a little later
STACK_POLL_S = 0.02


def stack_file() -> int:
    """A new file for a rank's stack, which the rank is to inherit."""
    return os.memfd_create(STACK_FILE, 0)


def read_stack(pids: Iterable[int], file: int) -> tuple[str, ...]:
    """The Python stack of the first of these processes that offers one, innermost first; empty where none does."""
    pid = next((pid for pid in pids if catches(pid, STACK_SIGNAL)), None)
    if pid is None:
        return ()
    before = os.fstat(file).st_size
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return ()
    deadline, text = time.monotonic() + ANSWER_S, b""
    while time.monotonic() < deadline:
        time.sleep(STACK_POLL_S)
        now = os.pread(file, MOST_BYTES, before)
        if now and now == text:
            break
        text = now
    return frames(text.decode(errors="replace"))


def frames(text: str) -> tuple[str, ...]:
    """The frames of faulthandler's text, as FILE:LINE in FUNCTION."""
    found = [f"{match[1]}:{match[2]} in {match[3]}" for match in map(FRAME.match, text.splitlines()) if match]
    return tuple(found[:MOST_FRAMES])


PR_SET_CHILD_SUBREAPER = 36
REAP_POLL_S = 0.05


def descendants(pid: int) -> tuple[int, ...]:
    """The processes below this one that still run, parents before children.

    All of the host are looked at: the kernel's own lists of children, which monitor.py reads, may miss some of a
    process that is just starting more.
    """
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            stat = read_stat(int(folder.name))
        except OSError:
            continue  # gone meanwhile
        if stat.state != "Z":
            children.setdefault(stat.parent, []).append(int(folder.name))
    found: list[int] = []
    layer = [pid]
    while layer:
        layer = [child for parent in layer for child in children.get(parent, ())]
        found += layer
    return tuple(found)


def end_descendants(grace_s: float) -> None:
    """End all processes below this one by SIGTERM, after grace_s by SIGKILL, and reap them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):  # has ended meanwhile, or is another user's (sudo)
                continue
        deadline = time.monotonic() + grace_s
        while descendants(os.getpid()) and time.monotonic() < deadline:
            time.sleep(REAP_POLL_S)
        if not descendants(os.getpid()):
            break
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return  # no child is left


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
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return subprocess.Popen(
        command.argv,
        env={**env, **dict(command.variables)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def write_files(files: Files) -> None:
    """Write a job's files. Raises OSError that names the file."""
    for path, text in files:
        write_with(path, methodcaller("write", text.encode(errors="surrogateescape")))  # paths are bytes


def signal_group(pid: int, number: int) -> bool:
    """Send a signal (0: none) to a rank and all that it has started; whether any of them is still there."""
    try:
        os.killpg(pid, number)  # a session's leader gives its group its own pid
    except ProcessLookupError:
        return False
    return True
