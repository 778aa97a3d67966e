"""Processes of a job: start them such that none outlives the launcher, describe exits, find the first cause.

For stack dumps each rank inherits an unnamed file. A Python rank registers faulthandler for a signal, at which it
writes the main thread's stack to this file even while it runs C code or an endless loop. The signal is sent only to a
process that handles it. Into a second file a rank with the backend ccl writes a copy of its heartbeats.
"""

import ctypes
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from _cputrain_autoload import STACK_FILE, STACK_SIGNAL, STACK_VARIABLE, STATE_FILE, STATE_VARIABLE
from cputrain.affinity.binding import DATA_THREAD
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import PROC, delays_signal, handles_signal, read_stat, write_bytes
from cputrain.affinity.terminal import printable
from cputrain.affinity.topology.kernel_files import cgroup_folders, read_limits
from cputrain.affinity.wording import GIB
from cputrain.mpi.launchers import Files, LaunchCommand
from cputrain.mpi.supervise import guard

COUNTERS = ("memory.events", "memory.oom_control")  # in control groups v2 and v1; they have a line "oom_kill N"
COUNTER = "oom_kill "

SETTLE_S = 0.5  # a rank's death makes its peers fail within this time; the first cause is searched among them
TOGETHER_S = 0.15  # exits noticed within this time may have happened in the other order
LAST_LINES = 15
OUTPUT_FOLLOWS = "; its last lines:"  # ends a message's first line; the lines follow
STATUSES = range(-signal.SIGRTMAX, 256)  # possible statuses; negative: the signal that ended the process

FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
OF_PYTHON = re.compile(r"/lib/python3\.\d+/(?!site-packages/)")  # files of the standard library
MAX_FRAMES, MAX_STACK_BYTES = 12, 1 << 16
STACK_ANSWER_S = 4.0  # a computing process answers immediately; later if it waits for a core, or for its pages
STACK_POLL_S = 0.02

ITS_DATA_THREAD = "its data thread at "  # the last line of a stack, if that thread is at work
NO_ANSWER = "an unknown line, as it does not respond"  # in place of the stack of a process that can dump it
TGKILL = {"x86_64": 234, "aarch64": 131}  # the system call's number

LINE_OF = re.compile(r"(.+):(\d+) in ")
CALLS_WAIT = re.compile(r"\.wait\(")
IN_WAIT = ", in wait()"

PR_SET_CHILD_SUBREAPER = 36
REAP_POLL_S = 0.05

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A process was killed because memory ran out: its peak use (0 if unknown) and the limit, in bytes.

    `whole` is what the limit applies to.
    """

    used_bytes: int
    limit_bytes: int
    whole: str

    def __str__(self) -> str:
        used = f"{self.used_bytes / GIB:.1f} GiB of " if self.used_bytes else ""
        return f"out of memory: {used}the {self.limit_bytes / GIB:.1f} GiB of its {self.whole}"


class KillCounter:
    """Detect whether the kernel has recently killed a process of this one's control groups because memory ran out.

    Call `read` every few seconds. Files are below `root`. If no control group has a counter, the host's counter for all
    processes is used.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        names = [folder / name for folder in cgroup_folders(root) for name in COUNTERS]
        files = [path for path in names if read_count(path) is not None]
        self._files = files or [root / "proc/vmstat"]
        self._before = self._last = self._counts()

    def read(self) -> None:
        """Read the counters. Kills before the previous reading no longer count as recent."""
        self._before, self._last = self._last, self._counts()

    def shortage(self, used_bytes: int) -> OutOfMemory | None:
        """Return the shortage if memory ran out around the kill just seen; the process used at most this many bytes."""
        if all(now <= before for now, before in zip(self._counts(), self._before, strict=True)):
            return None
        limit = None
        with suppress(InputError):  # an unexpected format of a control group's file
            limit = read_limits(self._root).memory_bytes
        if limit is not None:
            return OutOfMemory(used_bytes=used_bytes, limit_bytes=limit, whole="control group")
        return OutOfMemory(used_bytes=used_bytes, limit_bytes=_host_bytes(self._root), whole="host")

    def _counts(self) -> list[int]:
        return [read_count(path) or 0 for path in self._files]


