"""A /sys + /proc tree (this host's, or one unpacked from elsewhere) -> Machine. The root is an argument."""

import os
from pathlib import Path

from affinity.errors import InputError
from affinity.terminal_text import printable
from affinity.topology.cgroup import Limits, read_limits
from affinity.topology.core_types import core_speeds
from affinity.topology.cpuset import format_list, parse_list
from affinity.topology.kernel_files import first_file, ids, number, number_if_any, numbered, rows, text
from affinity.topology.machine import Core, Machine, homeless_warnings, narrowed, ordered
from affinity.topology.memory_kinds import on_package_gib, without_dram
from affinity.topology.numa import read_nodes

# The flags by which oneDNN chooses its kernels, oldest first: x86's, then Arm's.
ISA_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16"),
    *("asimd", "sve", "sve2", "bf16"),
)

# The PUs of a package: newer names first.
PACKAGE_SETS = ("package_cpus_list", "core_siblings_list", "package_cpus", "core_siblings")


def this_machine() -> Machine:
    """This host, with the CPUs and memory that this thread may use: affinity mask, memory nodes, control groups."""
    return read_machine(Path("/"), mask=frozenset(os.sched_getaffinity(0)))


def read_machine(root: Path, *, name: str | None = None, mask: frozenset[int] | None = None) -> Machine:
    """Read the machine whose `sys/` and `proc/` are under root, with the limits of its process and control groups.

    Core identity comes from thread siblings, never from core_id (which repeats) or from the order of the PUs. `name` is
    for hosts that do not tell theirs; default: the folder's. `mask`: the PUs that the kernel allows; default: those of
    proc/self/status. They hold against all other files: in containers lxcfs shows others. Raises InputError that names
    the file that is missing or contradicts another.
    """
    cpu_dir = root / "sys/devices/system/cpu"
    process = _allowed(root / "proc/self/status")
    allowed = mask or (frozenset(process["Cpus"]) if process.get("Cpus") else None)
    online, contradictions = _online_pus(cpu_dir, allowed, live=mask is not None)
    cpuinfo = _cpuinfo(root / "proc/cpuinfo")
    flags = {*cpuinfo.get("flags", "").split(), *cpuinfo.get("Features", "").split()}
    model = printable(cpuinfo.get("model name", "unknown model"))
    on_package = on_package_gib(cpuinfo.get("cpu family"), cpuinfo.get("model"), model)
    nodes, warnings = read_nodes(root / "sys/devices", online, on_package_gib=on_package)
    siblings = _sibling_sets(cpu_dir, online)
    cores = _cores(root / "sys/devices", siblings, {pu: node.id for node in nodes for pu in node.pus})
    nodes = without_dram(nodes, len({core.package for core in cores}), model)
    hostname = root / "proc/sys/kernel/hostname"
    limits = read_limits(root)
    machine = Machine(
        name=printable((text(hostname) if hostname.is_file() else None) or name or root.resolve().name),
        model=model,
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        cores=cores,
        numa_nodes=nodes,
        allowed_pus=online,
        allowed_nodes=tuple(node.id for node in nodes),
        cpu_quota=limits.cpu_quota,
        memory_limit_bytes=limits.memory_bytes,
        isolated_pus=tuple(sorted(isolated_pus(root, limits) & frozenset(online))),
        warnings=(*contradictions, *warnings, *homeless_warnings(cores)),
    )
    # The kernel keeps a process's mask inside its cpuset.
    pus = allowed if allowed is not None else None if limits.pus is None else frozenset(limits.pus)
    machine = narrowed(machine, pus, None)
    for nodes_allowed in (limits.nodes, process.get("Mems")):
        machine = narrowed(machine, None, None if nodes_allowed is None else frozenset(nodes_allowed))
    return machine


def isolated_pus(root: Path, limits: Limits) -> frozenset[int]:
    """The PUs between which the scheduler moves no thread: those of isolcpus on the kernel's command line, and of this
    process's isolated cpuset partition."""
    path = root / "sys/devices/system/cpu/isolated"
    at_boot = ids(path) if path.is_file() else ()
    return frozenset((*at_boot, *((limits.pus or ()) if limits.isolated else ())))


def _allowed(status: Path) -> dict[str, tuple[int, ...]]:
    """The PUs ("Cpus") and memory nodes ("Mems") of a process; empty where a tree does not tell."""
    found = {}
    for name, listed in rows(status, 2, ":") if status.is_file() else ():
        if name in ("Cpus_allowed_list", "Mems_allowed_list"):
            try:
                found[name[:4]] = parse_list(listed)
            except ValueError:
                raise InputError(f"{status} contains {listed[:40]!r}, which is not a list of ids") from None
    return found


