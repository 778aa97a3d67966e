"""Before hours are spent: does every host answer, with the same software and files, the planned PUs, a fast link?

    python -m mpi.preflight.checks --monitor HOST:PORT FILE...

is one host's part, started on each of them by `run_preflight`.
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
from mpi.supervise.connection import TOKEN_VARIABLE, Line

PACKAGES = ("cputrain", "torch", "torchvision", "oneccl-devel", "impi-rt")
CLOCK_S = 2.0  # events of several hosts would be out of order; certificates and schedulers mind more
SCRATCH_BYTES = GIB
SLOW = 0.5  # of the median link
RING_S = 2.0
CHUNK = bytes(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a host says of itself. `clock_s` is its clock minus the launching host's; `link_gbit` what it sent to its
    neighbour in the ring, None where that failed or there is none; `no_provider` the libfabric provider that the job
    is told to use and that the host's fi_info does not list."""

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
class Verdict:
    """What is wrong (the job must not start) and what is doubtful, a line each, naming hosts."""

    wrong: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)


def judge(reports: Iterable[Report], plans: dict[str, Plan]) -> Verdict:
    """Compare what hosts have said with each other and with their plans (by host name)."""
    said, verdict = list(reports), Verdict()
    kinds: dict[str, dict[str, str]] = {"Python": {report.host: report.python for report in said}}
    for name in dict.fromkeys(name for report in said for name, _ in report.packages):
        kinds[name] = {report.host: dict(report.packages).get(name, "none") for report in said}
    for path in dict.fromkeys(path for report in said for path, _ in report.files):
        kinds[path] = {report.host: dict(report.files).get(path, "absent") for report in said}
    for what, values in kinds.items():
        usual = Counter(values.values()).most_common(1)[0][0]
        for host, value in values.items():
            if value != usual:
                verdict.wrong.append(f"{host} has {what} {value[:12]}, the others {usual[:12]}: make them the same")
    for report in said:
        plan = plans[report.host]
        missing = sorted({pu for worker in plan.workers for pu in worker.pus} - {*report.allowed_pus})
        if missing:
            verdict.wrong.append(f"{report.host} does not lend PUs {format_list(missing)} of its plan: plan it anew")
        need = sum(worker.memory_bytes or 0 for worker in plan.workers)
        if report.memory_bytes < need:
            verdict.wrong.append(
                f"{report.host} has {report.memory_bytes / GIB:.1f} GiB of memory free, its plan needs {need / GIB:.1f}"
            )
        if report.no_provider:
            verdict.doubtful.append(
                f"{report.host}'s libfabric has no provider {report.no_provider} (fi_info -l): unless the MPI brings "
                "its own, choose another --fabric"
            )
        if abs(report.clock_s) > CLOCK_S:
            verdict.doubtful.append(f"{report.host}'s clock is {report.clock_s:+.1f} s off: look at its time service")
        if report.scratch_bytes < SCRATCH_BYTES:
            verdict.doubtful.append(f"{report.host} has {report.scratch_bytes / GIB:.1f} GiB of scratch free")
    speeds = [report.link_gbit for report in said if report.link_gbit is not None]
    for report in said:
        if report.link_gbit is not None and report.link_gbit < SLOW * median(speeds):
            verdict.doubtful.append(
                f"{report.host} sends {report.link_gbit:.2f} Gbit/s to its neighbour, half of the hosts "
                f"{median(speeds):.2f} or more: a slow link or a slow host"
            )
    return verdict


def look(paths: tuple[str, ...], scratch: str, machine: Machine, now_s: float) -> Report:
    """This host's report; `now_s` is the launching host's clock."""
    memory = Path("/proc/meminfo").read_text()
    free_kib = next(int(line.split()[1]) for line in memory.splitlines() if line.startswith("MemAvailable:"))
    space = os.statvfs(scratch)
    return Report(
        host=socket.gethostname(),
        python=sys.version.split()[0],
        packages=tuple((name, version) for name in PACKAGES if (version := _version(name))),
        files=tuple((path, _digest(Path(path))) for path in paths),
        clock_s=round(time.time() - now_s, 3),
        memory_bytes=free_kib * 1024,
        scratch_bytes=space.f_bavail * space.f_frsize,
        allowed_pus=machine.allowed_pus,
        no_provider=missing_provider(os.environ.get("FI_PROVIDER")),
    )


def missing_provider(wanted: str | None) -> str | None:
    """The first of the wanted libfabric providers ("psm3", "tcp;ofi_rxm") that fi_info does not list; None without it.

    "^" excludes providers: nothing is wanted then.
    """
    program = shutil.which("fi_info")
    if wanted is None or wanted.startswith("^") or program is None:
        return None
    said = subprocess.run([program, "-l"], capture_output=True, text=True, check=False)
    offered = {line.removesuffix(":") for line in said.stdout.splitlines() if line.endswith(":")}
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
    """One host's part: report, then send to the next host of the ring for RING_S while the one before sends here."""
    parser = argparse.ArgumentParser(prog="python -m mpi.preflight.checks", description=__doc__)
    parser.add_argument("--monitor", required=True, metavar="HOST:PORT")
    parser.add_argument("--scratch", default=tempfile.gettempdir())
    parser.add_argument("files", nargs="*")
    options = parser.parse_args(arguments)
    rank = discover(os.environ)
    host, _, port = options.monitor.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    own = connection.getsockname()[0]
    line = Line(connection)
    server = socket.create_server(("", 0))
    threading.Thread(target=_swallow, args=(server,), daemon=True).start()
    line.send(
        what="hello",
        token=os.environ.get(TOKEN_VARIABLE, ""),
        rank=rank.rank if rank else 0,
        host=socket.gethostname(),
    )
    clock = _next(line, "clock")
    report = look(tuple(options.files), options.scratch, this_machine(), float(clock["now_s"]))
    line.send(what="report", report=asdict(report), address=own, port=server.getsockname()[1])
    ring = _next(line, "ring")
    line.send(what="speed", gbit=_send(ring["address"], int(ring["port"])) if ring["address"] else None)
    _next(line, "stop")
    return 0


def _next(line: Line, what: str) -> dict[str, Any]:
    """The next message of that kind; ends this probe when the launching host has hung up."""
    while True:
        messages = line.receive()
        if messages is None:
            sys.exit(1)
        found = next((message for message in messages if message.get("what") == what), None)
        if found is not None:
            return found
        time.sleep(0.01)


def _swallow(server: socket.socket) -> None:
    """Take all that the host before sends."""
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass


def _send(address: str, port: int) -> float | None:
    """Gbit/s that got through to a host in RING_S; None where it cannot be reached."""
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