def read_count(path: Path) -> int | None:
    """Return the number of kills in a file, None if it has no counter."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(COUNTER)), None)


def _host_bytes(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """A rank's exit: status (negative if a signal ended it), when it was noticed (monotonic), the last lines of output
    and the complete log. `shortage`: the kernel killed the rank, or a process near it, because memory ran out."""

    rank: int
    host: str
    status: int
    time: float
    log: str
    tail: tuple[str, ...]
    shortage: OutOfMemory | None = None

    @property
    def by_itself(self) -> bool:
        """Whether the process ended itself: by a status, or by SIGABRT, as C++ libraries do after a timeout."""
        return self.status >= 0 or self.status == -signal.SIGABRT

    @property
    def place(self) -> str:
        """The rank and its host for messages."""
        return f"rank {self.rank} on {self.host}"

    @property
    def printed(self) -> tuple[str, ...]:
        """The last LAST_LINES lines of output, as a terminal shows them."""
        return tuple(printable(line.rpartition("\r")[2]) for line in self.tail[-LAST_LINES:])


class JobFailedError(RunError):
    """A job failed. `cause`: the exit of the rank that failed first, if it reported one. `hosts`: hosts that may be
    down."""

    def __init__(self, message: str, *, cause: RankExit | None = None, hosts: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.cause = cause
        self.hosts = hosts

    @property
    def shortage(self) -> OutOfMemory | None:
        """Set if memory ran out."""
        return self.cause.shortage if self.cause else None

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of output of the rank that failed first."""
        return self.cause.printed if self.cause else ()

    def advised(self, advice: str) -> "JobFailedError":
        """Return the same failure with a line of advice."""
        return JobFailedError(f"{self}\n{advice}", cause=self.cause, hosts=self.hosts)


def in_one_line(error: RunError) -> str:
    """Describe a failure in one line, with the last line of the rank's output at most."""
    first = str(error).partition("\n")[0]
    tail = error.tail if isinstance(error, JobFailedError) else ()
    last = next((line.strip() for line in reversed(tail) if line.strip()), None)
    if last is None or not first.endswith(OUTPUT_FOLLOWS):
        return first
    return f"{first.removesuffix(OUTPUT_FOLLOWS)}; its last line: {last}"


def first_cause(exits: Iterable[RankExit]) -> RankExit:
    """Return the exit that caused the others: the earliest; among exits close to it, one by a signal comes first."""
    known_exits = list(exits)
    earliest = min(rank_exit.time for rank_exit in known_exits)
    together = [rank_exit for rank_exit in known_exits if rank_exit.time - earliest <= TOGETHER_S]
    return min(
        together, key=lambda rank_exit: (rank_exit.status > 0, rank_exit.by_itself, rank_exit.time, rank_exit.rank)
    )


def describe_exit(rank_exit: RankExit) -> str:
    """Describe a rank's exit in one line, followed by the last lines of its output."""
    how = describe_status(rank_exit.status)
    if rank_exit.shortage is not None:
        how += (
            f", {rank_exit.shortage}"
            if rank_exit.status < 0
            else f" after the kernel had killed a process, {rank_exit.shortage}"
        )
    tail = "".join(f"\n  | {line}" for line in rank_exit.printed)
    output = f"{OUTPUT_FOLLOWS}{tail}" if tail else "; it printed nothing"
    return f"{rank_exit.place} {how}; log {rank_exit.log}{output}"


def signal_name(number: int) -> str:
    """Return a signal's name for messages, such as "SIGTERM"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal


def describe_status(status: int) -> str:
    """Describe an exit status: "exited with status 3", or "was ended by SIGKILL" if it is negative."""
    return f"exited with status {status}" if status >= 0 else f"was ended by {signal_name(-status)}"


@dataclass(slots=True, kw_only=True)
class WatchedFiles:
    """Descriptors of two unnamed files that a rank inherits: for stacks, and for copies of its heartbeats.

    `asked` is the thread whose stack was requested and is not there yet; it begins at the offset `begins`.
    """

    stack: int
    state: int
    asked: int | None = None
    begins: int = 0

    @classmethod
    def create(cls) -> "WatchedFiles":
        """Create both files."""
        return cls(stack=os.memfd_create(STACK_FILE, 0), state=os.memfd_create(STATE_FILE, 0))

    @property
    def variables(self) -> dict[str, str]:
        """The variables that tell the rank of its files."""
        return {STACK_VARIABLE: str(self.stack), STATE_VARIABLE: str(self.state)}

    def ask(self, pid: int, thread: int) -> None:
        """Request the stack of a process's thread; one at a time, as two would write into one another."""
        begins = os.fstat(self.stack).st_size
        with suppress(ProcessLookupError):  # ended meanwhile
            signal_thread(pid, thread, STACK_SIGNAL)
            self.asked, self.begins = thread, begins

    def answer(self) -> tuple[str, ...] | None:
        """Return the frames of the requested stack once all of it is written; None before, or without a request.

        A process that runs rarely writes for seconds: while it does, the kernel blocks the signal for the thread.
        """
        if self.asked is None or delays_signal(self.asked, STACK_SIGNAL):
            return None
        text = os.pread(self.stack, MAX_STACK_BYTES, self.begins)
        if not text:
            return None
        self.asked = None
        return frames(text.decode(errors="replace"))

    def close(self) -> None:
        """Close both files."""
        os.close(self.stack)
        os.close(self.state)


