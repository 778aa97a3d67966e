"""Programs in children of one interpreter that has imported torch, as each import of it takes seconds of CPU time.

`Forked` runs what `python -m MODULE` or `python -c CODE` would run. No library of oneCCL or MPI is loaded before, and
no thread has been started. All children have the same hash seed: tests under torchrun, mpirun and launch start
interpreters of their own.
"""

import atexit
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1
MOST_BYTES = 1 << 20  # of a request: words and environment variables
# Read by Python, libgomp and torch as they are loaded, which is before a program's own variables are there.
AT_START = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": ""}


class Forked:
    """A program of the interpreter that forks, with the methods of subprocess.Popen that tests use."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str], out: IO[bytes], err: IO[bytes]) -> None:
        self.args, self.stdout, self.stderr = words, out, err
        self.returncode: int | None = None
        self.pid: int = answer({"words": words, "env": env}, out.fileno(), err.fileno())
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

    def kill(self) -> None:
        """End it, if it runs."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


def answer(request: dict[str, Any], *files: int) -> int:
    """What the interpreter that forks answers to a request."""
    server = connection()
    socket.send_fds(server, [json.dumps(request).encode()], files)
    reply = server.recv(100)
    assert reply, "the interpreter that forks has ended"
    return int(reply)


_servers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []


def connection() -> socket.socket:
    """Return the connection to the interpreter that forks, which ends with this process of tests; start a new one if it
    has ended: jobs that run in the process of a test end all of its descendants."""
    if _servers and _servers[-1][0].poll() is None:
        return _servers[-1][1]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = (sys.executable, "-m", "tests.support.forked", str(theirs.fileno()))
    process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **AT_START}, pass_fds=(theirs.fileno(),))
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # the last to be registered is the first to be called
    _servers.append((process, ours))
    return ours


def serve(client: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request to start one, until the client is gone. In a child: its request."""
    while True:
        message, files, _, _ = socket.recv_fds(client, MOST_BYTES, 2)
        if not message:
            return None
        request: dict[str, Any] = json.loads(message)
        if "ended" in request:
            answered = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
        else:
            answered = os.fork()
            if answered == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                client.close()
                for number, file in enumerate(files, start=1):
                    os.dup2(file, number)
                    os.close(file)
                return request
            for file in files:
                os.close(file)
        client.send(str(answered).encode())


def main() -> None:
    import hypothesis  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.nn.functional
    import torch.nn.parallel
    import torch.utils.data

    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    os.environ.clear()
    os.environ.update(request["env"])
    torch.distributed.set_debug_level_from_env()
    option, program, *words = request["words"]
    sys.argv = [option, *words]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
