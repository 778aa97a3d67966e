"""Agent of one rank on its host: supervise the rank, report its heartbeats and exit, end it with the job.

python -m cputrain.mpi.supervise.agent --report-to HOST:PORT --into DIR -- CMD...
"""

import argparse
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.rank import Rank, rank_from_env
from cputrain.affinity.terminal import ExitStatus, exit_status, one_line, status_of, use_utf8
from cputrain.mpi.supervise.ranks import RankSupervisor
from cputrain.mpi.supervise.signals import FAILURE_GRACE_S, SAVE_S, InterruptedBySignalError, StopSignals
from cputrain.mpi.supervise.wire import (
    HEARTBEAT_TIMEOUT_S,
    TOKEN_VARIABLE,
    Answer,
    Connection,
    Exit,
    Hello,
    Preempt,
    ShowStack,
    Signaled,
    Stack,
    Stop,
    heartbeat_interval,
    join_job,
)

POLL_S = 0.2
MAX_LINE = 1000  # characters reported of each of a rank's last lines


# No option may begin like one of torchrun's: torchrun would take it for its own, wherever it stands.
def main(arguments: list[str], env: Mapping[str, str]) -> int:
    """Return the rank's exit status; 128 + n if signal n ended it; 1 if the job ended it."""
    parser = argparse.ArgumentParser(prog="python -m cputrain.mpi.supervise.agent", description=__doc__)
    parser.add_argument("--report-to", required=True, metavar="HOST:PORT")
    parser.add_argument("--into", type=Path, required=True, dest="logs", metavar="DIR", help="folder for rank-N.log")
    parser.add_argument("--plain-rank", type=int, help="rank whose lines are not labeled")
    parser.add_argument("--live", action="store_true", help="redraw progress bars, for a terminal")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    try:
        rank = rank_from_env(env)
        if rank is None:
            raise InputError("this agent was not started by a launcher: start it with cputrain launch")
        connection, orders = _join(options.report_to, env.get(TOKEN_VARIABLE, ""), rank)
        if any(isinstance(order, Stop) for order in orders):
            return ExitStatus.FAILED
        host = next(order.label for order in orders if isinstance(order, Answer))
        label = "" if rank.rank == options.plain_rank else f"[{host}:{rank.rank}] "
        try:
            supervisor = RankSupervisor(options.logs, sys.stdout, sys.stderr, live=(options.live, options.live))
            return supervise(rank, tuple(options.command), env, supervisor, connection, orders, label=label)
        except Exception as error:
            _report_failure(connection, options.logs / f"rank-{rank.rank}.log", error)
            raise
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, f"cputrain.mpi.supervise.agent: {socket.gethostname()}")


def _join(server: str, token: str, rank: Rank) -> tuple[Connection, list[Any]]:
    """Connect to the monitor; return the connection and its first messages."""
    if not token:
        raise InputError(
            f"{TOKEN_VARIABLE} is not set on {socket.gethostname()}: the launcher must pass its environment on to the "
            "ranks (with srun, unset SLURM_EXPORT_ENV)"
        )
    try:
        hello = Hello(rank=rank.rank, host=socket.gethostname())
        return join_job(server, token, (Answer, Stop, Preempt, ShowStack), hello)
    except OSError as error:
        raise RunError(
            f"rank {rank.rank} on {socket.gethostname()} cannot reach the launching host at {server} ({error}): check "
            "the firewall between them"
        ) from None


