"""Check a job's hosts before it starts: same software and files, the planned CPUs, enough memory, a fast link.

The job's launcher starts this program on every host. Each host sends its report, then measures its link to the next
host in a ring: python -m cputrain.mpi.preflight --report-to HOST:PORT --packages NAME,... -- FILE...
"""

import argparse
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, TypeVar

import psutil
from msgspec import Meta, structs

from cputrain.affinity.filesystem import installed_version
from cputrain.affinity.host_names import network_name
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.rank import rank_from_env
from cputrain.affinity.start import isolated_command
from cputrain.affinity.terminal import ExitStatus, use_utf8
from cputrain.affinity.topology.machine import Machine, name_cpus
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import GIB, first_named
from cputrain.mpi.hostfile import own_address
from cputrain.mpi.launch_command import build_launch_command
from cputrain.mpi.launchers import InstalledLauncher, Job
from cputrain.mpi.supervise.processes import JobFailedError, end_descendants, start_launcher, write_files
from cputrain.mpi.supervise.signals import StopSignals
from cputrain.mpi.supervise.wire import (
    HEARTBEAT_TIMEOUT_S,
    MAX_ITEMS,
    TOKEN_VARIABLE,
    Connection,
    Hello,
    Integer,
    Message,
    Number,
    RankServer,
    Stop,
    Text,
    connect,
    join_job,
    new_token,
)

CLOCK_S = 2.0  # beyond it events of several hosts are out of order; certificates and schedulers tolerate more
SCRATCH_BYTES = GIB
SLOW = 0.5  # times the median link speed

SILENT_S = HEARTBEAT_TIMEOUT_S  # without a new answer, before unreachable hosts are searched for
PATIENCE_S = 60.0  # without a new answer although every host is reachable: a large job may start slowly
POLL_S = 0.1
LAUNCHER_EXIT_S = 5.0
EXIT_POLL_S = 0.02
KILL_S = 2.0  # between SIGTERM and SIGKILL for the launcher's processes
SSH_PORT, SSH_TIMEOUT_S, MAX_SSH_CONNECTIONS = 22, 3.0, 64
FI_INFO_S = 10.0  # limit of a fi_info, which looks for network cards
MAX_FILES = 64  # words of the command that are compared: the programs and scripts come first


Pairs = Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=MAX_ITEMS)]

M = TypeVar("M")
MAX_SILENCE_S = 3600.0  # for a message from the launching host, which may have vanished without closing the connection
RING_S = 1.0
RING_TIMEOUT_S = 5.0  # to connect to the next host, and for each send
STRANGERS, HELLO_TIMEOUT_S = 8, 1.0  # foreign connections that are refused before the neighbor's, and time for each
CHUNK = bytes(1 << 20)
MAX_BYTES = 16 << 20  # content of larger files is not compared: they are data, not programs or settings


class HostReport(Message, frozen=True):
    """One host's report. `clock_s` is its clock minus the launching host's; `link_gbit` the speed at which it sent to
    the next host in the ring, None if there is no other host or the send failed; `no_provider` the job's libfabric
    provider if the host's fi_info does not list it."""

    host: Text
    python: Text
    packages: Pairs
    files: Pairs
    clock_s: Number
    memory_bytes: Integer
    scratch_bytes: Integer
    allowed_pus: Annotated[tuple[Integer, ...], Meta(max_length=MAX_ITEMS)]
    no_provider: Text | None = None
    link_gbit: Number | None = None


class Clock(Message, frozen=True):
    """The launching host's time (Unix)."""

    now_s: Number


class Listening(Message, frozen=True):
    """Address at which a host waits for traffic from the previous host in the ring."""

    address: Text
    port: Integer


class LinkPeer(Message, frozen=True):
    """Address to which a host sends its traffic; an empty address means no measurement."""

    address: Text
    port: Integer


class LinkSpeed(Message, frozen=True):
    """The speed at which a host has sent, in Gbit/s; None if it could not."""

    gbit: Number | None


