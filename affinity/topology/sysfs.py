"""Read a machine from the kernel's files in /sys and /proc, of this host or a copy of them."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import printable
from cputrain.affinity.topology.kernel_files import (
    Limits,
    first_file,
    number_if_any,
    numbered_entries,
    read_ids,
    read_limits,
    read_number,
    read_rows,
    read_text,
)
from cputrain.affinity.topology.machine import (
    Core,
    Machine,
    format_list,
    memory_warnings,
    missing_node_warnings,
    name_cpus,
    narrow_machine,
    ordered_cores,
    parse_list,
    parse_mask,
)
from cputrain.affinity.topology.memory import on_package_gib, read_nodes, side_cached, without_dram

# Intel's core types by hwloc's names -> the kernel's performance counters for them.
INTEL_TYPES = {"IntelCore": "cpu_core", "IntelAtom": "cpu_atom", "IntelLowPower": "cpu_lowpower"}
# Figures for the speed of a core, best source first: scheduler, firmware, clock.
MEASURES = ("cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq")
# Fallback speeds relative to IntelCore: the firmware's figures of a Core i7-1370P (39 to 64); low-power cores have the
# same design as IntelAtom at about two thirds of the clock.
ASSUMED = {"IntelCore": 1.0, "IntelAtom": 0.61, "IntelLowPower": 0.4}
# Work per clock cycle of Intel's efficiency cores relative to its performance cores: HYBRID_SCALING_FACTOR_ADL in
# Linux's intel_pstate driver.
ATOM_PER_CLOCK = 0.787
# Cores whose figures differ by a smaller factor are of one type: favored cores have up to a tenth more.
MAX_SPEED_RATIO = 1.1

Types = list[tuple[int, ...]]

# CPU flags that select oneDNN's kernels, oldest first: x86, then Arm.
ISA_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16"),
    *("asimd", "sve", "sve2", "bf16"),
)

# Files with the PUs of a package, newer names first.
PACKAGE_SETS = ("package_cpus_list", "core_siblings_list", "package_cpus", "core_siblings")

ALLOWED = {
    "Cpus_allowed": parse_mask,
    "Mems_allowed": parse_mask,
    "Cpus_allowed_list": parse_list,
    "Mems_allowed_list": parse_list,
}


def core_speeds(devices: Path, pus: tuple[int, ...]) -> dict[int, float]:
    """Map PUs to the speed of their core's type, 1.0 for the fastest; empty if all cores are of one type.

    `devices` is sys/devices, `pus` one PU of each core. Clocks alone do not distinguish types, as favored cores of a
    type have higher clocks. A name may mean two types: Meteor Lake's low-power cores are also cpu_atom.
    """
    types_by_name = _intel_types(devices, pus)
    types = list(types_by_name.values()) or _types(devices, pus)
    if len(types) < 2:
        return {}
    for measure in MEASURES:
        values = _values(devices, pus, measure)
        if values and measure.startswith("cpufreq"):
            values = {pu: clock * work_per_clock(types_by_name, pu) for pu, clock in values.items()}
        if values and (speeds := relative_speeds(split_by_speed(types, values), values)):
            return speeds
    return {pu: ASSUMED[name] for name, members in types_by_name.items() for pu in members}


def relative_speeds(types: Types, values: Mapping[int, float]) -> dict[int, float]:
    """Map PUs to their type's smallest value, relative to the fastest type's; empty if all types have the same."""
    minima = [min(values[pu] for pu in members) for members in types]
    if len(set(minima)) < 2:
        return {}
    return {pu: value / max(minima) for members, value in zip(types, minima, strict=True) for pu in members}


def nearly_equal(values: Mapping[int, float]) -> Types:
    """Group PUs, slowest first, so that a group's largest value is less than MAX_SPEED_RATIO times its smallest."""
    groups: Types = []
    for pu in sorted(values, key=lambda pu: (values[pu], pu)):
        if groups and values[pu] < MAX_SPEED_RATIO * values[groups[-1][0]]:
            groups[-1] += (pu,)
        else:
            groups.append((pu,))
    return groups


def split_by_speed(types: Types, values: Mapping[int, float]) -> Types:
    """Split each type into groups of nearly equal speed."""
    return [group for members in types for group in nearly_equal({pu: values[pu] for pu in members})]


