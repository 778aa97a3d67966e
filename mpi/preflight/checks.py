"""The checks of a job's hosts before it starts: the same software and files, the planned CPUs, memory, a fast link.

    python -m mpi.preflight.checks --report-to HOST:PORT FILE...

checks one host; `run_preflight` starts it on each of them.
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
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from affinity.planner.plan import Plan
from affinity.ranks.rank import discover
from affinity.topology.cpuset import format_list
from affinity.topology.machine import Machine
from affinity.topology.sysfs import this_machine
from affinity.units import GIB
from mpi.supervise.connection import TOKEN_VARIABLE, Connection, connect

PACKAGES = ("cputrain", "torch", "torchvision", "oneccl-devel", "impi-rt")
CLOCK_S = 2.0  # events of several hosts would be out of order; certificates and schedulers mind more
SCRATCH_BYTES = GIB
SLOW = 0.5  # of the median link
RING_S = 2.0
CHUNK = bytes(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """One host's report. `clock_s` is its clock minus the launching host's; `link_gbit` the speed at which it sent to
    its neighbor in the ring, None where that failed or there is none; `no_provider` the libfabric provider that the job
    is to use but the host's fi_info does not list."""

    host: str
    python: str
    packages: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]
    clock_s: float
    memory_bytes: int
    scratch_bytes: int
    allowed_pus: tuple[int, ...]
    no_provider: str | None = None
    link_gbit: float | None = None


@dataclass(slots=True, kw_only=True)
class Findings:
    """What the checks have found, in lines that name hosts. With errors the job must not start."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def compare_hosts(reports: Iterable[HostReport], plans: dict[str, Plan]) -> Findings:
    """Compare the hosts' reports with each other and with the hosts' plans (by host name)."""
    known, findings = list(reports), Findings()
    _compare_software(known, findings)
    for report in known:
        _compare_with_plan(report, plans[report.host], findings)
        if report.no_provider:
            findings.warnings.append(
                f"{report.host}'s libfabric has no provider {report.no_provider} (fi_info -l): unless the MPI brings "
                "its own, choose another --fabric"
            )
        if abs(report.clock_s) > CLOCK_S:
            findings.warnings.append(f"{report.host}'s clock is {report.clock_s:+.1f} s off: check its time service")
        if report.scratch_bytes < SCRATCH_BYTES:
            findings.warnings.append(
                f"{report.host} has {report.scratch_bytes / GIB:.1f} GiB free in its temporary folder"
            )
    speeds = [report.link_gbit for report in known if report.link_gbit is not None]
    for report in known:
        if report.link_gbit is not None and report.link_gbit < SLOW * median(speeds):
            findings.warnings.append(
                f"{report.host} sends {report.link_gbit:.2f} Gbit/s to the next host, the median is "
                f"{median(speeds):.2f}: check its cable, its network card and what else runs there"
            )
    return findings


def _compare_software(reports: list[HostReport], findings: Findings) -> None:
    """Versions of Python and packages, and digests of files, that differ from those of most hosts."""
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
    """CPUs and memory that the plan needs and the host does not have."""
    missing = sorted({pu for worker in plan.workers for pu in worker.pus} - {*report.allowed_pus})
    if missing:
        findings.errors.append(f"{report.host} does not allow CPUs {format_list(missing)} of its plan: plan it again")
    need = sum(worker.memory_bytes or 0 for worker in plan.workers)
    if report.memory_bytes < need:
        findings.errors.append(
            f"{report.host} has {report.memory_bytes / GIB:.1f} GiB of memory free, but its plan needs "
            f"{need / GIB:.1f}: end what else runs there, or lower the batch"
        )


def inspect_host(
    files: tuple[str, ...], scratch: str, machine: Machine, now_s: float, provider: str | None
) -> HostReport:
    """This host's report; `now_s` is the launching host's clock, `provider` the libfabric provider of the job."""
    memory = Path("/proc/meminfo").read_text()
    free_kib = next(int(line.split()[1]) for line in memory.splitlines() if line.startswith("MemAvailable:"))
    space = os.statvfs(scratch)
    return HostReport(
        host=socket.gethostname(),
        python=sys.version.split()[0],
        packages=tuple((name, version) for name in PACKAGES if (version := _version(name))),
        files=tuple((path, _digest(Path(path))) for path in files),
        clock_s=round(time.time() - now_s, 3),
        memory_bytes=free_kib * 1024,
        scratch_bytes=space.f_bavail * space.f_frsize,
        allowed_pus=machine.allowed_pus,
        no_provider=missing_provider(provider),
    )


def missing_provider(wanted: str | None) -> str | None:
    """The first of the wanted libfabric providers ("psm3", "tcp;ofi_rxm") that fi_info does not list; None without it.

    "^" excludes providers: nothing is wanted then.
    """
    program = shutil.which("fi_info")
    if wanted is None or wanted.startswith("^") or program is None:
        return None
    listed = subprocess.run([program, "-l"], capture_output=True, text=True, check=False).stdout
    offered = {line.removesuffix(":") for line in listed.splitlines() if line.endswith(":")}
    return next((name for name in wanted.replace(",", ";").split(";") if offered and name not in offered), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _digest(path: Path) -> str:
    """The start of a file's SHA-256; "absent" where it is not there."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else "absent"


def main(arguments: list[str]) -> int:
    """Check one host: report, then send to the next host of the ring for RING_S while the one before sends here."""
    parser = argparse.ArgumentParser(prog="python -m mpi.preflight.checks", description=__doc__)
    parser.add_argument("--report-to", required=True, metavar="HOST:PORT")
    parser.add_argument("--scratch", default=tempfile.gettempdir())
    parser.add_argument("files", nargs="*")
    options = parser.parse_args(arguments)
    rank = discover(os.environ)
    server = socket.create_server(("", 0))
    threading.Thread(target=_receive_all, args=(server,), daemon=True).start()
    connection = connect(options.report_to, os.environ.get(TOKEN_VARIABLE, ""), rank.rank if rank else 0)
    own_address = connection.socket.getsockname()[0]
    clock = _next(connection, "clock")
    provider = os.environ.get("FI_PROVIDER")
    report = inspect_host(tuple(options.files), options.scratch, this_machine(), float(clock["now_s"]), provider)
    connection.send(type="report", report=asdict(report), address=own_address, port=server.getsockname()[1])
    ring = _next(connection, "ring")
    speed = _measure_link(ring["address"], int(ring["port"])) if ring["address"] else None
    connection.send(type="speed", gbit=speed)
    _next(connection, "stop")
    return 0


def _next(connection: Connection, message_type: str) -> dict[str, Any]:
    """The next message of that type; ends this process when the launching host has closed the connection."""
    while True:
        messages = connection.receive()
        if messages is None:
            sys.exit(1)
        found = next((message for message in messages if message.get("type") == message_type), None)
        if found is not None:
            return found
        time.sleep(0.01)


def _receive_all(server: socket.socket) -> None:
    """Receive all that the host before sends."""
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass


def _measure_link(address: str, port: int) -> float | None:
    """Gbit/s that were sent to a host in RING_S; None where it cannot be reached."""
    try:
        with socket.create_connection((address, port), timeout=5.0) as connection:
            started, sent = time.monotonic(), 0
            while (took := time.monotonic() - started) < RING_S:
                sent += connection.send(CHUNK)
            return round(sent * 8 / took / 1e9, 3)
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