@dataclass(slots=True, kw_only=True)
class Findings:
    """Results of the checks, one line each, naming hosts. If there are errors, the job must not start."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def compare_hosts(reports: Iterable[HostReport], plans: dict[str, Plan]) -> Findings:
    """Compare the hosts' reports with each other and with the hosts' plans (by host name)."""
    answered, findings = list(reports), Findings()
    _compare_software(answered, findings)
    for report in answered:
        _compare_with_plan(report, plans[report.host], findings)
        if report.no_provider:
            findings.warnings.append(
                f"{report.host}'s libfabric has no provider {report.no_provider} (fi_info -l): choose another --fabric "
                "unless the MPI includes it"
            )
        if abs(report.clock_s) > CLOCK_S:
            findings.warnings.append(f"{report.host}'s clock is {report.clock_s:+.1f} s off: check its time service")
        if report.scratch_bytes < SCRATCH_BYTES:
            findings.warnings.append(
                f"{report.host} has {report.scratch_bytes / GIB:.1f} GiB free in its temporary folder"
            )
    speeds = [report.link_gbit for report in answered if report.link_gbit is not None]
    for report in answered:
        if report.link_gbit is not None and report.link_gbit < SLOW * median(speeds):
            findings.warnings.append(
                f"{report.host} sends {report.link_gbit:.2f} Gbit/s to the next host, the median is "
                f"{median(speeds):.2f}: check its cable, its network card and other programs on it"
            )
    return findings


def _compare_software(reports: list[HostReport], findings: Findings) -> None:
    """Find versions of Python and packages, and digests of files, that differ from the majority of hosts."""
    compared: dict[str, dict[str, str]] = {"Python": {report.host: report.python for report in reports}}
    for name in dict.fromkeys(name for report in reports for name, _ in report.packages):
        compared[name] = {report.host: dict(report.packages).get(name, "none") for report in reports}
    for path in dict.fromkeys(path for report in reports for path, _ in report.files):
        compared[path] = {report.host: dict(report.files).get(path, "absent") for report in reports}
    for what, values in compared.items():
        usual = Counter(values.values()).most_common(1)[0][0]
        for host, value in values.items():
            if value != usual:
                findings.errors.append(
                    f"{host} has {what} {value[:12]}, most hosts have {usual[:12]}: make them the same"
                )


def _compare_with_plan(report: HostReport, plan: Plan, findings: Findings) -> None:
    """Find CPUs and memory that the plan needs and the host lacks."""
    missing = sorted({pu for worker in plan.workers for pu in worker.pus} - {*report.allowed_pus})
    if missing:
        findings.errors.append(f"{report.host} does not allow {name_cpus(missing)} of its plan: plan again")
    need = sum(worker.memory_bytes or 0 for worker in plan.workers)
    if report.memory_bytes < need:
        findings.errors.append(
            f"{report.host} has {report.memory_bytes / GIB:.1f} GiB of memory free, but its plan needs "
            f"{need / GIB:.1f}: stop other programs there or reduce the batch"
        )


def inspect_host(
    files: tuple[str, ...],
    packages: tuple[str, ...],
    machine: Machine,
    now_s: float,
    provider: str | None,
) -> HostReport:
    """Return this host's report; `now_s` is the launching host's clock, `provider` the job's libfabric provider."""
    space = os.statvfs(tempfile.gettempdir())
    return HostReport(
        host=socket.gethostname(),
        python=sys.version.split()[0],
        packages=tuple((name, version) for name in packages if (version := installed_version(name))),
        files=tuple((path, _digest(Path(path))) for path in files),
        clock_s=round(time.time() - now_s, 3),
        memory_bytes=psutil.virtual_memory().available,
        scratch_bytes=space.f_bavail * space.f_frsize,
        allowed_pus=machine.allowed_pus,
        no_provider=missing_provider(provider, offered_providers(os.get_exec_path())),
    )


def missing_provider(requested: str | None, offered: frozenset[str]) -> str | None:
    """Return the first requested libfabric provider ("psm3", "tcp;ofi_rxm") that is not offered; None if there is none,
    or if no offered provider is known.

    A leading "^" excludes providers instead of requesting any, so nothing is checked.
    """
    if requested is None or requested.startswith("^") or not offered:
        return None
    return next((name for name in requested.replace(",", ";").split(";") if name not in offered), None)