def supervise(
    rank: Rank,
    command: tuple[str, ...],
    env: Mapping[str, str],
    supervisor: RankSupervisor,
    connection: Connection,
    orders: list[Any],
    *,
    label: str,
) -> int:
    """Run the command as this rank until it exits, the job ends or the monitor is silent; return the agent's status.

    `orders` are the monitor's messages that have arrived so far.
    """
    link = MonitorLink(connection, supervisor, heartbeat_interval(rank.world_size))
    exited = False
    with StopSignals(supervisor.preempt) as signals:
        try:
            supervisor.sample(whole_host=rank.local_rank == 0)
            supervisor.start(rank.rank, command, env, label=label, inherit_files=True)
            supervisor.watch(connection.socket, link.receive)
            link.take(orders)
            exited = _watch(supervisor, link, signals)
        except InterruptedBySignalError as stop:
            connection.send(Signaled(number=stop.args[0]))
            link.grace_s = SAVE_S  # the launcher or the scheduler ends this agent
        finally:
            supervisor.stop(link.grace_s, lambda: link.at_once() or signals.again)
            supervisor.close()
        if not supervisor.ranks:
            return ExitStatus.FAILED
        end = supervisor.ranks[0].exit()
        tail = tuple(line.rpartition("\r")[2][:MAX_LINE] for line in end.tail)
        shortage = astuple(end.shortage) if end.shortage else None
        report = Exit(status=end.status, tail=tail, log=end.log, by_job=not exited, shortage=shortage)
        reported = connection.send(report)
        if reported and exited and end.status != 0:
            _await_stop(connection)
    connection.close()
    if not exited:
        return ExitStatus.FAILED
    return end.status if end.status >= 0 else 128 - end.status


class MonitorLink:
    """The agent's end of the connection to the monitor: send a heartbeat every `interval_s`, carry out orders.

    `grace_s` is the time that the rank gets to exit once it is told to.
    """

    def __init__(self, connection: Connection, supervisor: RankSupervisor, interval_s: float) -> None:
        self.grace_s = FAILURE_GRACE_S
        self._interval_s = interval_s
        self._connection = connection
        self._supervisor = supervisor
        self._sent = self._received = supervisor.clock.now()
        self._stop = self._gone = False

    @property
    def job_ended(self) -> bool:
        """Whether the monitor has ended the job or is gone."""
        return self._stop or self.is_gone

    @property
    def is_gone(self) -> bool:
        """Whether the monitor is gone."""
        return self._gone or self._supervisor.clock.now() - self._received > HEARTBEAT_TIMEOUT_S

    def at_once(self) -> bool:
        """Return whether to stop waiting for the rank's exit because the monitor is gone; send a heartbeat if one is
        due."""
        self.send_heartbeat()
        return self.is_gone

    def receive(self) -> None:
        """Process the messages that have arrived."""
        messages = self._connection.receive()
        self._gone = messages is None
        self.take(messages or [])
        self._received = self._supervisor.clock.now()

    def take(self, messages: list[Any]) -> None:
        """Carry out the monitor's messages."""
        for message in messages:
            if isinstance(message, Stop):
                self._stop, self.grace_s = True, message.grace_s
            elif isinstance(message, Preempt) and not self._stop:
                self._supervisor.preempt()
            elif isinstance(message, ShowStack):
                (rank,) = self._supervisor.ranks
                lines = self._supervisor.stacks([rank.rank]).get(rank.rank, ())
                self._connection.send(Stack(lines=tuple(line[:MAX_LINE] for line in lines)))

    def send_heartbeat(self) -> None:
        """Send a heartbeat if one is due."""
        now = self._supervisor.clock.now()
        if now - self._sent >= self._interval_s:
            self._connection.send(self._supervisor.ranks[0].meter.activity)
            self._sent = now


def _watch(supervisor: RankSupervisor, link: MonitorLink, signals: StopSignals) -> bool:
    """Wait; return True if the rank has exited by itself, False if the job has to end it."""
    while True:
        supervisor.poll(POLL_S)
        signals.check()
        link.send_heartbeat()
        if link.job_ended:
            return False
        if supervisor.all_exited:
            return True


def _report_failure(connection: Connection, log: Path, error: Exception) -> None:
    """Report this agent's failure to the monitor as its rank's exit, and wait until the monitor has ended the job."""
    line = (one_line(error) or repr(error))[:MAX_LINE]
    if connection.send(Exit(status=status_of(error), tail=(line,), log=str(log), by_job=False)):
        _await_stop(connection)


def _await_stop(connection: Connection) -> None:
    """Wait after a rank's failure until the monitor ends the job.

    A launcher that sees one process fail ends the others at once, which would hide the cause from the monitor.
    """
    deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S
    with StopSignals() as signals:
        while time.monotonic() < deadline and not signals.again:
            if select.select([connection], [], [], POLL_S)[0]:
                messages = connection.receive()
                if messages is None or any(isinstance(message, Stop) for message in messages):
                    return


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:], os.environ))
