"""Run the pre-flight on every host of a job, through the job's own launcher, and collect the hosts' reports."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from affinity.errors import RunError
from affinity.planner.plan import Plan
from affinity.wording import first_named
from mpi.hosts.address import own_address
from mpi.hosts.groups import HostGroup
from mpi.launchers.command import launch_command
from mpi.launchers.job import Job
from mpi.launchers.launcher import InstalledLauncher
from mpi.preflight.checks import RING_S
from mpi.preflight.reports import Clock, Findings, HostReport, LinkSpeed, Listening, Neighbor, compare_hosts
from mpi.supervise.connection import HEARTBEAT_TIMEOUT_S, TOKEN_VARIABLE, new_token
from mpi.supervise.messages import Hello, Stop
from mpi.supervise.process import start_launcher, write_files
from mpi.supervise.reaper import end_descendants
from mpi.supervise.server import RankServer
from mpi.supervise.signals import interruptible

TIMEOUT_S_PER_HOST = 0.02
POLL_S = 0.1
LAUNCHER_EXIT_S = 5.0
KILL_S = 2.0  # between SIGTERM and SIGKILL for what the launcher has started
SSH_PORT, SSH_TIMEOUT_S, MAX_SSH_CONNECTIONS = 22, 3.0, 64
MAX_FILES = 64  # of the command, programs and scripts first, that are compared


@dataclass(slots=True)
class Answers:
    """What the hosts have reported, by their ranks in the pre-flight."""

    hosts: int
    reports: dict[int, HostReport] = field(default_factory=dict)
    listening: dict[int, Listening] = field(default_factory=dict)
    speeds: dict[int, float | None] = field(default_factory=dict)

    @property
    def all_reported(self) -> bool:
        """Whether every host has sent its report, and where it listens."""
        return len(self.reports) == len(self.listening) == self.hosts

    @property
    def missing(self) -> list[int]:
        """The hosts that have not reported, or, once all have, not measured their link."""
        done = self.speeds if self.all_reported else self.listening
        return [host for host in range(self.hosts) if host not in done]


def run_preflight(job: Job, installed: InstalledLauncher, folder: Path, env: Mapping[str, str]) -> Findings:
    """Check every host. `env` is the launcher's environment, `folder` gets the launcher's files.

    Raises RunError naming those that do not answer within 15 s (0.02 s more for each host).
    """
    # os.path's: a word may be too long for a path, at which Path.is_file raises.
    files = tuple(str(Path(word).resolve()) for word in job.command if os.path.isfile(word))[:MAX_FILES]  # noqa: PTH113
    address = own_address(job.hosts)
    server = RankServer(new_token(), job.hosts, address, (HostReport, Listening, LinkSpeed))
    with interruptible():
        one_a_host = replace(
            job,
            groups=tuple(HostGroup(hosts=group.hosts, plan=_one_worker(group.plan)) for group in job.groups),
            binder="self",
            secrets=((TOKEN_VARIABLE, server.token),),
        )
        probe = (sys.executable, "-m", "mpi.preflight.checks", "--report-to", f"{address}:{server.port}", "--", *files)
        command = launch_command(one_a_host, installed, probe, folder.resolve())
        write_files(command.files)
        process = start_launcher(command, env)
        try:
            reports = _collect(server, job.hosts, process)
            _await_exit(process)
        finally:
            server.close()
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            end_descendants(KILL_S)
    # Hosts that plan themselves are not compared with a plan.
    plans = {
        host: replace(group.plan, workers=()) if job.plan_on_host else group.plan
        for group in job.groups
        for host in group.hosts
    }
    return compare_hosts(reports, plans)


def _await_exit(process: subprocess.Popen[bytes]) -> None:
    """Give the launcher time to exit on all hosts: one that is cut short may be in the way of the job that follows."""
    try:
        process.wait(LAUNCHER_EXIT_S)
    except subprocess.TimeoutExpired:
        return


def _one_worker(plan: Plan) -> Plan:
    return replace(plan, workers=plan.workers[:1])


def _collect(server: RankServer, hosts: tuple[str, ...], process: subprocess.Popen[bytes]) -> list[HostReport]:
    """The report of every host: first of the host itself, then of its link to the next host of a ring."""
    answers = Answers(hosts=len(hosts))
    ring_started = False
    deadline = time.monotonic() + HEARTBEAT_TIMEOUT_S + TIMEOUT_S_PER_HOST * len(hosts)
    while len(answers.speeds) < len(hosts):
        for rank, message in server.poll(POLL_S):
            _take(message, rank, server, answers)
        if answers.all_reported and not ring_started:
            _start_ring(server, answers.listening)
            ring_started = True
            deadline = time.monotonic() + RING_S + HEARTBEAT_TIMEOUT_S
        if answers.missing and (time.monotonic() > deadline or process.poll() is not None):
            silent = [hosts[i] for i in answers.missing]
            raise RunError(_no_answer(unreachable(silent) or silent))  # one dead host keeps a launcher from all others
    server.send_all(Stop())
    return [replace(answers.reports[i], host=host, link_gbit=answers.speeds[i]) for i, host in enumerate(hosts)]


def _no_answer(hosts: list[str]) -> str:
    return f"pre-flight: no answer from {first_named(hosts)}: check these hosts, or remove them"


def unreachable(hosts: list[str]) -> list[str]:
    """The hosts without an address, or with a silent one; a refused connection counts as an answer."""

    def is_silent(host: str) -> bool:
        try:
            socket.create_connection((host.rpartition("@")[2].strip("[]"), SSH_PORT), timeout=SSH_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return False

    with ThreadPoolExecutor(MAX_SSH_CONNECTIONS) as pool:
        return [host for host, silent in zip(hosts, pool.map(is_silent, hosts), strict=True) if silent]


def _take(message: object, rank: int, server: RankServer, answers: Answers) -> None:
    """Keep a host's answer."""
    match message:
        case Hello():
            server.connections[rank].send(Clock(now_s=time.time()))
        case HostReport():
            answers.reports[rank] = message
        case Listening():
            answers.listening[rank] = message
        case LinkSpeed():
            answers.speeds[rank] = message.gbit


def _start_ring(server: RankServer, listening: dict[int, Listening]) -> None:
    """Send each host the address of the next one; a ring of one host measures nothing."""
    for rank, connection in server.connections.items():
        following = listening[(rank + 1) % len(listening)]
        address = following.address if len(listening) > 1 else ""
        connection.send(Neighbor(address=address, port=following.port))