def offered_providers(path: Sequence[str]) -> frozenset[str]:
    """Return the libfabric providers that the first working fi_info in these folders lists, none without one.

    Intel MPI's, which may come first in an environment of Python, is a script that calls a program which PyPI's package
    lacks: one that fails, hangs or lists nothing is passed over.
    """
    for program in filter(None, (shutil.which("fi_info", path=folder) for folder in path)):
        try:
            run = subprocess.run(
                [program, "-l"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=FI_INFO_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        offered = frozenset(line.removesuffix(":") for line in run.stdout.splitlines() if line.endswith(":"))
        if run.returncode == 0 and offered:
            return offered
    return frozenset()


def _digest(path: Path) -> str:
    """Return the start of a file's SHA-256, the size of a large file, or "absent"."""
    if not path.is_file():
        return "absent"
    size = path.stat().st_size
    return f"{size:,} bytes" if size > MAX_BYTES else hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _next(connection: Connection, message_type: type[M]) -> M:
    """Return the next message of that type; exit this process if the launching host closes the connection or is silent
    for MAX_SILENCE_S."""
    deadline = time.monotonic() + MAX_SILENCE_S
    while messages := connection.wait(deadline):
        matching = next((message for message in messages if isinstance(message, message_type)), None)
        if matching is not None:
            return matching
    sys.exit(ExitStatus.FAILED)


def _receive_all(server: socket.socket, token: str) -> None:
    """Receive all traffic of the previous host in the ring; refuse other connections."""
    for _ in range(STRANGERS + 1):
        accepted, _ = server.accept()
        connection = Connection(accepted, token, (Hello,), None)
        if connection.wait(time.monotonic() + HELLO_TIMEOUT_S):
            accepted.setblocking(True)
            while accepted.recv(1 << 20):
                pass
            return
        connection.close()


def _measure_link(neighbor: str, token: str, hello: Hello) -> float | None:
    """Return the speed of sending to HOST:PORT for RING_S, in Gbit/s; None if it cannot be reached."""
    try:
        connection = connect(neighbor, token, (), RING_TIMEOUT_S)
        with connection.socket as connected:
            connection.send(hello)
            connected.settimeout(RING_TIMEOUT_S)
            started, sent = time.monotonic(), 0
            while (took := time.monotonic() - started) < RING_S:
                sent += connected.send(CHUNK)
            return round(sent * 8 / took / 1e9, 3)
    except OSError:
        return None


@dataclass(slots=True)
class Answers:
    """The hosts' answers so far, by rank in the pre-flight."""

    hosts: int
    reports: dict[int, HostReport] = field(default_factory=dict)
    listening: dict[int, Listening] = field(default_factory=dict)
    speeds: dict[int, float | None] = field(default_factory=dict)

    @property
    def all_reported(self) -> bool:
        """Whether every host has sent its report and the address where it listens."""
        return len(self.reports) == len(self.listening) == self.hosts

    @property
    def missing(self) -> list[int]:
        """The hosts that have not reported, or, once all have reported, not measured their link."""
        done = self.speeds if self.all_reported else self.listening
        return [host for host in range(self.hosts) if host not in done]


def run_preflight(
    job: Job, installed: InstalledLauncher, folder: Path, env: Mapping[str, str], packages: Sequence[str]
) -> Findings:
    """Check every host. `env` is the launcher's environment; `folder` receives the launcher's files; `packages` are
    Python packages that need the same version on all hosts.

    Raises JobFailedError naming hosts that do not answer, InterruptedBySignalError at a stop signal. There is no total
    time limit: 15 s after the last answer an unreachable host fails the check, after 60 s any missing host does.
    """
    # os.path.isfile: Path.is_file raises if a word is too long for a path.
    files = tuple(str(Path(word).resolve()) for word in job.command if os.path.isfile(word))[:MAX_FILES]  # noqa: PTH113
    address = own_address(job.hosts)
    server = RankServer(new_token(), job.hosts, address, (HostReport, Listening, LinkSpeed))
    with StopSignals() as signals:
        one_a_host = replace(
            job,
            groups=tuple(
                replace(group, plan=replace(group.plan, workers=group.plan.workers[:1])) for group in job.groups
            ),
            binder="self",
            secrets=((TOKEN_VARIABLE, server.token),),
        )
        options = ("--report-to", f"{address}:{server.port}", "--packages", ",".join(packages))
        probe = (*isolated_command("cputrain.mpi.preflight"), *options, "--", *files)
        command = build_launch_command(one_a_host, installed, probe, folder.resolve())
        write_files(command.files)
        try:
            process = start_launcher(command, env)
            reports = _collect(server, job.hosts, process, signals)
            _await_exit(process, signals)
        finally:
            server.close()
            end_descendants(KILL_S)
        signals.check()
    # With plan_on_host there is no plan yet to compare the hosts with.
    plans = {
        host: replace(group.plan, workers=()) if job.plan_on_host else group.plan
        for group in job.groups
        for host in group.hosts
    }
    return compare_hosts(reports, plans)


def _await_exit(process: subprocess.Popen[bytes], signals: StopSignals) -> None:
    """Give the launcher time to exit on all hosts: remains of a killed one may disturb the job that follows."""
    deadline = time.monotonic() + LAUNCHER_EXIT_S
    while process.poll() is None and time.monotonic() < deadline:
        signals.check()
        time.sleep(EXIT_POLL_S)


def _collect(
    server: RankServer, hosts: tuple[str, ...], process: subprocess.Popen[bytes], signals: StopSignals
) -> list[HostReport]:
    """Return every host's report, which includes the speed of its link to the next host in the ring."""
    answers = Answers(hosts=len(hosts))
    turns = sending_turns(len(hosts))
    sending: list[int] = []
    answered = looked = time.monotonic()
    while len(answers.speeds) < len(hosts):
        signals.check()
        for rank, message in server.poll(POLL_S):
            _store_answer(message, rank, server, answers)
            answered = looked = time.monotonic()
        if answers.all_reported and turns and all(rank in answers.speeds for rank in sending):
            sending = turns.pop(0)
            _send_to_next(sending, server, answers.listening)
        ended, now = process.poll() is not None, time.monotonic()
        if answers.missing and (ended or now - looked > SILENT_S):
            looked = now
            missing = [hosts[i] for i in answers.missing]
            silent = unreachable_hosts(missing)  # one dead host keeps a launcher from starting the others
            waited_for = [hosts[i] for i in answers.missing if not sending or i in sending or ended]
            if silent or ended or now - answered > PATIENCE_S:
                lacking = tuple(silent or waited_for)
                text = f"pre-flight got no answer from {first_named(lacking)}: check or remove these hosts"
                raise JobFailedError(text, hosts=lacking)
    server.send_all(Stop(grace_s=0.0))
    return [structs.replace(answers.reports[i], host=host, link_gbit=answers.speeds[i]) for i, host in enumerate(hosts)]


def unreachable_hosts(hosts: list[str]) -> list[str]:
    """Return the hosts without an address or a response on the ssh port; a refused connection is a response."""

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


def _store_answer(message: object, rank: int, server: RankServer, answers: Answers) -> None:
    """Store a host's answer."""
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
    """Return groups of hosts that send at the same time, such that no host sends and receives at once: a slow host's
    own traffic would delay its acknowledgments and make the previous host look slow, too."""
    pairs = hosts - hosts % 2
    turns = [list(range(0, pairs, 2)), list(range(1, pairs, 2)), list(range(pairs, hosts))]
    return [turn for turn in turns if turn]


def _send_to_next(ranks: Iterable[int], server: RankServer, listening: dict[int, Listening]) -> None:
    """Send each of these hosts the next host's address; nothing is measured if there is only one host."""
    for rank in ranks:
        following = listening[(rank + 1) % len(listening)]
        address = following.address if len(listening) > 1 else ""
        server.connections[rank].send(LinkPeer(address=address, port=following.port))


def main(arguments: list[str], env: Mapping[str, str]) -> int:
    """Check one host: send its report, then traffic to the next host for RING_S; the previous host sends to this one
    before or after that."""
    parser = argparse.ArgumentParser(prog="python -m cputrain.mpi.preflight", description=__doc__)
    parser.add_argument("--report-to", required=True, metavar="HOST:PORT")
    parser.add_argument("--packages", default="", metavar="NAME,...", help="packages whose versions are reported")
    parser.add_argument("files", nargs="*")
    options = parser.parse_args(arguments)
    token, rank = env.get(TOKEN_VARIABLE, ""), rank_from_env(env)
    hello = Hello(rank=rank.rank if rank else 0, host=socket.gethostname())
    connection, answer = join_job(options.report_to, token, (Clock, LinkPeer, Stop), hello)
    if not isinstance(answer[0], Clock):  # this host was refused
        return ExitStatus.FAILED
    clock = answer[0]
    address = connection.socket.getsockname()[0]
    server = socket.create_server((address, 0), family=connection.socket.family)
    threading.Thread(target=_receive_all, args=(server, token), daemon=True).start()
    files, packages = tuple(options.files), tuple(filter(None, options.packages.split(",")))
    report = inspect_host(files, packages, this_machine(), clock.now_s, env.get("FI_PROVIDER"))
    connection.send(report)
    connection.send(Listening(address=address, port=server.getsockname()[1]))
    neighbor = _next(connection, LinkPeer)
    speed = _measure_link(f"{neighbor.address}:{neighbor.port}", token, hello) if neighbor.address else None
    connection.send(LinkSpeed(gbit=speed))
    _next(connection, Stop)
    return 0


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:], os.environ))