def signal_thread(pid: int, thread: int, number: int) -> None:
    """Send a signal to a process's thread; its main thread has the number `pid`. Any thread may take one that is sent
    to the process, for example once a stopped process continues. Raises ProcessLookupError if it has ended."""
    call = TGKILL.get(platform.machine())
    if call is None:
        os.kill(pid, number)
    elif ctypes.CDLL(None, use_errno=True).syscall(call, pid, thread, number) < 0:
        raise ProcessLookupError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def read_stacks(ranks: Sequence[tuple[Iterable[int], WatchedFiles]]) -> list[tuple[str, ...]]:
    """Return the Python stack of each rank, innermost frame first, given its processes and files: empty if none of them
    can dump its stack, NO_ANSWER if none does within STACK_ANSWER_S. If it has a data thread that is at work, and this
    answers in time, too, the last line is ITS_DATA_THREAD and its innermost frame outside Python's library."""
    deadline = time.monotonic() + STACK_ANSWER_S
    able = [(next((pid for pid in pids if handles_signal(pid, STACK_SIGNAL)), None), files) for pids, files in ranks]
    waiting = {files.stack: (pid, files) for pid, files in able if pid is not None}
    of_main, of_data = dict[int, tuple[str, ...]](), dict[int, tuple[str, ...]]()
    for pid, files in waiting.values():
        files.answer()  # a late one, to an earlier request
        if not (PROC / f"{pid}/task/{files.asked}").exists():
            files.asked = None
    while waiting and time.monotonic() < deadline:
        for file, (pid, files) in tuple(waiting.items()):
            thread, written = files.asked, files.answer()
            if written is not None:
                (of_main if thread == pid else of_data)[file] = written
            if files.asked is None:
                thread = pid if file not in of_main else data_thread(pid) if file not in of_data else None
                if thread is not None:
                    files.ask(pid, thread)
            if files.asked is None:
                del waiting[file]
        time.sleep(STACK_POLL_S)
    stacks = [(pid, of_main.get(files.stack), of_data.get(files.stack, ())) for pid, files in able]
    return [() if pid is None else _with_data_thread(main, data) for pid, main, data in stacks]


def _with_data_thread(main: tuple[str, ...] | None, data: Sequence[str]) -> tuple[str, ...]:
    """Return a process's stack, given those of its main thread, None if it does not answer, and of its data thread,
    which is in the standard library while it waits for work."""
    if main is None:
        return (NO_ANSWER,)
    frame = place(data)
    return (*with_wait(main), *(() if frame is None else (ITS_DATA_THREAD + frame,)))


