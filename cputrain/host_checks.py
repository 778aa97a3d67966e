"""Checks of a host for trainings: processor, control groups, huge pages, limits, shared memory."""

import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.kernel_files import read_text
from cputrain.affinity.topology.machine import Machine, format_list
from cputrain.affinity.topology.sysfs import read_machine, this_machine
from cputrain.affinity.wording import GIB, MIB, memory_text, plural
from cputrain.mpi.fabric import fabric_here

OK, WARNING, ERROR = "ok", "warning", "error"

SHM = Path("/dev/shm")
SHM_BYTES = GIB  # for DataLoader processes and MPI's shared memory; Docker's default is 64 MiB
MIN_FILES, MIN_PROCESSES = 4096, 4096
MIN_MEMORY = 2 * GIB  # torch alone needs 0.4 GiB per worker
RDMA = ("opa", "psm3", "ib", "efa", "slingshot")
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was checked, what was found, and a remedy; "" if none is needed.

    The status is OK, WARNING (slower or less than possible) or ERROR (something does not work).
    """

    name: str
    status: str
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Check:
    """Return a check without problems."""
    return Check(name=name, status=OK, found=found)


def warning(name: str, found: str, remedy: str) -> Check:
    """Return a check for something that is slower or less than it could be."""
    return Check(name=name, status=WARNING, found=found, remedy=remedy)


def error(name: str, found: str, remedy: str) -> Check:
    """Return a check for something that does not work."""
    return Check(name=name, status=ERROR, found=found, remedy=remedy)


def checks_text(checks: Sequence[Check]) -> str:
    """Format a line per check with its remedy below, then a summary and the next step."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<7}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    counts = [sum(check.status == status for check in checks) for status in (OK, WARNING, ERROR)]
    lines.append(f"\n{counts[0]} ok, {plural(counts[1], 'warning')}, {plural(counts[2], 'error')}")
    broken = next((check for check in checks if check.status == ERROR), None)
    lines.append(f"next: {broken.name}: {broken.remedy}" if broken else "next: cputrain plan")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Soft limits of a process: locked memory and address space in bytes, open files, processes; -1: unlimited."""

    locked_bytes: int
    address_bytes: int
    files: int
    processes: int


def current_limits() -> ProcessLimits:
    """Return the limits of this process."""
    names = ("MEMLOCK", "AS", "NOFILE", "NPROC")
    locked, address, files, processes = (resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in names)
    return ProcessLimits(locked_bytes=locked, address_bytes=address, files=files, processes=processes)


def host_checks(root: Path, limits: ProcessLimits, shm_bytes: int | None) -> Iterator[Check]:
    """Yield all checks of the host under `root`; `shm_bytes` is the size of its /dev/shm, None without one."""
    try:
        machine = this_machine() if root == Path("/") else read_machine(root)
    except InputError as refused:
        yield error("processor", str(refused), "attach the file that cputrain machine save writes to a bug report")
    else:
        yield processor_check(machine, virtual=is_virtual(root))
        yield from control_groups(machine)
    yield governor(root)
    yield transparent_huge_pages(root)
    yield reserved_huge_pages(root)
    yield locked_memory(limits, fabric_here(root))
    yield from process_limits(limits)
    yield shared_memory(shm_bytes)


def shm_size() -> int | None:
    """Return the size of the shared-memory file system; None without one."""
    if not SHM.is_dir():
        return None
    space = os.statvfs(SHM)
    return space.f_blocks * space.f_frsize


def is_virtual(root: Path) -> bool:
    """Whether the host is a virtual machine according to its CPU flags."""
    cpuinfo = root / "proc/cpuinfo"
    return cpuinfo.is_file() and re.search(r"^flags\s*:.*\bhypervisor\b", read_text(cpuinfo), re.MULTILINE) is not None


def processor_check(machine: Machine, *, virtual: bool) -> Check:
    """Check the instruction sets that oneDNN's kernels need."""
    features = set(machine.isa)
    description = f"{machine.model}: {', '.join(machine.isa) or 'no instruction set of the fast kernels in oneDNN'}"
    if features & {"avx512f", "sve", "asimd"}:
        return ok("processor", description)
    hidden = "if the host has AVX-512, give the virtual machine its processor (QEMU: -cpu host)"
    if "avx2" in features:
        remedy = hidden if virtual else "convolutions run at half the speed of AVX-512; bf16 is emulated, keep float32"
        return (
            ok("processor", description) if not virtual else warning("processor", f"{description}, no AVX-512", remedy)
        )
    return error("processor", description, hidden if virtual else "use a host with AVX2 or AVX-512")


def control_groups(machine: Machine) -> Iterator[Check]:
    """Check the limits of CPUs, CPU time and memory."""
    cores, allowed = len(machine.cores), len(machine.allowed_cores)
    description, quota = f"{allowed} of {plural(cores, 'core')}", machine.cpu_quota
    if not allowed:
        yield error("CPUs allowed", description, "the cpuset and the affinity mask have no common CPU: fix them")
    elif quota is not None and quota < allowed:
        yield warning(
            "CPUs allowed",
            f"{description}, limited to the time of {quota:g} CPUs (cgroup quota)",
            "give it whole CPUs (Kubernetes: Guaranteed pods, static CPU manager; Docker: --cpuset-cpus, not --cpus)",
        )
    else:
        yield ok("CPUs allowed", description)
    if isolated := [pu for pu in machine.allowed_pus if pu in machine.isolated_pus]:
        yield warning(
            "isolated CPUs",
            f"{format_list(isolated)} (isolcpus): the scheduler does not balance threads between them",
            f"plans avoid them if there are others; --cores {format_list(isolated)} plans them",
        )
    for contradiction in machine.warnings:
        yield warning("topology", contradiction, "check the plan that cputrain plan prints")
    total = sum(node.memory_bytes for node in machine.numa_nodes)
    limit = machine.memory_limit_bytes
    description = memory_text(total) + (
        "" if limit is None else f", of which the control group allows {memory_text(limit)}"
    )
    if min(total, limit or total) < MIN_MEMORY:
        yield warning(
            "memory", description, f"a worker needs 1 GiB or more; raise the limit to {memory_text(MIN_MEMORY)}"
        )
    else:
        yield ok("memory", description)


def governor(root: Path) -> Check:
    """Check the clock governor."""
    folder = root / "sys/devices/system/cpu"
    names = {read_text(path) for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    preferences = {read_text(path) for path in folder.glob("cpu[0-9]*/cpufreq/energy_performance_preference")}
    if not names:
        return ok("clock governor", "not visible here: this is a virtual machine, or the firmware sets the clock")
    description = ", ".join(sorted(names)) + (f" ({', '.join(sorted(preferences))})" if preferences else "")
    if names <= {"performance", "schedutil"} or preferences == {"performance"}:
        return ok("clock governor", description)
    return warning("clock governor", description, "cpupower frequency-set -g performance")


def transparent_huge_pages(root: Path) -> Check:
    """Check whether large tensors get pages of 2 MiB."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if not path.is_file():
        return ok("transparent huge pages", "not in this kernel")
    chosen = re.search(r"\[(\w+)\]", read_text(path))
    mode = chosen[1] if chosen else read_text(path)
    if mode == "never":
        return warning("transparent huge pages", mode, f"echo madvise > /{path.relative_to(root)}")
    return ok("transparent huge pages", mode)


def reserved_huge_pages(root: Path) -> Check:
    """Check for memory reserved as huge pages, which torch's tensors cannot use."""
    values = read_meminfo(root)
    size = values.get("HugePages_Total", 0) * values.get("Hugepagesize", 0) * 1024
    free = values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0) * 1024
    total = values.get("MemTotal", 0) * 1024
    if free > total / 20:
        description = f"{memory_text(size)} reserved, {memory_text(free)} of it unused"
        return warning("reserved huge pages", description, "sysctl vm.nr_hugepages=0, as torch cannot use them")
    return ok("reserved huge pages", memory_text(size) if size else "none")


def locked_memory(limits: ProcessLimits, fabric: str) -> Check:
    """Check the limit of locked memory, which network cards need."""
    limit = limits.locked_bytes
    description = "unlimited" if limit == UNLIMITED else memory_text(limit)
    if limit != UNLIMITED and fabric in RDMA:
        remedy = "the network here pins memory; set `* soft memlock unlimited` and hard in limits.conf, or Slurm's "
        return error("locked memory", f"{description} (ulimit -l)", f"{remedy}PropagateResourceLimitsExcept=MEMLOCK")
    return ok("locked memory", f"{description} (ulimit -l)")


def process_limits(limits: ProcessLimits) -> Iterator[Check]:
    """Check the limits of open files, processes and address space."""
    for name, limit, minimum, flag in (
        ("open files", limits.files, MIN_FILES, "-n"),
        ("processes", limits.processes, MIN_PROCESSES, "-u"),
    ):
        description = "unlimited" if limit == UNLIMITED else f"{limit:,}"
        if limit != UNLIMITED and limit < minimum:
            yield warning(name, f"{description} (ulimit {flag})", f"ulimit {flag} {minimum}, or more")
        else:
            yield ok(name, f"{description} (ulimit {flag})")
    if limits.address_bytes != UNLIMITED:
        description = f"{memory_text(limits.address_bytes)} (ulimit -v)"
        yield warning("address space", description, "torch maps much more than it uses: ulimit -v unlimited")


def shared_memory(size: int | None) -> Check:
    """Check the size of /dev/shm, for data-loader processes and MPI inside a host."""
    if size is None:
        return error("/dev/shm", "missing", "mount -t tmpfs tmpfs /dev/shm")
    if size < SHM_BYTES:
        remedy = "Docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm"
        return warning("/dev/shm", f"{size / MIB:,.0f} MiB", remedy)
    return ok("/dev/shm", memory_text(size))


def read_meminfo(root: Path) -> Mapping[str, int]:
    """Parse /proc/meminfo: values in KiB or pages; {} if there is none."""
    path = root / "proc/meminfo"
    lines = read_text(path).splitlines() if path.is_file() else []
    fields = (re.match(r"(\w+):\s+(\d+)", line) for line in lines)
    return {match[1]: int(match[2]) for match in fields if match}
