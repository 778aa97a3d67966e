"""Run a job through a launcher: start it, watch its ranks on all hosts, end all when one fails."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from affinity.errors import InputError, RunError
from affinity.ranks.rank import LOOPBACK
from affinity.ranks.route import address_to
from mpi.hosts.groups import job_plan_json
from mpi.launchers.detect import Launcher
from mpi.launchers.job import Job
from mpi.launchers.start import Start, bound, start
from mpi.supervise.connection import TOKEN_VARIABLE
from mpi.supervise.exits import SETTLE_S
from mpi.supervise.monitor import Monitor, cause_of
from mpi.supervise.reaper import adopt_orphans, end_descendants
from mpi.supervise.signals import InterruptedBySignalError, interruptible

POLL_S = 0.1
LAST_POLL_S = 0.01  # all ranks have said goodbye: the launcher ends at once
GRACE_S = 4.0  # between telling the agents to stop and killing the launcher
KILL_S = 1.0  # between asking what the launcher has started to end, and killing it
HELLO_S = 120.0  # from the launcher's start to the last rank's hello


def remote_start(job: Job, launcher: Launcher, folder: Path, port: int | str, token: str) -> Start:
    """What starts the job's ranks, each behind an agent that reports to this host's port."""
    plain = () if job.plain_rank is None else ("--plain-rank", str(job.plain_rank))
    live = ("--live",) if sys.stdout.isatty() else ()
    report = ("--report-to", f"{own_address(job.hosts)}:{port}", "--into", str(job.log_dir.resolve()))
    agent = (sys.executable, "-m", "mpi.supervise.agent", *report, *plain, *live, "--")
    told = replace(job, variables=(*job.variables, (TOKEN_VARIABLE, token)))
    return start(told, launcher, (*agent, *bound(replace(job, plan_path=job.plan_path.resolve()))), folder.resolve())


def own_address(hosts: tuple[str, ...]) -> str:
    """This host's address as the job's hosts see it: the one that packets to the first other host leave from."""
    here = socket.gethostname()
    others = [name for host in hosts if (name := host.rpartition("@")[2].strip("[]")) not in (here, "localhost")]
    if not others:
        return LOOPBACK
    try:
        return address_to(others[0])
    except OSError as error:
        raise InputError(f"host {others[0]} has no address here: {error}: mend the name or the hostfile") from None


def run_remote(job: Job, launcher: Launcher, folder: Path) -> int:
    """Run the job to its end; 0 when all ranks ended well, 2 when all that failed refused their input.

    Raises RunError naming rank, host, its end or silence, its log and last lines. On SIGINT or SIGTERM stops
    everything on all hosts and returns 128 + the signal; SIGUSR1 is passed on to the ranks.
    """
    monitor = Monitor(token=secrets.token_hex(8))
    made = remote_start(job, launcher, folder, monitor.port, monitor.token)
    for path, text in ((job.plan_path, job_plan_json(job.kinds)), *made.files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with interruptible(monitor.give_notice):
        process: subprocess.Popen[bytes] | None = None
        adopt_orphans()
        try:
            process = subprocess.Popen(
                made.argv,
                env={**os.environ, **dict(made.variables)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            return _watch(job, launcher, process, monitor)
        except InterruptedBySignalError as stop:
            number = stop.args[0]
            print(f"\nstopping {job.world_size} ranks ({signal.Signals(number).name})", file=sys.stderr)
            return 128 + int(number)
        finally:
            _tear_down(process, monitor)


def _watch(job: Job, launcher: Launcher, process: subprocess.Popen[bytes], monitor: Monitor) -> int:
    started = time.monotonic()
    while True:
        done = len(monitor.ranks) == job.world_size and all(seen.status == 0 for seen in monitor.ranks.values())
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
            if all(seen.status == 2 for seen in failed):
                return 2  # the ranks have said themselves what is wrong with their input
            raise RunError(cause_of(failed))
        if ended:
            return _launcher_s_end(job, launcher, process, monitor)
        if len(monitor.ranks) < job.world_size and time.monotonic() - started > HELLO_S:
            raise RunError(f"{_missing(job, monitor)} did not start within {HELLO_S:g} s")


def _launcher_s_end(job: Job, launcher: Launcher, process: subprocess.Popen[bytes], monitor: Monitor) -> int:
    if process.returncode == 0 and all(seen.status == 0 for seen in monitor.ranks.values()):
        return 0
    if not monitor.ranks:
        raise RunError(f"{launcher.kind} ended with status {process.returncode} before any rank started; see above")
    raise RunError(f"{launcher.kind} ended with status {process.returncode}; {_missing(job, monitor)} said no goodbye")


def _missing(job: Job, monitor: Monitor) -> str:
    """The hosts of ranks that were never heard of, or have not ended."""
    ranks = [host for kind in job.kinds for host in kind.hosts for _ in kind.plan.workers]
    gone = (i for i in range(len(ranks)) if i not in monitor.ranks or monitor.ranks[i].status is None)
    names = list(dict.fromkeys(ranks[i] for i in gone))
    return f"host {names[0]}" if len(names) == 1 else f"{len(names)} hosts ({', '.join(names[:5])})"


def _tear_down(process: subprocess.Popen[bytes] | None, monitor: Monitor) -> None:
    """End the ranks through their agents, then the launcher: asked first, killed after GRACE_S or a second signal."""
    try:
        if process is not None and process.poll() is None:
            monitor.stop()
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and process.poll() is None:
                monitor.poll(POLL_S)
    except InterruptedBySignalError:
        pass  # a second Ctrl-C: kill now
    finally:
        monitor.close()
        end_descendants(KILL_S)
