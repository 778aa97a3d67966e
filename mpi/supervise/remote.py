"""Run a job through a launcher: start it, watch its ranks on all hosts, end all when one fails."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from affinity.exit_status import ExitStatus, status_of_signal
from affinity.start import own_program
from affinity.terminal import redraws
from affinity.wording import counted, first_named
from mpi.hosts.address import own_address
from mpi.hosts.groups import job_plan_json
from mpi.launchers.command import launch_command
from mpi.launchers.job import Job, bound_command
from mpi.launchers.launcher import InstalledLauncher, LaunchCommand
from mpi.supervise.connection import TOKEN_VARIABLE, new_token
from mpi.supervise.exits import SETTLE_S, JobFailedError, describe_exit, describe_status, first_cause
from mpi.supervise.monitor import Monitor
from mpi.supervise.output import Relay, Terminal
from mpi.supervise.process import start_launcher, write_files
from mpi.supervise.reaper import end_descendants
from mpi.supervise.signals import (
    FAILURE_GRACE_S,
    SAVE_S,
    InterruptedBySignalError,
    interruptible,
    stopped_again,
    until_interrupted,
)
from mpi.supervise.stalls import (
    Stacks,
    Stall,
    StallWatch,
    able_to_show,
)

POLL_S = 0.1
STALL_CHECK_S = 1.0  # between two looks at what the ranks do
LAST_POLL_S = 0.01  # all ranks have succeeded: the launcher ends at once
STACK_S = 1.5  # for the agents' answers
AGENT_EXIT_S = 1.0  # of the agents, after their ranks
RELAY_S = 1.0  # for the rest of the launcher's output
KILL_S = 1.0  # between SIGTERM and SIGKILL for what the launcher has started
START_TIMEOUT_S = 120.0  # from the launcher's start, or the last rank's hello, to the next one's
LAUNCHER_END_S = 60.0  # from the last rank's exit to the launcher's own
logger = logging.getLogger(__name__)


def remote_command(
    job: Job, installed: InstalledLauncher, folder: Path, address: str, port: int | str, token: str, *, live: bool
) -> LaunchCommand:
    """What starts the job's ranks, each behind an agent that reports to this host's address and port; with `live`
    progress bars are redrawn, for a person who watches."""
    plain = () if job.plain_rank is None else ("--plain-rank", str(job.plain_rank))
    report = ("--report-to", f"{address}:{port}", "--into", str(job.log_dir.resolve()))
    agent = (*own_program("mpi.supervise.agent"), *report, *plain, *(["--live"] if live else ()), "--")
    bound = bound_command(replace(job, plan_path=job.plan_path.resolve()))
    with_token = replace(job, secrets=((TOKEN_VARIABLE, token),))
    return launch_command(with_token, installed, (*agent, *bound), folder.resolve())


def run_remote(job: Job, installed: InstalledLauncher, folder: Path, env: Mapping[str, str]) -> int:
    """Run the job to its end; 0 when all ranks succeeded, 2 when all that failed refused their input. `env` is the
    environment of the launcher.

    Raises JobFailedError naming rank, host, its exit or silence, its log and last lines. On a stop signal gives the
    ranks SAVE_S to end on all hosts and returns 128 + the signal; SIGUSR1 is passed on to the ranks.
    """
    address = own_address(job.hosts)
    monitor = Monitor(new_token(), job.host_of_ranks, address)
    live = redraws(sys.stdout, env)
    command = remote_command(job, installed, folder, address, monitor.port, monitor.token, live=live)
    write_files(((job.plan_path, job_plan_json(job.groups)), *command.files))
    grace_s = FAILURE_GRACE_S
    with interruptible(monitor.preempt):
        running: _Running | None = None
        try:
            with until_interrupted():
                running = _Running(start_launcher(command, env, subprocess.PIPE), job.log_dir)
                return _watch(job, installed, running.process, monitor)
        except InterruptedBySignalError as stop:
            number, grace_s = stop.args[0], SAVE_S
            ranks, name = counted(job.world_size, "rank"), signal.Signals(number).name
            logger.warning("\nstopping %s (%s) within %g s; repeat the signal to stop at once", ranks, name, grace_s)
            return status_of_signal(int(number))
        finally:
            _tear_down(running, monitor, grace_s)


class _Running:
    """The launcher's process, and its output on the way to the terminal."""

    def __init__(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self.relays = (
            Relay(process.stdout, Terminal(stream=sys.stdout, name="stdout", logs=logs)),
            Relay(process.stderr, Terminal(stream=sys.stderr, name="stderr", logs=logs)),
        )


def _watch(job: Job, installed: InstalledLauncher, process: subprocess.Popen[bytes], monitor: Monitor) -> int:
    arrived, arrived_at = 0, monitor.clock.now()
    checked_at = arrived_at
    stalls = StallWatch(job.starting)
    done_at: float | None = None
    while True:
        done = len(monitor.ranks) == job.world_size and all(rank.succeeded for rank in monitor.ranks.values())
        monitor.poll(LAST_POLL_S if done else POLL_S)
        ended = process.poll() is not None
        done_at = (done_at or monitor.clock.now()) if done else None
        if done and ended and process.returncode == 0:
            return 0
        if ended or monitor.failed():
            settled = time.monotonic() + SETTLE_S
            while time.monotonic() < settled:
                monitor.poll(POLL_S)
        failed = monitor.failed()
        if failed:
            exits = [rank.exit for rank in failed if rank.exit is not None]
            refused = all(one.status == ExitStatus.WRONG_INPUT for one in exits)  # by the ranks, which have printed it
            if refused and len(exits) == len(failed):
                if not job.names_errors:
                    logger.warning("cputrain: %s", describe_exit(exits[0]))
                return ExitStatus.WRONG_INPUT
            raise _failure(job, monitor, stalls.before(monitor.clock.now()))
        if ended:
            return _after_launcher(job, installed, process.returncode, monitor)
        now = monitor.clock.now()
        if done_at is not None and now - done_at > LAUNCHER_END_S:
            late = f"{installed.name} has not ended {LAUNCHER_END_S:g} s after all ranks, and is stopped"
            logger.warning("cputrain: %s; the ranks have exited with status 0", late)
            return 0
        if len(monitor.ranks) > arrived:
            arrived, arrived_at = len(monitor.ranks), now
        if arrived < job.world_size and now - arrived_at > START_TIMEOUT_S:
            hosts = _missing(job, monitor)
            raise JobFailedError(
                f"no further rank has reported for {START_TIMEOUT_S:g} s; missing: {_named(hosts)}", hosts=hosts
            )
        if now - checked_at >= STALL_CHECK_S:
            checked_at = now
            stalls.check(monitor.standings(), now, lambda stall: _stacks(monitor, stall))


def _failure(job: Job, monitor: Monitor, stall: Stall | None) -> JobFailedError:
    """What failed first: a rank that has exited; a silent one where none has. `stall` is the one just before."""
    cause = monitor.first_exit()
    if cause is None:
        hosts = tuple(dict.fromkeys(job.host_of_ranks[status.rank] for status in monitor.failed()))
        return JobFailedError(monitor.cause(), hosts=hosts)
    return JobFailedError(monitor.cause(stall, _stacks(monitor, stall)), shortage=cause.shortage, tail=cause.tail)


def _stacks(monitor: Monitor, stall: Stall | None) -> Stacks:
    """The Python stacks of the awaited ranks that can show one."""
    ranks = [rank for rank in (able_to_show(stall) if stall else ()) if monitor.ranks[rank].exit is None]
    before = {rank: monitor.ranks[rank].stack for rank in ranks}
    monitor.show_stacks(ranks)
    deadline = time.monotonic() + STACK_S
    while any(monitor.ranks[rank].stack is None for rank in ranks) and time.monotonic() < deadline:
        monitor.poll(POLL_S)
    return {rank: monitor.ranks[rank].stack or before[rank] or () for rank in ranks}


def _after_launcher(job: Job, installed: InstalledLauncher, status: int, monitor: Monitor) -> int:
    """0 where the launcher and all ranks have succeeded. Raises JobFailedError otherwise."""
    if status == 0 and all(rank.succeeded for rank in monitor.ranks.values()):
        return 0
    if not monitor.ranks:
        why = f"{installed.name} {describe_status(status)} before any rank started; see its output above"
        raise JobFailedError(why, hosts=job.hosts)
    hosts = _missing(job, monitor)
    ended = [rank.exit for rank in monitor.ranks.values() if rank.exit and rank.exit.status]
    if not hosts and ended:  # by their agents
        first = first_cause(ended)
        raise JobFailedError(f"the agent of rank {first.rank} was stopped by a signal; {describe_exit(first)}")
    if not hosts:
        raise JobFailedError(f"{installed.name} {describe_status(status)}, after all ranks had succeeded")
    raise JobFailedError(
        f"{installed.name} {describe_status(status)}; the ranks of {_named(hosts)} have not reported their exit",
        hosts=hosts,
    )


def _missing(job: Job, monitor: Monitor) -> tuple[str, ...]:
    """The hosts of ranks that have not started, or have not reported their exit."""
    ranks = job.host_of_ranks
    missing = (i for i in range(len(ranks)) if i not in monitor.ranks or monitor.ranks[i].exit is None)
    return tuple(dict.fromkeys(ranks[i] for i in missing))


def _named(hosts: Sequence[str]) -> str:
    return f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts):,} hosts ({first_named(hosts)})"


def _tear_down(running: _Running | None, monitor: Monitor, grace_s: float) -> None:
    """End the ranks through their agents, then the launcher: once they have had grace_s, or at a second stop signal."""
    if running is not None and running.process.poll() is None:
        monitor.stop(grace_s)
        deadline = time.monotonic() + grace_s + AGENT_EXIT_S
        while time.monotonic() < deadline and running.process.poll() is None and not stopped_again():
            monitor.poll(POLL_S)
    monitor.close()
    end_descendants(KILL_S)
    for relay in running.relays if running is not None else ():
        relay.finish(RELAY_S)
