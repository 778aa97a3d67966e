"""Generated machines, as values and as the kernel's files, and plans of them."""

from pathlib import Path

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.hwloc import read_synthetic
from cputrain.affinity.topology.machine import Core, Machine, NumaNode, format_list, ordered_cores


def build_machine(
    packages: int, nodes: int, cores: int, smt: int, numbering: str = "block", memory_bytes: int = 64 << 30
) -> Machine:
    """Return a machine of packages x nodes x cores x smt PUs, numbered as Linux does on hosts of different vendors.

    block: the first threads of all cores, then the second ones; adjacent: the threads of a core have consecutive
    numbers; interleaved: first threads alternate over the packages.
    """
    total = packages * nodes * cores
    made = []
    for i in range(total):
        package, place = divmod(i, nodes * cores)
        first = place * packages + package if numbering == "interleaved" else i
        pus = tuple(first * smt + t if numbering == "adjacent" else first + t * total for t in range(smt))
        made.append(Core(pus=pus, package=package, numa_node=i // cores))
    by_node = {n: tuple(sorted(p for c in made if c.numa_node == n for p in c.pus)) for n in range(packages * nodes)}
    return Machine(
        name="made",
        model="made machine",
        isa=("avx2",),
        cores=ordered_cores(made),
        numa_nodes=tuple(NumaNode(id=n, pus=pus, memory_bytes=memory_bytes, near=(n,)) for n, pus in by_node.items()),
        allowed_pus=tuple(range(total * smt)),
        allowed_nodes=tuple(by_node),
    )


def synthetic(text: str) -> Machine:
    """Return the machine of an hwloc description."""
    return read_synthetic(text, isa=("avx2",), memory_bytes=64 << 30)


def planned(machine: Machine, **fields: object) -> Plan:
    """Return the plan of a request with these fields, for the default runtime."""
    return plan_machine(machine, Request(**fields), Runtime())


def write_sysfs(machine: Machine, root: Path, *, masks: bool = False, online_file: bool = True) -> None:
    """Write a machine as the kernel's files under `root`; `masks` omits the list formats."""

    def put(path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")

    def words(pus: tuple[int, ...]) -> str:
        digits = f"{sum(1 << p for p in pus):x}"
        digits = digits.rjust(-(-len(digits) // 8) * 8, "0")
        return ",".join(digits[i : i + 8] for i in range(0, len(digits), 8))

    cpu = "sys/devices/system/cpu"
    if online_file:
        put(f"{cpu}/online", format_list(machine.pus))
    for number, core in enumerate(machine.cores):
        for pu in core.pus:
            topology = f"{cpu}/cpu{pu}/topology"
            put(f"{topology}/physical_package_id", str(core.package))
            put(f"{topology}/core_id", str(number % 3))  # repeats on purpose, as it must not be used
            if core.die is not None:
                put(f"{topology}/die_id", str(core.die))
            if any(other.speed < 1 for other in machine.cores):
                put(f"{cpu}/cpu{pu}/acpi_cppc/nominal_perf", str(round(20 * core.speed)))
                put(f"{cpu}/cpu{pu}/acpi_cppc/highest_perf", str(round(1000 * core.speed)))
            for level, lowest in ((2, core.l2), (3, core.l3)):
                sharing = tuple(p for c in machine.cores if (c.l2, c.l3)[level - 2] == lowest for p in c.pus)
                if lowest is not None:
                    index = f"{cpu}/cpu{pu}/cache/index{level}"
                    put(f"{index}/level", str(level))
                    put(f"{index}/shared_cpu_{'map' if masks else 'list'}", (words if masks else format_list)(sharing))
            if masks:
                put(f"{topology}/thread_siblings", words(core.pus))
            else:
                put(f"{topology}/thread_siblings_list", format_list(core.pus))
    for node in machine.numa_nodes:
        folder = f"sys/devices/system/node/node{node.id}"
        put(f"{folder}/cpumap" if masks else f"{folder}/cpulist", words(node.pus) if masks else format_list(node.pus))
        put(f"{folder}/meminfo", f"Node {node.id} MemTotal:       {node.memory_bytes // 1024} kB")
    put("proc/cpuinfo", f"processor\t: 0\nmodel name\t: {machine.model}\nflags\t\t: fpu {' '.join(machine.isa)} sse")
    put("proc/sys/kernel/hostname", machine.name)
