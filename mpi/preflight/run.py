"""Run the pre-flight on every host of a job, through the job's own launcher, and collect the hosts' reports."""

import os
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.ranks.host_names import network_name
from cputrain.affinity.start import own_program
from cputrain.affinity.wording import first_named
from cputrain.mpi.hosts.groups import HostGroup, own_address
from cputrain.mpi.launchers.command import launch_command
from cputrain.mpi.launchers.launcher import InstalledLauncher, Job
from cputrain.mpi.preflight.checks import Clock, Findings, HostReport, LinkPeer, LinkSpeed, Listening, compare_hosts
from cputrain.mpi.supervise.processes import JobFailedError, end_descendants, start_launcher, write_files
from cputrain.mpi.supervise.signals import StopSignals
from cputrain.mpi.supervise.wire import HEARTBEAT_TIMEOUT_S, TOKEN_VARIABLE, Hello, RankServer, Stop, new_token

SILENT_S = HEARTBEAT_TIMEOUT_S  # without a new answer: then hosts that cannot be reached are looked for
PATIENCE_S = 60.0  # without a new answer, where every host can be reached: many may start slowly
POLL_S = 0.1
LAUNCHER_EXIT_S = 5.0
EXIT_POLL_S = 0.02
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


def run_preflight(
    job: Job, installed: InstalledLauncher, folder: Path, env: Mapping[str, str], packages: Sequence[str]
) -> Findings:
    """Check every host. `env` is the launcher's environment, `folder` gets the launcher's files; of the Python
    `packages` all hosts need the same version.

    Raises JobFailedError naming those that do not answer, InterruptedBySignalError at a stop signal. It may take any
    time while answers arrive; 15 s after the last one a host that cannot be reached fails it, after 60 s any.
    """
    # os.path's: a word may be too long for a path, at which Path.is_file raises.
    files = tuple(str(Path(word).resolve()) for word in job.command if os.path.isfile(word))[:MAX_FILES]  # noqa: PTH113
    address = own_address(job.hosts)
    server = RankServer(new_token(), job.hosts, address, (HostReport, Listening, LinkSpeed))
    with StopSignals() as signals:
        one_a_host = replace(
            job,
            groups=tuple(HostGroup(hosts=group.hosts, plan=_one_worker(group.plan)) for group in job.groups),
            binder="self",
            secrets=((TOKEN_VARIABLE, server.token),),
        )
        options = ("--report-to", f"{address}:{server.port}", "--packages", ",".join(packages))
        probe = (*own_program("cputrain.mpi.preflight.checks"), *options, "--", *files)
        command = launch_command(one_a_host, installed, probe, folder.resolve())
        write_files(command.files)
        try:
            process = start_launcher(command, env)
            reports = _collect(server, job.hosts, process, signals)
            _await_exit(process, signals)
        finally:
            server.close()
            end_descendants(KILL_S)
        signals.check()
    # Hosts that plan themselves are not compared with a plan.
    plans = {
        host: replace(group.plan, workers=()) if job.plan_on_host else group.plan
        for group in job.groups
        for host in group.hosts
    }
    return compare_hosts(reports, plans)


def _await_exit(process: subprocess.Popen[bytes], signals: StopSignals) -> None:
    """Give the launcher time to exit on all hosts: one that is cut short may be in the way of the job that follows."""
    deadline = time.monotonic() + LAUNCHER_EXIT_S
    while process.poll() is None and time.monotonic() < deadline:
        signals.check()
        time.sleep(EXIT_POLL_S)


def _one_worker(plan: Plan) -> Plan:
    return replace(plan, workers=plan.workers[:1])


def _collect(
    server: RankServer, hosts: tuple[str, ...], process: subprocess.Popen[bytes], signals: StopSignals
) -> list[HostReport]:
    """The report of every host: first of the host itself, then of its link to the next host of a ring."""
    answers = Answers(hosts=len(hosts))
    turns = sending_turns(len(hosts))
    sending: list[int] = []
    answered = looked = time.monotonic()
    while len(answers.speeds) < len(hosts):
        signals.check()
        for rank, message in server.poll(POLL_S):
            _take(message, rank, server, answers)
            answered = looked = time.monotonic()
        if answers.all_reported and turns and all(rank in answers.speeds for rank in sending):
            sending = turns.pop(0)
            _send_to_next(sending, server, answers.listening)
        ended, now = process.poll() is not None, time.monotonic()
        if answers.missing and (ended or now - looked > SILENT_S):
            looked = now
            missing = [hosts[i] for i in answers.missing]
            silent = unreachable(missing)  # one dead host keeps a launcher from all others
            waited_for = [hosts[i] for i in answers.missing if not sending or i in sending or ended]
            if silent or ended or now - answered > PATIENCE_S:
                raise JobFailedError(_no_answer(silent or waited_for), hosts=tuple(silent or waited_for))
    server.send_all(Stop(grace_s=0.0))
    return [structs.replace(answers.reports[i], host=host, link_gbit=answers.speeds[i]) for i, host in enumerate(hosts)]


def _no_answer(hosts: list[str]) -> str:
    return f"pre-flight: no answer from {first_named(hosts)}: check these hosts, or remove them"


def unreachable(hosts: list[str]) -> list[str]:
    """The hosts without an address, or with a silent one; a refused connection counts as an answer."""

    def is_silent(host: str) -> bool:
        try:
            socket.create_connection((network_name(host), SSH_PORT), timeout=SSH_TIMEOUT_S).close()
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


def sending_turns(hosts: int) -> list[list[int]]:
    """Hosts in groups that send to their next host at the same time, so that none sends and receives at once: a slow
    host's own traffic would delay its acknowledgments, and the host before it would look as slow."""
    pairs = hosts - hosts % 2
    turns = [list(range(0, pairs, 2)), list(range(1, pairs, 2)), list(range(pairs, hosts))]
    return [turn for turn in turns if turn]


def _send_to_next(ranks: Iterable[int], server: RankServer, listening: dict[int, Listening]) -> None:
    """Send each of these hosts the address of the next one in the ring; a ring of one host measures nothing."""
    for rank in ranks:
        following = listening[(rank + 1) % len(listening)]
        address = following.address if len(listening) > 1 else ""
        server.connections[rank].send(LinkPeer(address=address, port=following.port))
