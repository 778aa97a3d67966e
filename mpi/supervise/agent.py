"""One rank's guardian on its host: starts it, labels and logs its output, samples what it uses, gives signs of life,
ends it with the job.

python -m mpi.supervise.agent --report-to HOST:PORT --into DIR -- CMD...
"""

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from affinity.errors import InputError, RunError
from affinity.exit_status import exit_status
from affinity.ranks.rank import Rank, discover
from mpi.supervise.connection import BEAT_S, SILENT_S, TOKEN_VARIABLE, Line
from mpi.supervise.exits import LAST_LINES
from mpi.supervise.output import Stream
from mpi.supervise.process import signal_group, start_rank
from mpi.supervise.signals import NOTICE
from mpi.usage.file import FOLDER as USAGE
from mpi.usage.sampler import Sampler

POLL_S = 0.2
GRACE_S = 3.0
LONGEST_LINE = 1000  # letters of each of a rank's last lines that are told


# No option of ours may begin one of torchrun's: it would take it for its own, wherever it stands.
def main(arguments: list[str]) -> int:
    """The rank's exit status; 128 + n where signal n ended it; 1 where the job ended it."""
    parser = argparse.ArgumentParser(prog="python -m mpi.supervise.agent", description=__doc__)
    parser.add_argument("--report-to", required=True, metavar="HOST:PORT", dest="monitor")
    parser.add_argument("--into", type=Path, required=True, dest="logs", metavar="DIR", help="folder of rank-N.log")
    parser.add_argument("--plain-rank", type=int, help="whose lines have no label")
    parser.add_argument("--live", action="store_true", help="a person watches: redraw progress bars")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    try:
        rank = discover(os.environ)
        if rank is None:
            raise InputError("no launcher has started this agent: it is for cputrain launch to call")
        host, _, port = options.monitor.rpartition(":")
        line = _connect(host, int(port), rank)
        return guard(
            rank,
            tuple(options.command),
            line,
            options.logs,
            labelled=rank.rank != options.plain_rank,
            live=options.live,
        )
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, f"mpi.supervise.agent: {socket.gethostname()}")


def _connect(host: str, port: int, rank: Rank) -> Line:
    try:
        connection = socket.create_connection((host, port), timeout=SILENT_S)
    except OSError as error:
        raise RunError(
            f"rank {rank.rank} on {socket.gethostname()} cannot reach the launching host at {host}:{port}: {error}: "
            "look at the firewall between them"
        ) from None
    line = Line(connection)
    line.send(what="hello", token=os.environ.get(TOKEN_VARIABLE, ""), rank=rank.rank, host=socket.gethostname())
    return line


def guard(rank: Rank, command: tuple[str, ...], line: Line, logs: Path, *, labelled: bool, live: bool) -> int:
    """Run the command as this rank to its end, or until the job ends or the monitor is silent."""
    signal.signal(signal.SIGTERM, _leave)
    label = f"[{socket.gethostname().partition('.')[0]}:{rank.rank}] " if labelled else ""
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"rank-{rank.rank}.log"
    with path.open("wb", buffering=0) as log, selectors.DefaultSelector() as selector:
        process = _start(command)
        signal.signal(NOTICE, lambda _number, _frame: process.send_signal(NOTICE))
        streams = []
        for pipe, terminal in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            streams.append(Stream(label=label, terminal=terminal, log=log, live=live))
            selector.register(pipe, selectors.EVENT_READ, streams[-1])
        selector.register(line.connection, selectors.EVENT_READ, line)
        sampler: Sampler | None = None
        try:
            sampler = Sampler(logs.parent / USAGE, {rank.rank: process.pid}, whole_host=rank.local_rank == 0)
            ended = _watch(process, selector, line, sampler)
        except _TerminatedError:
            ended = False
        if ended:
            signal_group(process.pid, signal.SIGKILL)  # what the rank has left behind
        else:
            _end(process)
        for stream in streams:
            stream.close()
    status = process.wait()
    if sampler is not None:
        sampler.ended(rank.rank)
        sampler.close()
    tail = [text[:LONGEST_LINE] for text in path.read_text(errors="replace").splitlines()[-LAST_LINES:]]
    told = line.send(what="end", status=status, tail=tail, log=str(path), by_job=not ended)
    if told and ended and status != 0:
        _await_stop(line)
    line.close()
    if not ended:
        return 1
    return status if status >= 0 else 128 - status


def _start(command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    try:
        return start_rank(command, os.environ, inherit_files=True)
    except OSError as error:
        raise InputError(f"cannot start {command[0]!r}: {error.strerror}") from None


def _watch(process: subprocess.Popen[bytes], selector: selectors.BaseSelector, line: Line, sampler: Sampler) -> bool:
    """True when the rank has ended by itself, False when the job has to end it."""
    heard = beaten = time.monotonic()
    while True:
        for key, _ in selector.select(POLL_S):
            if key.data is line:
                messages = line.receive()
                said = {"stop"} if messages is None else {message.get("what") for message in messages}
                if "stop" in said:
                    return False
                if "notice" in said:
                    process.send_signal(NOTICE)
                heard = time.monotonic()
            else:
                _feed(selector, key)
        now = time.monotonic()
        if now - beaten >= BEAT_S:
            line.send(what="beat", stopped=_is_stopped(process.pid))
            beaten = now
        if now - heard > SILENT_S:
            return False
        sampler.tick()
        if _has_ended(process, selector):
            _drain(selector)
            return True


def _await_stop(line: Line) -> None:
    """Outlive a rank that failed until the monitor ends the job.

    A launcher that sees one process fail ends the others at once, and the monitor could not tell cause from effect.
    """
    deadline = time.monotonic() + SILENT_S
    with selectors.DefaultSelector() as selector:
        selector.register(line.connection, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                if selector.select(left):
                    messages = line.receive()
                    if messages is None or any(message.get("what") == "stop" for message in messages):
                        return
        except _TerminatedError:
            return


def _has_ended(process: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> bool:
    """Whether the rank has ended; one that has closed its output is about to, and waited for a moment."""
    if any(isinstance(key.data, Stream) for key in selector.get_map().values()):
        return process.poll() is not None
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _feed(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    data = os.read(key.fd, 1 << 16)
    if data:
        key.data.feed(data)
    else:
        selector.unregister(key.fileobj)


def _drain(selector: selectors.BaseSelector) -> None:
    """What a rank printed last; not what its own children go on printing."""
    while ready := [key for key, _ in selector.select(0) if isinstance(key.data, Stream)]:
        for key in ready:
            _feed(selector, key)


def _is_stopped(pid: int) -> bool:
    """Whether a process has been stopped (SIGSTOP), and computes nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the rank and everything it has started: asked first, killed after GRACE_S."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        signal_group(process.pid, number)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(POLL_S / 4)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()


class _TerminatedError(Exception):
    """The launcher has told this agent to end."""


def _leave(_number: int, _frame: object) -> None:
    raise _TerminatedError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