def _online_pus(
    cpu_dir: Path, allowed: frozenset[int] | None, *, live: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The online PUs, and a warning where cpu/online contradicts the allowed ones.

    Those of a running process (`live`) are online, those of a saved proc/self/status may be offline.
    """
    path = cpu_dir / "online"
    listed = frozenset(ids(path)) if path.is_file() else _online_by_folders(cpu_dir)
    pus = listed
    warnings: tuple[str, ...] = ()
    if allowed is not None and not allowed <= listed:
        by_folders = _online_by_folders(cpu_dir)
        beyond = allowed - listed
        beyond = (
            beyond if live or (allowed.isdisjoint(listed) and allowed.isdisjoint(by_folders)) else beyond & by_folders
        )
        if beyond:
            pus = by_folders | beyond | (allowed & listed)
            warnings = (
                f"{path} lists CPUs {format_list(listed)}, but the kernel lets this process run on CPUs "
                f"{format_list(allowed)}: these are planned (lxcfs, for one, numbers a container's CPUs anew)",
            )
    if not pus:
        raise InputError(f"no online CPU found in {cpu_dir}: name a folder that has sys/devices/system/cpu")
    return tuple(sorted(pus)), warnings


def _online_by_folders(cpu_dir: Path) -> frozenset[int]:
    """The PUs that are online by their own files, as on kernels without cpu/online: unless one has 0."""
    return frozenset(
        pu
        for pu, folder in numbered(cpu_dir, "cpu").items()
        if (folder / "topology").is_dir() and number_if_any(folder / "online") != 0
    )


def _sibling_sets(cpu_dir: Path, online: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One tuple of online PUs per core, each PU in exactly one."""
    every = frozenset(online)
    core_of: dict[int, tuple[int, ...]] = {}
    for pu in online:
        path = first_file(cpu_dir / f"cpu{pu}/topology", ("core_cpus_list", "thread_siblings_list", "thread_siblings"))
        # No topology folder: some virtual machines and old kernels; each PU is then a core of its own.
        siblings = (pu,) if path is None else tuple(i for i in ids(path) if i in every)
        if pu not in siblings or any(core_of.get(i, siblings) != siblings for i in siblings):
            raise InputError(f"{path} contradicts the other CPUs' siblings: copy the tree again")
        core_of[pu] = siblings
    for pu, siblings in core_of.items():
        for other in siblings:
            if core_of[other] != siblings:
                raise InputError(
                    f"{cpu_dir}/cpu{pu}/topology has CPU {other} as a sibling, cpu{other}/topology has not CPU {pu}: "
                    "copy the tree again"
                )
    return sorted(set(core_of.values()))


def _cores(devices: Path, siblings: list[tuple[int, ...]], node_of: dict[int, int]) -> tuple[Core, ...]:
    """One core for each set of siblings."""
    cpu_dir = devices / "system/cpu"
    speeds = core_speeds(devices, tuple(pus[0] for pus in siblings))
    packages = _packages(cpu_dir, siblings)
    dies = _dies(cpu_dir, siblings, packages)
    made = []
    for pus in siblings:
        caches = _caches(cpu_dir / f"cpu{pus[0]}/cache")
        made.append(
            Core(
                pus=pus,
                package=packages[pus[0]],
                numa_node=next((node_of[pu] for pu in pus if pu in node_of), None),
                die=dies.get(pus[0]),
                l3=caches.get(3),
                l2=caches.get(2),
                speed=speeds.get(pus[0], 1.0),
            )
        )
    return ordered(made)


def _packages(cpu_dir: Path, siblings: list[tuple[int, ...]]) -> dict[int, int]:
    """First PU of a core -> its package.

    By physical_package_id; where firmware gives none (-1) by the sets of PUs in a package, in the order of their first
    PUs; one package where there are none either.
    """
    firsts = [pus[0] for pus in siblings]
    topology = {pu: cpu_dir / f"cpu{pu}/topology" for pu in firsts}
    files = {pu: topology[pu] / "physical_package_id" for pu in firsts}
    known = {pu: package for pu, file in files.items() if file.is_file() and (package := number(file)) >= 0}
    if len(known) == len(firsts):
        return known
    paths = {pu: first_file(topology[pu], PACKAGE_SETS) for pu in firsts}
    lowest = {pu: min(ids(path), default=pu) for pu, path in paths.items() if path is not None}
    order = sorted(set(lowest.values()))
    return {pu: order.index(lowest[pu]) if pu in lowest else 0 for pu in firsts}


def _dies(cpu_dir: Path, siblings: list[tuple[int, ...]], packages: dict[int, int]) -> dict[int, int]:
    """First PU of a core -> its die; empty where each package is one die."""
    found = {pus[0]: number_if_any(cpu_dir / f"cpu{pus[0]}/topology/die_id") for pus in siblings}
    dies = {pu: die for pu, die in found.items() if die is not None}
    several = len({(packages[pu], die) for pu, die in dies.items()}) > len({packages[pu] for pu in dies})
    return dies if several else {}


def _caches(folder: Path) -> dict[int, int]:
    """Level -> lowest PU that shares the data cache of that level."""
    found = {}
    for _, index in sorted(numbered(folder, "index").items()):
        shared = first_file(index, ("shared_cpu_list", "shared_cpu_map"))
        level = number_if_any(index / "level")
        if shared is not None and level is not None and (pus := ids(shared)):
            found[level] = pus[0]
    return found


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first PU's fields; empty where the tree has no cpuinfo."""
    fields: dict[str, str] = {}
    for line in text(path).splitlines() if path.is_file() else ():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields
