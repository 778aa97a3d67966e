"""A /sys + /proc tree (this host's, or one unpacked from elsewhere) -> Machine. The root is an argument."""

import os
import re
from pathlib import Path

from affinity.errors import InputError
from affinity.topology.cgroup import read_limits
from affinity.topology.core_types import core_speeds
from affinity.topology.cpuset import parse_list
from affinity.topology.kernel_files import first_file, ids, number, text
from affinity.topology.machine import Core, Machine, narrowed, ordered
from affinity.topology.numa import XEON_PHI, read_nodes

# Sapphire Rapids with HBM in its package: only its name differs from other models.
XEON_MAX = re.compile(r"Xeon\(R\) CPU Max", re.IGNORECASE)
# The flags by which oneDNN chooses its kernels, oldest first.
ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


def this_machine() -> Machine:
    """This host, with the CPUs and memory that this process may use: affinity mask, memory nodes, control groups."""
    status = Path("/proc/self/status").read_text()
    nodes = next((line.split(":")[1] for line in status.splitlines() if line.startswith("Mems_allowed_list:")), None)
    machine = read_machine(Path("/"))
    return narrowed(
        machine, frozenset(os.sched_getaffinity(0)), None if nodes is None else frozenset(parse_list(nodes))
    )


def read_machine(root: Path) -> Machine:
    """Read the machine whose `sys/` and `proc/` are under root, with the limits of its control groups.

    Core identity comes from thread siblings, never from core_id (which repeats) or from the order of the PUs.
    Raises InputError that names the file that is missing or contradicts another.
    """
    cpu_dir = root / "sys/devices/system/cpu"
    online = _online_pus(cpu_dir)
    cpuinfo = _cpuinfo(root / "proc/cpuinfo")
    flags = cpuinfo.get("flags", "").split()
    nodes = read_nodes(root / "sys/devices", online, on_package_memory=_has_on_package_memory(cpuinfo))
    node_of = {pu: node.id for node in nodes for pu in node.pus}
    siblings = _sibling_sets(cpu_dir, online)
    speeds = core_speeds(root / "sys/devices", tuple(pus[0] for pus in siblings))
    dies = _dies(cpu_dir, siblings)
    cores = ordered([_core(cpu_dir, pus, node_of, dies.get(pus[0]), speeds.get(pus[0], 1.0)) for pus in siblings])
    hostname = root / "proc/sys/kernel/hostname"
    limits = read_limits(root)
    machine = Machine(
        name=text(hostname) if hostname.is_file() else root.resolve().name,
        model=cpuinfo.get("model name", "unknown model"),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        cores=cores,
        numa_nodes=nodes,
        allowed_pus=online,
        allowed_nodes=tuple(node.id for node in nodes),
        cpu_quota=limits.cpu_quota,
        memory_limit_bytes=limits.memory_bytes,
    )
    return narrowed(machine, *(None if ids is None else frozenset(ids) for ids in (limits.pus, limits.nodes)))


def _online_pus(cpu_dir: Path) -> tuple[int, ...]:
    listed = cpu_dir / "online"
    if listed.is_file():
        pus = ids(listed)
    else:  # kernels without cpu/online: a PU is online unless its own file has 0
        pus = tuple(
            sorted(
                int(d.name[3:])
                for d in cpu_dir.glob("cpu[0-9]*")
                if (d / "topology").is_dir() and not ((d / "online").is_file() and text(d / "online") == "0")
            )
        )
    if not pus:
        raise InputError(f"no online CPU found in {cpu_dir}: name a folder that has sys/devices/system/cpu")
    return pus


def _sibling_sets(cpu_dir: Path, online: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One tuple of online PUs per core, each PU in exactly one."""
    core_of: dict[int, tuple[int, ...]] = {}
    for pu in online:
        path = first_file(cpu_dir / f"cpu{pu}/topology", ("core_cpus_list", "thread_siblings_list", "thread_siblings"))
        # No topology folder: some virtual machines and old kernels; each PU is then a core of its own.
        siblings = (pu,) if path is None else tuple(i for i in ids(path) if i in online)
        if pu not in siblings or any(core_of.get(i, siblings) != siblings for i in siblings):
            raise InputError(f"{path} contradicts the other CPUs' siblings: copy the tree again")
        core_of[pu] = siblings
    return sorted(set(core_of.values()))


def _core(cpu_dir: Path, pus: tuple[int, ...], node_of: dict[int, int], die: int | None, speed: float) -> Core:
    caches = _caches(cpu_dir / f"cpu{pus[0]}/cache")
    return Core(
        pus=pus,
        package=_package(cpu_dir, pus[0]),
        numa_node=node_of.get(pus[0]),
        die=die,
        l3=caches.get(3),
        l2=caches.get(2),
        speed=speed,
    )


def _package(cpu_dir: Path, pu: int) -> int:
    path = cpu_dir / f"cpu{pu}/topology/physical_package_id"
    return max(number(path), 0) if path.is_file() else 0


def _dies(cpu_dir: Path, siblings: list[tuple[int, ...]]) -> dict[int, int]:
    """First PU of a core -> its die; empty where each package is one die."""
    paths = {pus[0]: cpu_dir / f"cpu{pus[0]}/topology/die_id" for pus in siblings}
    dies = {pu: number(path) for pu, path in paths.items() if path.is_file()}
    packages = {pu: _package(cpu_dir, pu) for pu in dies}
    several = len(set(zip(packages.values(), dies.values(), strict=True))) > len(set(packages.values()))
    return dies if several else {}


def _caches(folder: Path) -> dict[int, int]:
    """Level -> lowest PU that shares the cache of that level."""
    found = {}
    for index in sorted(folder.glob("index[0-9]")):
        shared = first_file(index, ("shared_cpu_list", "shared_cpu_map"))
        if shared is not None and (index / "level").is_file() and (pus := ids(shared)):
            found[number(index / "level")] = pus[0]
    return found


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first PU's fields; empty where the tree has no cpuinfo."""
    fields: dict[str, str] = {}
    for line in text(path).splitlines() if path.is_file() else ():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _has_on_package_memory(cpuinfo: dict[str, str]) -> bool:
    family_model = (cpuinfo.get("cpu family"), cpuinfo.get("model"))
    return family_model in XEON_PHI or XEON_MAX.search(cpuinfo.get("model name", "")) is not None
