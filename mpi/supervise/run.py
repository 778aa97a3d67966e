"""Run a job to its end: as ranks on this host, or through agents on many hosts."""

import logging
import math
import random
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from cputrain.affinity.rank import LOOPBACK
from cputrain.affinity.start import isolated_command
from cputrain.affinity.terminal import ExitStatus, redraws, status_of_signal
from cputrain.affinity.wording import first_named, plural
from cputrain.mpi.hostfile import job_plan_json, own_address
from cputrain.mpi.launch_command import build_launch_command
from cputrain.mpi.launchers import InstalledLauncher, Job, LaunchCommand, bound_command, local_commands
from cputrain.mpi.supervise.monitor import Monitor
from cputrain.mpi.supervise.processes import (
    SETTLE_S,
    JobFailedError,
    RankExit,
    describe_exit,
    describe_status,
    end_descendants,
    first_cause,
    signal_name,
    start_launcher,
    write_files,
)
from cputrain.mpi.supervise.ranks import RankProcess, RankSupervisor, Relay, Terminal
from cputrain.mpi.supervise.signals import (
    FAILURE_GRACE_S,
    PREEMPTION_SIGNAL,
    SAVE_S,
    InterruptedBySignalError,
    StopSignals,
    stop_signals,
)
from cputrain.mpi.supervise.stalls import MAX_STACKS, Stacks, Stall, StallWatch, describe_failure, inspectable_ranks
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE, new_token

LOCAL_POLL_S = 0.05
# Below the ports of mpirun's jobs (affinity/rank.py) and Linux's ephemeral ports.
PORTS, PORTS_TRIED = range(10_000, 20_000), 100
CLAIMS_KEPT = 64
_claims: deque[socket.socket] = deque()
logger = logging.getLogger(__name__)

REMOTE_POLL_S = 0.1
STALL_CHECK_S = 1.0  # between two checks for stalls
LAST_POLL_S = 0.01  # once all ranks have succeeded: the launcher exits soon
AGENT_EXIT_S = 1.0  # for the agents to exit after their ranks
RELAY_S = 1.0  # for the rest of the launcher's output
KILL_S = 1.0  # between SIGTERM and SIGKILL for the launcher's processes
START_TIMEOUT_S = 120.0  # from the launcher's start, or the last rank's hello, to the next hello
LAUNCHER_END_S = 60.0  # from the last rank's exit to the launcher's exit


@dataclass(slots=True)
class SavedStop:
    """The end of a job whose ranks save before they stop: the signal that requested it (0: none yet), the monotonic
    time at which the ranks are ended anyway, and whether the stop has yet to be reported."""

    number: int = 0
    deadline: float = math.inf
    unreported: bool = False


def run_local(
    job: Job,
    env: Mapping[str, str],
    out: TextIO | None = None,
    err: TextIO | None = None,
    *,
    save_first: bool = False,
) -> int:
    """Run the job's workers on this host to their end; return 0 if all succeeded, 2 if all that failed rejected their
    input. `env` is the environment that they inherit.

    Writes the plan. Output is labeled with its rank and also written to log_dir/rank-N.log; resource use is written to
    usage/ beside log_dir. If one rank fails, or is stopped while others run, all are ended, and JobFailedError names
    the rank, its exit or signal, its log and last lines. At a stop signal the ranks get SIGTERM, or with `save_first`
    SIGUSR1, and SAVE_S to save and exit; 128 + the signal is returned. SIGUSR1 is passed on to the ranks. No process
    is left behind in any case.
    """
    out, err = out or sys.stdout, err or sys.stderr
    write_files(((job.plan_path, job_plan_json(job.groups)),))
    port = job.master_port or free_port()
    secret = {TOKEN_VARIABLE: new_token(), **dict(job.secrets)}
    supervisor = RankSupervisor(job.log_dir, out, err, live=(redraws(out, env), redraws(err, env)))
    stop = SavedStop()
    grace_s = FAILURE_GRACE_S

    def preempt(number: int) -> None:
        stop.number, stop.deadline, stop.unreported = number, time.monotonic() + SAVE_S, True
        supervisor.preempt()

    with StopSignals(supervisor.preempt, preempt if save_first else None) as signals:
        try:
            supervisor.sample(whole_host=True)
            for rank, command in zip(job.started, local_commands(job, port), strict=True):
                signals.check()
                label = "" if rank == job.plain_rank else f"[{rank}] "
                supervisor.start(rank, command.argv, {**env, **dict(command.variables), **secret}, label=label)
            signals.unblock_preemption()
            status = _watch_local(supervisor, signals, stop, job, 0.0 if save_first else FAILURE_GRACE_S)
            return status_of_signal(stop.number) if stop.number else status
        except InterruptedBySignalError as stopped:
            number = stopped.args[0]
            grace_s = FAILURE_GRACE_S if save_first else SAVE_S
            supervisor.say(_stop_notice(plural(len(supervisor.ranks), "worker"), number, grace_s))
            return status_of_signal(int(number))
        finally:
            supervisor.stop(grace_s, lambda: signals.again)
            supervisor.close()


