"""Run a job through a launcher: start it, watch its ranks on all hosts, end all when one fails."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from affinity.errors import RunError
from affinity.wording import counted, first_named
from mpi.hosts.address import own_address
from mpi.hosts.groups import job_plan_json
from mpi.launchers.command import launch_command
from mpi.launchers.job import Job, bound_command
from mpi.launchers.launcher import InstalledLauncher, LaunchCommand
from mpi.supervise.connection import STOP_S, TOKEN_VARIABLE, new_token
from mpi.supervise.exits import SETTLE_S
from mpi.supervise.monitor import Monitor
from mpi.supervise.process import start_launcher, write_files
from mpi.supervise.reaper import end_descendants
from mpi.supervise.signals import InterruptedBySignalError, interruptible, stopped_again

POLL_S = 0.1
LAST_POLL_S = 0.01  # all ranks have succeeded: the launcher ends at once
KILL_S = 1.0  # between SIGTERM and SIGKILL for what the launcher has started
START_TIMEOUT_S = 120.0  # from the launcher's start to the last rank's hello
logger = logging.getLogger(__name__)


def remote_command(
    job: Job, installed: InstalledLauncher, folder: Path, address: str, port: int | str, token: str
) -> LaunchCommand:
    """What starts the job's ranks, each behind an agent that reports to this host's address and port."""
    plain = () if job.plain_rank is None else ("--plain-rank", str(job.plain_rank))
    live = ("--live",) if sys.stdout.isatty() else ()
    report = ("--report-to", f"{address}:{port}", "--into", str(job.log_dir.resolve()))
    agent = (sys.executable, "-m", "mpi.supervise.agent", *report, *plain, *live, "--")
    bound = bound_command(replace(job, plan_path=job.plan_path.resolve()))
    with_token = replace(job, secrets=((TOKEN_VARIABLE, token),))
    return launch_command(with_token, installed, (*agent, *bound), folder.resolve())


def run_remote(job: Job, installed: InstalledLauncher, folder: Path, env: Mapping[str, str]) -> int:
    """Run the job to its end; 0 when all ranks succeeded, 2 when all that failed refused their input. `env` is the
    environment of the launcher.

    Raises RunError naming rank, host, its exit or silence, its log and last lines. On SIGINT or SIGTERM stops
    everything on all hosts and returns 128 + the signal; SIGUSR1 is passed on to the ranks.
    """
    address = own_address(job.hosts)
    monitor = Monitor(new_token(), job.host_of_ranks, address)
    command = remote_command(job, installed, folder, address, monitor.port, monitor.token)
    write_files(((job.plan_path, job_plan_json(job.groups)), *command.files))
    with interruptible(monitor.preempt):
        process: subprocess.Popen[bytes] | None = None
        try:
            process = start_launcher(command, env)
            return _watch(job, installed, process, monitor)
        except InterruptedBySignalError as stop:
            number = stop.args[0]
            logger.warning("\nstopping %s (%s)", counted(job.world_size, "rank"), signal.Signals(number).name)
            return 128 + int(number)
        finally:
            _tear_down(process, monitor)


def _watch(job: Job, installed: InstalledLauncher, process: subprocess.Popen[bytes], monitor: Monitor) -> int:
    started = time.monotonic()
    while True:
        done = len(monitor.ranks) == job.world_size and all(rank.succeeded for rank in monitor.ranks.values())
        monitor.poll(LAST_POLL_S if done else POLL_S)
        ended = process.poll() is not None
        if done and ended and process.returncode == 0:
            return 0
        if ended or monitor.failed():
            settled = time.monotonic() + SETTLE_S
            while time.monotonic() < settled:
                monitor.poll(POLL_S)
        failed = monitor.failed()
        if failed:
            if all(rank.exit is not None and rank.exit.status == 2 for rank in failed):
                return 2  # the ranks have printed what is wrong with their input
            raise RunError(monitor.cause())
        if ended:
            return _after_launcher(job, installed, process.returncode, monitor)
        if len(monitor.ranks) < job.world_size and time.monotonic() - started > START_TIMEOUT_S:
            raise RunError(f"the ranks of {_missing(job, monitor)} did not start within {START_TIMEOUT_S:g} s")


def _after_launcher(job: Job, installed: InstalledLauncher, status: int, monitor: Monitor) -> int:
    """0 where the launcher and all ranks have succeeded. Raises RunError otherwise."""
    if status == 0 and all(rank.succeeded for rank in monitor.ranks.values()):
        return 0
    if not monitor.ranks:
        raise RunError(f"{installed.name} exited with status {status} before any rank started; see its output above")
    raise RunError(
        f"{installed.name} exited with status {status}; the ranks of {_missing(job, monitor)} exited without reporting "
        "a status"
    )


def _missing(job: Job, monitor: Monitor) -> str:
    """The hosts of ranks that have not started, or have not reported their exit."""
    ranks = job.host_of_ranks
    missing = (i for i in range(len(ranks)) if i not in monitor.ranks or monitor.ranks[i].exit is None)
    names = list(dict.fromkeys(ranks[i] for i in missing))
    return f"host {names[0]}" if len(names) == 1 else f"{len(names):,} hosts ({first_named(names)})"


def _tear_down(process: subprocess.Popen[bytes] | None, monitor: Monitor) -> None:
    """End the ranks through their agents, then the launcher: after STOP_S, or at a second stop signal."""
    try:
        if process is not None and process.poll() is None:
            monitor.stop()
            deadline = time.monotonic() + STOP_S
            while time.monotonic() < deadline and process.poll() is None and not stopped_again():
                monitor.poll(POLL_S)
    except InterruptedBySignalError:
        pass  # the first Ctrl-C, while the ranks are being ended
    finally:
        monitor.close()
        end_descendants(KILL_S)
