"""Programs that start in milliseconds, forked from an interpreter that has imported torch: fork_server.py.

`forked` runs what `python -m MODULE` or `python -c CODE` would, `in_fork` a command of cputrain with its ranks. Tests
of starts themselves (a shell's commands, torchrun, mpirun, what an environment does to libraries) start real processes.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest

from tests.support.commands import HANGS_S, stacks_of

ROOT = Path(__file__).parents[2]
# Read by Python, libgomp and torch as they are loaded, which is before a program's own variables are there.
AT_START = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": ""}


class Forked:
    """A forked program, with the methods of subprocess.Popen that tests use."""

    def __init__(
        self, words: tuple[str, ...], env: dict[str, str], out: IO[bytes], err: IO[bytes], cwd: Path = ROOT
    ) -> None:
        self.args, self.stdout, self.stderr = words, out, err
        self.returncode: int | None = None
        request = {"words": words, "env": env, "cwd": str(cwd.absolute()), "files": (1, 2)}
        self.pid: int = answer(request, out.fileno(), err.fileno())
        self._descriptor = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Its status, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Its status at its end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = answer({"ended": self.pid})
            os.close(self._descriptor)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """End it, if it runs."""
        self.send_signal(signal.SIGKILL)


def answer(request: dict[str, Any], *files: int) -> int:
    """What the interpreter that forks answers to a request."""
    server = connection()
    socket.send_fds(server, [json.dumps(request).encode()], files)
    reply = server.recv(100)
    assert reply, "the interpreter that forks has ended"
    return int(reply)


Server = tuple[subprocess.Popen[bytes], socket.socket]
_servers: list[Server] = []
_shared: list[socket.socket] = []
SHARED = "CPUTRAIN_TESTS_FORK"  # the variable with the name of an interpreter that processes of tests share
NAME = os.environ.get(SHARED, f"cputrain-tests-{os.urandom(8).hex()}")  # of the listener


def connection() -> socket.socket:
    """Return the connection to the interpreter that forks: the shared one, or one that ends with this process of tests
    and is started anew if it has ended: jobs that run in the process of a test end all of its descendants."""
    if SHARED in os.environ:
        if not _shared:
            _shared.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            _shared[0].connect(f"\0{NAME}")
        return _shared[0]
    if not _servers or _servers[-1][0].poll() is not None:
        _servers.append(_start())
    return _servers[-1][1]


def share() -> None:
    """Let the processes of tests that this one starts share one interpreter, which imports torch at its first use."""
    _servers.append(_start())
    os.environ[SHARED] = NAME


def _start() -> Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{NAME}")
        listener.listen()
        files = (theirs.fileno(), listener.fileno())
        argv = (sys.executable, "-m", "tests.support.fork_server", *map(str, files))
        process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **AT_START}, pass_fds=files)
    atexit.register(process.wait)
    atexit.register(ours.close)  # the last to be registered is the first to be called
    return process, ours


def forking_python() -> tuple[str, ...]:
    """Return the words of a command that stand for `python` where a launcher starts `python -m MODULE` or `python -c
    CODE`: the program is forked, with the launcher's files and variables. Libraries do not see its LD_LIBRARY_PATH."""
    connection()
    return (sys.executable, "-IS", str(Path(__file__).with_name("fork_client.py")), NAME)


Process = subprocess.Popen[bytes] | Forked
Kind = TypeVar("Kind", subprocess.Popen[bytes], Forked)


@dataclass(frozen=True)
class Ended:
    """A finished process: its exit status and its output."""

    status: int
    out: str
    err: str


@contextmanager
def writing(start: Callable[[IO[bytes], IO[bytes]], Kind]) -> Iterator[Kind]:
    """Start a process that ends with the block; its output goes to files."""
    with ExitStack() as stack:
        # Files instead of pipes: a rank must not wait for its reader while another rank waits for it.
        out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        process = start(out, err)
        stack.callback(process.wait)
        stack.callback(process.kill)
        process.stdout, process.stderr = out, err
        yield process


@contextmanager
def forked(*words: str, cwd: Path = ROOT, **env: str) -> Iterator[Forked]:
    """Start `python WORDS` (-m MODULE ... or -c CODE ...), which ends with the block."""
    with writing(lambda out, err: Forked(words, {**os.environ, **env}, out, err, cwd)) as process:
        yield process


def ended(process: Process, limit_s: float = HANGS_S) -> Ended:
    """Wait for a process; fail with its stacks if it takes longer."""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pytest.fail(stacks_of(process.pid))
    return Ended(status, *printed(process))


def printed(process: Process) -> tuple[str, str]:
    """Return a process's output so far: stdout, stderr."""
    texts = []
    for file in (process.stdout, process.stderr):
        assert file is not None
        texts.append(os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace"))
    return texts[0], texts[1]


def in_fork(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of cputrain, whose ranks are forked, too: what `cputrain` of tests.support.commands does, without
    the seconds that each of its processes needs for an import of torch."""
    with forked("-m", "cputrain", *arguments, cwd=cwd or Path.cwd(), **env) as process:
        end = ended(process)
    return subprocess.CompletedProcess(arguments, end.status, end.out, end.err)
