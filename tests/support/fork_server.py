"""Fork the programs of tests from one interpreter that has imported torch: tests.support.fork_server SOCKET LISTENER.

Each import of torch takes seconds of CPU time. A request's child runs what `python -m MODULE` or `python -c CODE` would
run; if that is a command of cputrain that starts ranks, these are forked, too. tests/support/forked.py sends requests,
and tests/support/fork_client.py where another program, such as mpirun, starts the ranks.

No library of oneCCL or MPI is loaded before, and no thread has been started. All children have the same hash seed, and
find variables that a library reads as it is loaded (LD_PRELOAD, those of OpenMP) too late.
"""

import atexit
import ctypes
import fcntl
import gc
import io
import json
import logging
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
MAX_BYTES = 1 << 20  # of a request: words and environment variables
MAX_FILES = 64
FIRST_APART = 512  # above the numbers of files that launchers give to programs
GOOD_BYE = re.compile(r"/lib(mpi|ccl)\.so")  # which say good-bye to other ranks as the interpreter ends
INSTALLED = tuple(sys.path[1:])  # without the working directory


def serve(client: socket.socket, listener: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request to start one, of this client or of those that connect to the listener, until the
    client is gone. The children of a connection end with it. In a child: its request."""
    children: dict[socket.socket, set[int]] = {client: set()}
    while True:
        for one in select.select([listener, *children], [], [])[0]:
            if one is listener:
                children[listener.accept()[0]] = set()
                continue
            try:
                message, files, _, _ = socket.recv_fds(one, MAX_BYTES, MAX_FILES)
            except ConnectionResetError:  # its process ended before it read an answer
                message, files = b"", []
            if not message:
                if one is client:
                    return None
                one.close()
                for pid in children.pop(one):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                continue
            request: dict[str, Any] = json.loads(message)
            if "ended" in request:
                answered = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
                children[one].discard(request["ended"])
            else:
                answered = os.fork()
                if answered == 0:
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    for connection in (listener, *children):
                        connection.close()
                    take(files, request["files"])
                    return request
                children[one].add(answered)
                for file in files:
                    os.close(file)
            with suppress(BrokenPipeError):  # its process has ended, as the next reading shows
                one.send(str(answered).encode())


def take(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give these files of this process other numbers; some of them may be those of others of these files."""
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_APART) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(apart, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def become(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Run what `python WORDS` would run, -m MODULE or -c CODE with arguments, in this process."""
    os.environ.clear()
    os.environ.update(env)
    at_once = env.get("PYTHONUNBUFFERED", "") != ""
    for number, name in enumerate(("stdout", "stderr"), start=1):
        old = getattr(sys, name)
        old.flush()
        file = os.fdopen(number, "wb", 0 if at_once else -1, closefd=False)
        lines = name == "stderr"
        stream = io.TextIOWrapper(file, old.encoding, old.errors, write_through=at_once, line_buffering=lines)
        setattr(sys, name, stream)
    given = [str(Path(path).absolute()) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path.cwd()), *given, *(path for path in INSTALLED if path not in given)]
    option, program, *arguments = words
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def words_of(command: Sequence[str]) -> list[str] | None:
    """Return the words after `python` of a command that runs a module; None if it runs anything else."""
    from cputrain.affinity.start import JSON, isolated_command

    isolated = isolated_command("")[:-1]
    if tuple(command[: len(isolated)]) == isolated and command[len(isolated)] != JSON:
        return ["-m", *command[len(isolated) :]]
    return [*command[1:]] if command[:2] == [sys.executable, "-m"] else None


class ForkedRank(subprocess.Popen[bytes]):
    """A rank that is forked instead of executed if it runs a Python module."""

    def _execute_child(self, *arguments: Any) -> None:
        given = signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments
        words = words_of([*given["args"]])
        if words is None:
            super()._execute_child(*arguments)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            be_rank(words, given)
        self._child_created = True
        self._close_pipe_fds(
            *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def be_rank(words: Sequence[str], given: Mapping[str, Any]) -> NoReturn:
    """Give this child what exec would: files, a session, default handlers of signals; run the module and exit."""
    for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        os.dup2(given[name], number)
    os.setsid()
    given["preexec_fn"]()
    kept = {0, 1, 2, *given["pass_fds"]}
    for number in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - kept:
        with suppress(OSError):  # that of the listing itself
            os.close(number)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in (None, "cputrain"):
        logging.getLogger(name).handlers.clear()
    be_program(words, given["env"])


def be_program(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run what `python WORDS` would run, and end this process as the interpreter would."""
    atexit._clear()  # the parent's
    leave(exit_code(words, env))


def exit_code(words: Sequence[str], env: Mapping[str, str]) -> object:
    """Run what `python WORDS` would run; return what it gives to sys.exit, or 1 after its exception is printed."""
    try:
        become(words, env)
    except SystemExit as end:
        return end.code
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  as the interpreter does at the top
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def leave(code: object) -> NoReturn:
    """Exit as sys.exit(code) does. Not by the interpreter's own end, which touches, and so copies, all that it has
    imported: half a second of CPU time."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def fork_ranks() -> None:
    """Let this process, a command of cputrain, fork its ranks and bind them without exec."""
    from _cputrain_autoload import offer_stack
    from cputrain.mpi.supervise import processes
    from cputrain.training import session

    class Subprocess:
        """The module subprocess for the supervisor of ranks."""

        Popen = ForkedRank
        PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    def execvpe(file: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        words = words_of([*arguments])
        if words is None:
            EXECVPE(file, arguments, env)
        else:
            offer_stack(env)  # as `import torch` would
            be_program(words, env)

    processes.subprocess = Subprocess
    os.execvpe = execvpe
    session.misplaced_threads = lambda worker, team: []  # OpenMP was loaded before the variables that place its threads


EXECVPE = os.execvpe


def main() -> None:
    client, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    select.select([client, listener], [], [])

    import hypothesis  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.nn.functional
    import torch.nn.parallel
    import torch.utils.data

    import cputrain

    for module in walk_packages(cputrain.__path__, "cputrain."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # of an optional requirement
                import_module(module.name)

    # A child that collected all that is imported would copy it, in 1 s of CPU time: each rank does at its end.
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None

    request = serve(client, listener)
    if request is None:
        return
    os.chdir(request["cwd"])
    if "pus" in request:
        os.sched_setaffinity(0, request["pus"])
    os.environ.clear()
    os.environ.update(request["env"])
    torch.distributed.set_debug_level_from_env()
    if request["words"][:2] == ["-m", "cputrain"]:
        fork_ranks()
        be_program(request["words"], request["env"])
    code = exit_code(request["words"], request["env"])
    if GOOD_BYE.search(Path("/proc/self/maps").read_text(encoding="utf-8")):
        sys.exit(code)
    leave(code)


if __name__ == "__main__":
    main()