def data_thread(pid: int) -> int | None:
    """Return the number of a process's thread that reads a caller's data set; None if it has none."""
    with suppress(OSError):  # ended meanwhile, as each of its threads may have
        for thread in (PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                if (thread / "comm").read_text(encoding="utf-8").startswith(DATA_THREAD):
                    return int(thread.name)
    return None


def place(stack: Sequence[str]) -> str | None:
    """Return the innermost frame outside Python's standard library."""
    return next((line for line in stack if not OF_PYTHON.search(line)), None)


def frames(text: str) -> tuple[str, ...]:
    """Parse the frames of faulthandler's text into FILE:LINE in FUNCTION."""
    lines = [f"{match[1]}:{match[2]} in {match[3]}" for match in map(FRAME.match, text.splitlines()) if match]
    return tuple(lines[:MAX_FRAMES])


def with_wait(stack: tuple[str, ...]) -> tuple[str, ...]:
    """Return a stack with IN_WAIT after its innermost frame if that line calls a method `wait` that is no Python
    function, as it would have a frame: torch's `Work.wait`, which waits for other ranks."""
    at = LINE_OF.match(stack[0]) if stack else None
    with suppress(OSError, IndexError):  # no file, or changed since
        lines = Path(at[1]).read_text(encoding="utf-8", errors="replace").splitlines() if at else []
        if at and CALLS_WAIT.search(lines[int(at[2]) - 1]):
            return (stack[0] + IN_WAIT, *stack[1:])
    return stack


def descendants(pid: int) -> tuple[int, ...]:
    """Return the running descendants of this process, parents before children.

    This scans all processes of the host: the kernel's per-thread lists of children, which monitor.py reads, may miss
    children of a process that is forking.
    """
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            stat = read_stat(int(folder.name))
        except OSError:
            continue  # ended meanwhile
        if stat.state != "Z":
            children.setdefault(stat.parent, []).append(int(folder.name))
    pids: list[int] = []
    layer = [pid]
    while layer:
        layer = [child for parent in layer for child in children.get(parent, ())]
        pids += layer
    return tuple(pids)


def end_descendants(grace_s: float) -> None:
    """End all descendants of this process by SIGTERM, after grace_s by SIGKILL, and reap them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):  # ended meanwhile, or belongs to another user (sudo)
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
        return  # no children are left


class RankGroup:
    """The processes of the ranks that this process starts, with a guard that kills them if this process is killed."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._sessions: list[int] = []
        self._guard: subprocess.Popen[bytes] | None = None

    def start(
        self, command: tuple[str, ...], env: Mapping[str, str], files: WatchedFiles, *, inherit_files: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a rank in a new session, with its output on pipes; it is killed when this process ends.

        It inherits `files`. With `inherit_files` all open files of this process stay open, because MPI launchers
        communicate with their ranks through them.
        """
        prctl = ctypes.CDLL(None).prctl

        def die_with_parent() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        added = {"PYTHONUNBUFFERED": "1", guard.MARK_VARIABLE: self._mark, **files.variables}
        process = subprocess.Popen(
            command,
            env={**env, **added},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=not inherit_files,
            pass_fds=() if inherit_files else (files.stack, files.state),
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  the calling processes have one thread
        )
        self._sessions.append(process.pid)
        self._write_to_guard(b"%d\n" % process.pid)
        return process

    def guard(self) -> None:
        """Start the guard after the ranks have been started."""
        if self._guard is None:
            self._guard = subprocess.Popen(
                (sys.executable, "-I", "-S", guard.__file__, self._mark),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for session in self._sessions:
                self._write_to_guard(b"%d\n" % session)

    def note_exit(self, pid: int) -> None:
        """Forget the session of a reaped rank unless other processes are in it: its number may be reused."""
        if not signal_group(pid, 0):
            self._sessions.remove(pid)
            self._write_to_guard(b"-%d\n" % pid)

    @property
    def running(self) -> bool:
        """Whether any process in a rank's session is running."""
        return bool(self._sessions) and any(guard.processes_of(self._sessions, None))

    def signal(self, number: int) -> None:
        """Send a signal to the process group of every rank."""
        for pid in self._sessions:
            signal_group(pid, number)

    def kill(self) -> None:
        """Kill the ranks and all their descendants, in any session."""
        guard.kill_all(self._sessions, self._mark)

    def close(self) -> None:
        """End the guard. The ranks must have been ended before."""
        self._write_to_guard(guard.DONE)
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.close()
            self._guard.wait()

    def _write_to_guard(self, line: bytes) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):  # the guard was killed; the job can do without it
                self._guard.stdin.write(line)
                self._guard.stdin.flush()


def start_launcher(
    command: LaunchCommand, env: Mapping[str, str], output: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a launcher, whose files are already written, in a new session. Its orphaned processes become this process's
    children, for `end_descendants`. `output` is passed to subprocess as stdout and stderr."""
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
    """Write a job's files. Raises OSError naming the file."""
    for path, text in files:
        write_bytes(path, text.encode(errors="surrogateescape"))  # paths are bytes


def signal_group(pid: int, number: int) -> bool:
    """Send a signal (0: none) to a rank's process group; return whether any process of it is left."""
    try:
        os.killpg(pid, number)  # a session leader's process group has its pid
    except ProcessLookupError:
        return False
    return True
