"""A /sys + /proc tree (this host's, or one unpacked from elsewhere) -> Machine. The root is an argument."""

import os
from pathlib import Path

from affinity.cgroup import read_limits
from affinity.cpuset import parse_list, parse_mask
from affinity.errors import InputError
from affinity.machine import Core, Machine, NumaNode, narrowed, ordered

# What decides which kernels oneDNN picks, oldest first.
ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


def this_machine() -> Machine:
    """This host, allowed what the kernel allows this process: affinity mask, memory nodes, control groups."""
    status = Path("/proc/self/status").read_text()
    nodes = next((line.split(":")[1] for line in status.splitlines() if line.startswith("Mems_allowed_list:")), None)
    machine = read_machine(Path("/"))
    return narrowed(
        machine, frozenset(os.sched_getaffinity(0)), None if nodes is None else frozenset(parse_list(nodes))
    )


def read_machine(root: Path) -> Machine:
    """Read the machine whose `sys/` and `proc/` lie under root, allowed what its control groups leave.

    Core identity comes from thread siblings, never from core_id (which repeats) or from the order of the PUs.
    Raises InputError naming the file that is missing or contradicts another.
    """
    cpu_dir = root / "sys/devices/system/cpu"
    online = _online_pus(cpu_dir)
    nodes = _numa_nodes(root / "sys/devices/system/node", online)
    node_of = {pu: node.id for node in nodes for pu in node.pus}
    cores = ordered([_core(cpu_dir, siblings, node_of) for siblings in _sibling_sets(cpu_dir, online)])
    model, isa = _cpuinfo(root / "proc/cpuinfo")
    hostname = root / "proc/sys/kernel/hostname"
    limits = read_limits(root)
    machine = Machine(
        name=hostname.read_text().strip() if hostname.is_file() else root.resolve().name,
        model=model,
        isa=isa,
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
        pus = _ids(listed)
    else:  # kernels without cpu/online: a PU is online unless its own file says otherwise
        pus = tuple(
            sorted(
                int(d.name[3:])
                for d in cpu_dir.glob("cpu[0-9]*")
                if (d / "topology").is_dir() and not ((d / "online").is_file() and _text(d / "online") == "0")
            )
        )
    if not pus:
        raise InputError(f"no online PU found in {cpu_dir}: give a folder that holds sys/devices/system/cpu")
    return pus


def _sibling_sets(cpu_dir: Path, online: tuple[int, ...]) -> list[tuple[int, ...]]:
    """One tuple of online PUs per core, each PU in exactly one."""
    core_of: dict[int, tuple[int, ...]] = {}
    for pu in online:
        path = _first_file(cpu_dir / f"cpu{pu}/topology", ("core_cpus_list", "thread_siblings_list", "thread_siblings"))
        # No topology folder: some virtual machines and old kernels; each PU is then a core of its own.
        siblings = (pu,) if path is None else tuple(i for i in _ids(path) if i in online)
        if pu not in siblings or any(core_of.get(i, siblings) != siblings for i in siblings):
            raise InputError(f"{path} contradicts the other PUs' siblings: read the machine again")
        core_of[pu] = siblings
    return sorted(set(core_of.values()))


def _core(cpu_dir: Path, siblings: tuple[int, ...], node_of: dict[int, int]) -> Core:
    package = cpu_dir / f"cpu{siblings[0]}/topology/physical_package_id"
    package_id = _number(package) if package.is_file() else 0
    return Core(pus=siblings, package=max(package_id, 0), numa_node=node_of.get(siblings[0]))


def _numa_nodes(node_dir: Path, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
    nodes = []
    for folder in sorted(node_dir.glob("node[0-9]*"), key=lambda d: int(d.name[4:])):
        path = _first_file(folder, ("cpulist", "cpumap"))
        pus = () if path is None else tuple(pu for pu in _ids(path) if pu in online)
        nodes.append(NumaNode(id=int(folder.name[4:]), pus=pus, memory_bytes=_memory_bytes(folder / "meminfo")))
    return tuple(nodes)


def _memory_bytes(meminfo: Path) -> int:
    if not meminfo.is_file():
        return 0
    kib = next((line.split()[-2] for line in _text(meminfo).splitlines() if "MemTotal:" in line), "0")
    return int(kib) * 1024


def _cpuinfo(path: Path) -> tuple[str, tuple[str, ...]]:
    """Model name and the vector extensions of the first PU; empty where the tree has no cpuinfo."""
    fields: dict[str, str] = {}
    if path.is_file():
        for line in _text(path).splitlines():
            key, colon, value = line.partition(":")
            if colon:
                fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", "").split()
    return fields.get("model name", "unknown model"), tuple(flag for flag in ISA_FLAGS if flag in flags)


def _first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def _ids(path: Path) -> tuple[int, ...]:
    is_list = path.name.endswith("list") or path.name == "online"
    try:
        return parse_list(_text(path)) if is_list else parse_mask(_text(path))
    except ValueError:
        raise InputError(f"{path} holds {_text(path)[:40]!r}, which is no set of PUs") from None


def _number(path: Path) -> int:
    try:
        return int(_text(path))
    except ValueError:
        raise InputError(f"{path} holds {_text(path)[:40]!r}, which is no number") from None