def _stop_notice(what: str, number: int, grace_s: float) -> str:
    return f"\nstopping {what} ({signal_name(number)}) within {grace_s:g} s; repeat the signal to stop at once"


def free_port() -> int:
    """Return a TCP port that is free on this host's loopback. No other call gets it while this process has claimed it,
    as it does with its last CLAIMS_KEPT ports. Ephemeral ports are avoided, as the ranks listen seconds later."""
    for port in random.SystemRandom().sample(PORTS, PORTS_TRIED):  # leaves the program's random state unchanged
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0cputrain port {port}")  # an abstract address: no file, and gone with its process
            with socket.socket() as probe:
                probe.bind((LOOPBACK, port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        if len(_claims) > CLAIMS_KEPT:
            _claims.popleft().close()
        return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _failed(supervisor: RankSupervisor, stop: SavedStop) -> list[RankProcess]:
    """Return the ranks that failed. Once the job stops, this excludes ranks that a stop signal ended: schedulers send
    it to all processes, and ranks save before they exit from it."""
    ending = [-number for number in stop_signals()] if stop.number else []
    return [rank for rank in supervisor.ranks if rank.failed and rank.process.returncode not in ending]


def _watch_local(supervisor: RankSupervisor, signals: StopSignals, stop: SavedStop, job: Job, grace_s: float) -> int:
    """Wait for all workers, or for the first failure, after which the others have `grace_s`; return the job's exit
    status. Raises InterruptedBySignalError if the workers take too long to save."""
    stalls = StallWatch(job.starting)
    together = job.instances is None  # then a stopped worker stops all, as they wait for each other
    while not _failed(supervisor, stop):
        if stop.unreported:  # reported here, as the signal handler may interrupt another message
            stop.unreported = False
            name, workers = signal_name(stop.number), plural(len(supervisor.ranks), "worker")
            supervisor.say(f"\n{name}: {workers} save and stop after the next step; repeat the signal to stop at once")
        if supervisor.all_exited:
            return 0
        if time.monotonic() > stop.deadline:
            signals.interrupt(stop.number)
        was_read = supervisor.poll(LOCAL_POLL_S)
        signals.check()  # before failures are judged: a scheduler signals launcher and ranks at the same time
        if was_read and together:
            stalls.check(supervisor.rank_states(), supervisor.clock.now(), supervisor.stacks)
    settled = time.monotonic() + SETTLE_S
    while time.monotonic() < settled and not supervisor.all_exited:
        supervisor.poll(LOCAL_POLL_S)
    signals.check()
    failed = _failed(supervisor, stop)
    if all(rank.process.returncode == ExitStatus.WRONG_INPUT for rank in failed):
        supervisor.drain()
        return _rejected(job, failed[0].exit())
    rank_states, stall = supervisor.rank_states(), stalls.before(supervisor.clock.now())
    stacks = _stacks(supervisor, stall)
    supervisor.stop(grace_s, lambda: signals.again)
    supervisor.drain()
    if stop.number and any(rank.process.returncode == -PREEMPTION_SIGNAL for rank in failed):
        return 0  # stopped before there was anything to save
    cause = first_cause(rank.exit() for rank in failed)
    raise JobFailedError(describe_failure(cause, rank_states, stall, stacks), cause=cause)


def _rejected(job: Job, first: RankExit) -> int:
    """Return the exit status if all failed ranks rejected their input and printed why."""
    if not job.names_errors:
        logger.warning("cputrain: %s", describe_exit(first))
    return ExitStatus.WRONG_INPUT


def _stacks(ranks: RankSupervisor | Monitor, stall: Stall | None) -> Stacks:
    """Return the Python stacks of the first awaited ranks that can be inspected."""
    return ranks.stacks(inspectable_ranks(stall.awaited[:MAX_STACKS])) if stall else {}


def remote_command(
    job: Job, installed: InstalledLauncher, folder: Path, address: str, port: int | str, token: str, *, live: bool
) -> LaunchCommand:
    """Return the command that starts the job's ranks, each under an agent that reports to this host's address and port;
    with `live` progress bars are redrawn, for a terminal."""
    plain = () if job.plain_rank is None else ("--plain-rank", str(job.plain_rank))
    report = ("--report-to", f"{address}:{port}", "--into", str(job.log_dir.resolve()))
    agent = (*isolated_command("cputrain.mpi.supervise.agent"), *report, *plain, *(["--live"] if live else ()), "--")
    bound = bound_command(replace(job, plan_path=job.plan_path.resolve()))
    with_token = replace(job, secrets=((TOKEN_VARIABLE, token),))
    return build_launch_command(with_token, installed, (*agent, *bound), folder.resolve())


def run_remote(job: Job, installed: InstalledLauncher, folder: Path, env: Mapping[str, str]) -> int:
    """Run the job to its end; return 0 if all ranks succeeded, 2 if all that failed rejected their input. `env` is the
    launcher's environment.

    Raises JobFailedError naming rank, host, its exit or silence, its log and last lines. At a stop signal the ranks on
    all hosts get SAVE_S to exit, and 128 + the signal is returned; SIGUSR1 is passed on to the ranks.
    """
    address = own_address(job.hosts)
    monitor = Monitor(new_token(), job.host_of_ranks, address)
    live = redraws(sys.stdout, env)
    command = remote_command(job, installed, folder, address, monitor.port, monitor.token, live=live)
    write_files(((job.plan_path, job_plan_json(job.groups)), *command.files))
    grace_s = FAILURE_GRACE_S
    with StopSignals(monitor.preempt) as signals:
        process: subprocess.Popen[bytes] | None = None
        relays: list[Relay] = []
        try:
            process = start_launcher(command, env, subprocess.PIPE)
            for pipe, stream, name in ((process.stdout, sys.stdout, "stdout"), (process.stderr, sys.stderr, "stderr")):
                assert pipe is not None
                relays.append(Relay(pipe, Terminal(stream=stream, name=name, logs=job.log_dir)))
            return _watch_remote(job, installed, process, monitor, signals)
        except InterruptedBySignalError as stop:
            number, grace_s = stop.args[0], SAVE_S
            logger.warning("%s", _stop_notice(plural(job.world_size, "rank"), number, grace_s))
            return status_of_signal(int(number))
        finally:
            if process is not None and process.poll() is None:  # end the ranks through their agents
                monitor.stop(grace_s)
                deadline = time.monotonic() + grace_s + AGENT_EXIT_S
                while time.monotonic() < deadline and process.poll() is None and not signals.again:
                    monitor.poll(REMOTE_POLL_S)
            monitor.close()
            end_descendants(KILL_S)
            for relay in relays:
                relay.finish(RELAY_S)


def _watch_remote(
    job: Job, installed: InstalledLauncher, process: subprocess.Popen[bytes], monitor: Monitor, signals: StopSignals
) -> int:
    arrived, arrived_at = 0, monitor.clock.now()
    checked_at = arrived_at
    stalls = StallWatch(job.starting)
    done_at: float | None = None
    while True:
        done = len(monitor.ranks) == job.world_size and all(rank.state.finished for rank in monitor.ranks.values())
        monitor.poll(LAST_POLL_S if done else REMOTE_POLL_S)
        signals.check()
        ended = process.poll() is not None
        done_at = (done_at or monitor.clock.now()) if done else None
        if done and ended and process.returncode == 0:
            return 0
        if ended or monitor.failed():
            settled = time.monotonic() + SETTLE_S
            while time.monotonic() < settled:
                monitor.poll(REMOTE_POLL_S)
            signals.check()
        if failed := monitor.failed():
            exits = [rank.state.exit for rank in failed if rank.state.exit is not None]
            if len(exits) == len(failed) and all(rank_exit.status == ExitStatus.WRONG_INPUT for rank_exit in exits):
                return _rejected(job, exits[0])
            if not exits:
                hosts = tuple(dict.fromkeys(job.host_of_ranks[rank.state.rank] for rank in failed))
                raise JobFailedError(monitor.cause(), hosts=hosts)
            stall = stalls.before(monitor.clock.now())
            raise JobFailedError(monitor.cause(stall, _stacks(monitor, stall)), cause=first_cause(exits))
        if ended:
            return _after_launcher(job, installed, process.returncode, monitor)
        now = monitor.clock.now()
        if done_at is not None and now - done_at > LAUNCHER_END_S:
            late = f"{installed.name} was stopped, as it had not exited {LAUNCHER_END_S:g} s after all ranks"
            logger.warning("cputrain: %s; the ranks have exited with status 0", late)
            return 0
        if len(monitor.ranks) > arrived:
            arrived, arrived_at = len(monitor.ranks), now
        if arrived < job.world_size and now - arrived_at > START_TIMEOUT_S:
            hosts = _missing(job, monitor)
            text = f"ranks of {_named(hosts)} have not reported for {START_TIMEOUT_S:g} s: check these hosts"
            raise JobFailedError(text, hosts=hosts)
        if now - checked_at >= STALL_CHECK_S:
            checked_at = now
            stalls.check(monitor.rank_states(), now, monitor.stacks)


def _after_launcher(job: Job, installed: InstalledLauncher, status: int, monitor: Monitor) -> int:
    """Return 0 if the launcher and all ranks succeeded. Raises JobFailedError otherwise."""
    if status == 0 and all(rank.state.finished for rank in monitor.ranks.values()):
        return 0
    if not monitor.ranks:
        why = f"{installed.name} {describe_status(status)} before any rank started; see its output above"
        raise JobFailedError(why, hosts=job.hosts)
    hosts = _missing(job, monitor)
    exits = (rank.state.exit for rank in monitor.ranks.values())
    ended = [rank_exit for rank_exit in exits if rank_exit and rank_exit.status]
    if not hosts and ended:  # the agents ended their ranks
        first = first_cause(ended)
        raise JobFailedError(f"the agent of rank {first.rank} was stopped by a signal; {describe_exit(first)}")
    if not hosts:
        raise JobFailedError(f"{installed.name} {describe_status(status)}, after all ranks had succeeded")
    raise JobFailedError(
        f"{installed.name} {describe_status(status)}; the ranks of {_named(hosts)} have not reported their exit",
        hosts=hosts,
    )


def _missing(job: Job, monitor: Monitor) -> tuple[str, ...]:
    """Return the hosts of ranks that have not started, or have not reported their exit."""
    ranks = job.host_of_ranks
    missing = (i for i in range(len(ranks)) if i not in monitor.ranks or monitor.ranks[i].state.exit is None)
    return tuple(dict.fromkeys(ranks[i] for i in missing))


def _named(hosts: Sequence[str]) -> str:
    return f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts):,} hosts ({first_named(hosts)})"
