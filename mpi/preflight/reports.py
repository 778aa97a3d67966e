"""The reports of a job's hosts, compared with each other and with their plans; the messages of the pre-flight."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from affinity.planner.plan import Plan
from affinity.topology.cpuset import format_list
from affinity.units import GIB

CLOCK_S = 2.0  # events of several hosts would be out of order; certificates and schedulers mind more
SCRATCH_BYTES = GIB
SLOW = 0.5  # of the median link


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The launching host's time (Unix)."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a host waits for the traffic of the host before it in the ring."""

    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPeer:
    """Where a host sends its traffic to; an empty address: nowhere."""

    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """The speed at which a host has sent, in Gbit/s; None where it could not."""

    gbit: float | None


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