def work_per_clock(types: Mapping[str, tuple[int, ...]], pu: int) -> float:
    """Return a PU's work per clock cycle relative to performance cores; 1 if the types have no names."""
    return 1.0 if all(pu not in members for name, members in types.items() if name != "IntelCore") else ATOM_PER_CLOCK


def _intel_types(devices: Path, pus: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Map Intel's core types to their PUs; empty unless at least two types together have each PU once."""
    listed = {name: devices / counters / "cpus" for name, counters in INTEL_TYPES.items()}
    types_by_name = {name: _members(pus, read_ids(path)) for name, path in listed.items() if path.is_file()}
    types_by_name = {name: members for name, members in types_by_name.items() if members}
    complete = (
        sum(map(len, types_by_name.values()))
        == len(pus)
        == len({pu for members in types_by_name.values() for pu in members})
    )
    return types_by_name if len(types_by_name) > 1 and complete else {}


def _types(devices: Path, pus: tuple[int, ...]) -> Types:
    """Group PUs by core type: by the scheduler's capacities, else by nominal performance."""
    for measure in ("cpu_capacity", "acpi_cppc/nominal_perf"):
        groups = nearly_equal(_values(devices, pus, measure))
        if len(groups) > 1:
            return groups
    return [pus]


def _members(pus: Iterable[int], listed: tuple[int, ...]) -> tuple[int, ...]:
    members = frozenset(listed)
    return tuple(pu for pu in pus if pu in members)


def _values(devices: Path, pus: tuple[int, ...], measure: str) -> dict[int, float]:
    """Map PUs to a figure; empty unless all PUs have it."""
    measured = {pu: number_if_any(devices / f"system/cpu/cpu{pu}" / measure) for pu in pus}
    values = {pu: float(value) for pu, value in measured.items() if value is not None and value > 0}
    return values if len(values) == len(pus) else {}


def this_machine() -> Machine:
    """Read this host, with this thread's limits: affinity mask, memory nodes, control groups."""
    return read_machine(Path("/"), mask=frozenset(os.sched_getaffinity(0)))


def read_machine(root: Path, *, name: str | None = None, mask: frozenset[int] | None = None) -> Machine:
    """Read the machine whose `sys/` and `proc/` are under root, with the limits of its process and control groups.

    Cores are identified by thread siblings, never by core_id (which repeats) or by the order of the PUs. `name` is used
    if the tree has no host name; default: the folder's name. `mask`: the PUs that the kernel allows; default: from
    proc/self/status. The mask overrides all other files, as lxcfs shows other CPUs in containers. Raises InputError
    with the name of the missing or contradictory file.
    """
    cpu_dir = root / "sys/devices/system/cpu"
    process, limits = _allowed(root / "proc/self/status"), read_limits(root)
    # The kernel keeps a process's mask and memory inside its cpuset.
    listed = mask or process.get("Cpus") or limits.pus
    allowed = None if listed is None else frozenset(listed)
    online, contradictions = _online_pus(cpu_dir, allowed, live=mask is not None)
    cpuinfo = _cpuinfo(root / "proc/cpuinfo")
    flags = {*cpuinfo.get("flags", "").split(), *cpuinfo.get("Features", "").split()}
    model = printable(cpuinfo.get("model name", "unknown model"))
    on_package = on_package_gib(cpuinfo.get("cpu family"), cpuinfo.get("model"), model)
    nodes, warnings = read_nodes(root / "sys/devices", online, on_package_gib=on_package)
    siblings, bare = _sibling_sets(cpu_dir, online)
    node_of = {pu: node.id for node in nodes for pu in node.pus}
    cores = _cores(root / "sys/devices", siblings, node_of)
    packages = len({core.package for core in cores})
    nodes, uncertain = without_dram(nodes, packages, model, cached=side_cached(root / "sys/devices"))
    hostname = root / "proc/sys/kernel/hostname"
    machine = Machine(
        name=printable((read_text(hostname) if hostname.is_file() else None) or name or root.resolve().name),
        model=model,
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        cores=cores,
        numa_nodes=nodes,
        allowed_pus=online,
        allowed_nodes=tuple(node.id for node in nodes),
        cpu_quota=limits.cpu_quota,
        memory_limit_bytes=limits.memory_bytes,
        isolated_pus=tuple(sorted(isolated_pus(root, limits) & frozenset(online))),
        warnings=(
            *contradictions,
            *warnings,
            *uncertain,
            *missing_node_warnings(cores),
            *_split_warnings(siblings, bare, node_of),
        ),
    )
    mems = frozenset(process.get("Mems") or limits.nodes or machine.allowed_nodes)
    unknown = mems.isdisjoint(machine.allowed_nodes)
    machine = narrow_machine(machine, allowed, None if unknown else mems)
    known_limits = (*_limit_warnings(machine, limits, mems if unknown else frozenset()), *memory_warnings(machine))
    return replace(machine, warnings=(*machine.warnings, *known_limits))


def _split_warnings(
    siblings: list[tuple[int, ...]], bare: tuple[int, ...], node_of: Mapping[int, int]
) -> tuple[str, ...]:
    """Warn of CPUs without topology if other CPUs have one, and of cores whose CPUs are in several NUMA nodes."""
    split = [pu for pus in siblings if len({node_of[pu] for pu in pus if pu in node_of}) > 1 for pu in pus]
    warnings = []
    if bare and len(bare) < sum(map(len, siblings)):
        warnings.append(f"CPUs {format_list(bare)} have no topology, unlike the others: each counts as a core")
    if split:
        warnings.append(
            f"CPUs {format_list(split)} share cores across NUMA nodes, a bug of the virtual machine or the firmware: "
            "each core is assigned to the node of its first CPU"
        )
    return tuple(warnings)


def _limit_warnings(machine: Machine, limits: Limits, unknown_mems: frozenset[int]) -> tuple[str, ...]:
    """Warn if the kernel's mask has CPUs outside the control group's cpuset, or memory of absent NUMA nodes."""
    beyond = () if limits.pus is None else tuple(pu for pu in machine.allowed_pus if pu not in frozenset(limits.pus))
    warnings = []
    if beyond:
        warnings.append(
            f"the control group's cpuset has {name_cpus(limits.pus or ())}, but the kernel also lets this "
            f"process run on {name_cpus(beyond)}: the plan uses them, too"
        )
    if unknown_mems:
        warnings.append(
            f"the kernel lets this process use memory of NUMA nodes {format_list(unknown_mems)}, but the host has "
            f"nodes {format_list(machine.allowed_nodes)}: the plan uses memory of all of these"
        )
    return tuple(warnings)


def isolated_pus(root: Path, limits: Limits) -> frozenset[int]:
    """Return the PUs between which the scheduler moves no thread: by isolcpus on the kernel's command line, or in this
    process's isolated cpuset partition."""
    path = root / "sys/devices/system/cpu/isolated"
    at_boot = read_ids(path) if path.is_file() else ()
    return frozenset((*at_boot, *((limits.pus or ()) if limits.isolated else ())))


def _allowed(status: Path) -> dict[str, tuple[int, ...]]:
    """Read a process's allowed PUs ("Cpus") and memory nodes ("Mems"), as far as the file lists them."""
    values = {}
    for name, listed in read_rows(status, 2, ":") if status.is_file() else ():
        if name in ALLOWED:
            try:
                values[name[:4]] = ALLOWED[name](listed)
            except ValueError:
                raise InputError(f"{status} contains {listed[:40]!r}, which is not a set of ids") from None
    return values


def _online_pus(
    cpu_dir: Path, allowed: frozenset[int] | None, *, live: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the online PUs, and a warning if cpu/online contradicts the allowed PUs.

    Allowed PUs of a running process (`live`) are online; in a saved proc/self/status, offline PUs may be allowed.
    """
    path = cpu_dir / "online"
    listed = frozenset(read_ids(path)) if path.is_file() else _online_by_folders(cpu_dir)
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
            shown = f"{name_cpus(listed)}" if listed else "no CPU"
            warnings = (
                f"{path} lists {shown}, but the kernel lets this process run on {name_cpus(allowed)}: the plan "
                "uses the latter (in containers, lxcfs renumbers CPUs)",
            )
    if not pus:
        raise InputError(f"no online CPU found in {cpu_dir}: name a folder with sys/devices/system/cpu")
    return tuple(sorted(pus)), warnings


def _online_by_folders(cpu_dir: Path) -> frozenset[int]:
    """Return the PUs that are online by their own files, for kernels without cpu/online."""
    return frozenset(
        pu
        for pu, folder in numbered_entries(cpu_dir, "cpu").items()
        if (folder / "topology").is_dir() and number_if_any(folder / "online") != 0
    )


def _sibling_sets(cpu_dir: Path, online: tuple[int, ...]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return the online PUs of each core, each PU in exactly one core, and the PUs without topology.

    Without topology (some virtual machines and old kernels) each PU counts as a core.
    """
    every = frozenset(online)
    core_of: dict[int, tuple[int, ...]] = {}
    bare: list[int] = []
    for pu in online:
        path = first_file(cpu_dir / f"cpu{pu}/topology", ("core_cpus_list", "thread_siblings_list", "thread_siblings"))
        if path is None:
            bare.append(pu)
        siblings = (pu,) if path is None else tuple(i for i in read_ids(path) if i in every)
        if pu not in siblings or any(core_of.get(i, siblings) != siblings for i in siblings):
            raise InputError(f"{path} contradicts the other CPUs' siblings: copy the tree again")
        core_of[pu] = siblings
    for pu, siblings in core_of.items():
        for sibling in siblings:
            if core_of[sibling] != siblings:
                raise InputError(
                    f"{cpu_dir}/cpu{pu}/topology lists CPU {sibling} as a sibling, but cpu{sibling}/topology does not "
                    f"list CPU {pu}: copy the tree again"
                )
    return sorted(set(core_of.values())), tuple(bare)


def _cores(devices: Path, siblings: list[tuple[int, ...]], node_of: dict[int, int]) -> tuple[Core, ...]:
    """Build a core for each set of siblings."""
    cpu_dir = devices / "system/cpu"
    speeds = core_speeds(devices, tuple(pus[0] for pus in siblings))
    packages = _packages(cpu_dir, siblings, node_of)
    dies = _dies(cpu_dir, siblings, packages)
    cores = []
    for pus in siblings:
        caches = _caches(cpu_dir / f"cpu{pus[0]}/cache")
        cores.append(
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
    return ordered_cores(cores)


def _packages(cpu_dir: Path, siblings: list[tuple[int, ...]], node_of: Mapping[int, int]) -> dict[int, int]:
    """Map the first PU of each core to its package.

    By physical_package_id, for cores without one by their NUMA node's other cores. If no core has one (the firmware
    gives -1), packages are numbered by the first PU of their sets of PUs; without such sets there is one package.
    """
    firsts = [pus[0] for pus in siblings]
    topology = {pu: cpu_dir / f"cpu{pu}/topology" for pu in firsts}
    files = {pu: topology[pu] / "physical_package_id" for pu in firsts}
    packages = {pu: package for pu, file in files.items() if file.is_file() and (package := read_number(file)) >= 0}
    if packages:
        of_node = {node_of.get(pu): package for pu, package in packages.items()}
        return {pu: packages.get(pu, of_node.get(node_of.get(pu), min(packages.values()))) for pu in firsts}
    paths = {pu: first_file(topology[pu], PACKAGE_SETS) for pu in firsts}
    lowest = {pu: min(read_ids(path), default=pu) for pu, path in paths.items() if path is not None}
    order = sorted(set(lowest.values()))
    return {pu: order.index(lowest[pu]) if pu in lowest else 0 for pu in firsts}


def _dies(cpu_dir: Path, siblings: list[tuple[int, ...]], packages: dict[int, int]) -> dict[int, int]:
    """Map the first PU of each core to its die; empty if each package is a single die."""
    die_ids = {pus[0]: number_if_any(cpu_dir / f"cpu{pus[0]}/topology/die_id") for pus in siblings}
    dies = {pu: die for pu, die in die_ids.items() if die is not None}
    several = len({(packages[pu], die) for pu, die in dies.items()}) > len({packages[pu] for pu in dies})
    return dies if several else {}


def _caches(folder: Path) -> dict[int, int]:
    """Map cache levels to the lowest PU that shares the data cache of that level."""
    caches = {}
    for _, index in sorted(numbered_entries(folder, "index").items()):
        shared = first_file(index, ("shared_cpu_list", "shared_cpu_map"))
        level = number_if_any(index / "level")
        if shared is not None and level is not None and (pus := read_ids(shared)):
            caches[level] = pus[0]
    return caches


def _cpuinfo(path: Path) -> dict[str, str]:
    """Read the first PU's fields; empty if the tree has no cpuinfo."""
    fields: dict[str, str] = {}
    for line in read_text(path).splitlines() if path.is_file() else ():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields
