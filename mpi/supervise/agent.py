"""The agent of one rank on its host: supervises the rank, reports its heartbeat and exit, ends it with the job.

python -m mpi.supervise.agent --report-to HOST:PORT --into DIR -- CMD...
"""

import argparse
import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from affinity.errors import InputError, RunError
from affinity.exit_status import exit_status
from affinity.ranks.rank import Rank, discover
from mpi.supervise.connection import GRACE_S, HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, TOKEN_VARIABLE, Connection, connect
from mpi.supervise.process import is_stopped
from mpi.supervise.ranks import RankSupervisor
from mpi.supervise.signals import PREEMPTION_SIGNAL, InterruptedBySignalError, ignore_stop_signals, interruptible

POLL_S = 0.2
MAX_LINE = 1000  # characters of each of a rank's last lines that are reported


# No option of ours may begin one of torchrun's: it would take it for its own, wherever it stands.
def main(arguments: list[str]) -> int:
    """The rank's exit status; 128 + n where signal n ended it; 1 where the job ended it."""
    parser = argparse.ArgumentParser(prog="python -m mpi.supervise.agent", description=__doc__)
    parser.add_argument("--report-to", required=True, metavar="HOST:PORT")
    parser.add_argument("--into", type=Path, required=True, dest="logs", metavar="DIR", help="folder of rank-N.log")
    parser.add_argument("--plain-rank", type=int, help="the rank whose lines have no label")
    parser.add_argument("--live", action="store_true", help="a person watches: redraw progress bars")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    try:
        rank = discover(os.environ)
        if rank is None:
            raise InputError("no launcher has started this agent: start it with cputrain launch")
        connection = _connect(options.report_to, os.environ.get(TOKEN_VARIABLE, ""), rank)
        label = "" if rank.rank == options.plain_rank else f"[{socket.gethostname().partition('.')[0]}:{rank.rank}] "
        supervisor = RankSupervisor(options.logs, sys.stdout, sys.stderr, live=options.live)
        return supervise(rank, tuple(options.command), os.environ, supervisor, connection, label=label)
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, f"mpi.supervise.agent: {socket.gethostname()}")


def _connect(server: str, token: str, rank: Rank) -> Connection:
    try:
        return connect(server, token, rank.rank)
    except OSError as error:
        raise RunError(
            f"rank {rank.rank} on {socket.gethostname()} cannot reach the launching host at {server}: {error}: check "
            "the firewall between them"
        ) from None


def supervise(
    rank: Rank,
    command: tuple[str, ...],
    env: Mapping[str, str],
    supervisor: RankSupervisor,
    connection: Connection,
    *,
    label: str,
) -> int:
    """Run the command as this rank until it exits, the job ends or the monitor is silent; the agent's exit status."""
    link = MonitorLink(connection, supervisor)
    exited = False
    with interruptible(lambda: supervisor.signal(PREEMPTION_SIGNAL)):
        try:
            supervisor.start(rank.rank, command, env, label=label, inherit_files=True)
            supervisor.watch(connection.socket, link.receive)
            supervisor.sample(whole_host=rank.local_rank == 0)
            exited = _watch(supervisor, link)
        except InterruptedBySignalError:
            pass  # the launcher ends this agent
        finally:
            supervisor.stop(GRACE_S)
            ignore_stop_signals()
            supervisor.close()
        if not supervisor.ranks:
            return 1
        end = supervisor.ranks[0].exit()
        tail = [line[:MAX_LINE] for line in end.tail]
        reported = connection.send(type="exit", status=end.status, tail=tail, log=end.log, by_job=not exited)
        if reported and exited and end.status != 0:
            _await_stop(connection)
    connection.close()
    if not exited:
        return 1
    return end.status if end.status >= 0 else 128 - end.status


class MonitorLink:
    """The agent's side of the connection to the monitor: sends heartbeats, takes orders."""

    def __init__(self, connection: Connection, supervisor: RankSupervisor) -> None:
        self._connection = connection
        self._supervisor = supervisor
        self._sent = self._received = time.monotonic()
        self._stop = False

    @property
    def job_ended(self) -> bool:
        """Whether the monitor has ended the job, or is gone."""
        return self._stop or time.monotonic() - self._received > HEARTBEAT_TIMEOUT_S

    def receive(self) -> None:
        """Take the messages that have arrived."""
        messages = self._connection.receive()
        types = {"stop"} if messages is None else {message.get("type") for message in messages}
        self._stop = self._stop or "stop" in types
        if "preempt" in types and not self._stop:
            self._supervisor.signal(PREEMPTION_SIGNAL)
        self._received = time.monotonic()

    def send_heartbeat(self) -> None:
        """Send a heartbeat where one is due."""
        now = time.monotonic()
        if now - self._sent >= HEARTBEAT_S:
            self._connection.send(type="heartbeat", stopped=is_stopped(self._supervisor.ranks[0].process.pid))
            self._sent = now


def _watch(supervisor: RankSupervisor, link: MonitorLink) -> bool:
    """True when the rank has exited by itself, False when the job has to end it."""
    while True:
        supervisor.poll(POLL_S)
        link.send_heartbeat()
        if link.job_ended:
            return False
        if supervisor.all_exited:
            return True


def _await_stop(connection: Connection) -> None:
    """Outlive a rank that failed until the monitor ends the job.

    A launcher that sees one process fail ends the others at once, and the monitor could not tell cause from effect.
    """
    deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
    with interruptible(), selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                if selector.select(left):
                    messages = connection.receive()
                    if messages is None or any(message.get("type") == "stop" for message in messages):
                        return
        except InterruptedBySignalError:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
