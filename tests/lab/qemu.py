"""A topology as arguments of qemu, and the interrupt-controller table that gives CPUs their numbers."""

import struct
from collections.abc import Iterator
from pathlib import Path

from cputrain.affinity.topology.machine import format_list, parse_list
from tests.lab.topologies import LATENCIES, SPEEDS, Topology

FIRST_NODE_MIB = 512  # what kernel, initrd and page cache need beside the node's own memory
FAR = 3  # by how much a node's bandwidth is lower, and its latency higher, from the CPUs of other nodes
MADT = "madt"  # the file of the table that madt() makes


def machine_arguments(topology: Topology, folder: Path) -> tuple[str, ...]:
    """CPUs, memory and firmware tables; `folder` is where the table of CPU numbers is, if one is needed."""
    sizes = [node.mib + (0 if i else FIRST_NODE_MIB) for i, node in enumerate(topology.nodes)]
    parts = {name: getattr(topology, name) for name in ("sockets", "dies", "cores", "threads")}
    return (
        *("-machine", f"q35,hmat={'on' if topology.hmat else 'off'}"),
        *("-cpu", topology.cpu),
        *("-smp", ",".join([str(topology.cpus), *(f"{name}={count}" for name, count in parts.items())])),
        *("-m", f"{sum(sizes)}M"),
        *(word for i, size in enumerate(sizes) for word in _node(topology, i, size)),
        *(word for distance in _distances(topology) for word in ("-numa", distance)),
        *(word for speed in _speeds(topology) for word in ("-numa", speed)),
        *(("-acpitable", f"sig=APIC,data={folder / MADT}") if topology.threads_last else ()),
    )


def kernel_arguments(topology: Topology) -> tuple[str, ...]:
    """What the kernel's command line needs for the topology."""
    return (*(("acpi_apic_instance=2",) if topology.threads_last else ()), *topology.words)


def madt(topology: Topology) -> bytes:
    """The body of an interrupt-controller table (ACPI 6, 5.2.12) that lists the first threads of all cores first.

    Linux numbers CPUs in the order of this table. qemu makes one, too, with siblings adjacent; the kernel is told to
    use this second one.
    """
    local_address, pc_compatible = 0xFEE00000, 1
    order = sorted(range(topology.cpus), key=lambda index: (index % topology.threads, index))
    cpus = b"".join(struct.pack("<BBBBI", 0, 8, index, apic_id(topology, index), 1) for index in order)
    controller = struct.pack("<BBBBII", 1, 12, 0, 0, 0xFEC00000, 0)
    timer = struct.pack("<BBBBIH", 2, 10, 0, 0, 2, 0)
    level_interrupts = b"".join(struct.pack("<BBBBIH", 2, 10, 0, irq, irq, 0xD) for irq in (5, 9, 10, 11))
    return struct.pack("<II", local_address, pc_compatible) + cpus + controller + timer + level_interrupts


def apic_id(topology: Topology, index: int) -> int:
    """The APIC id of qemu's CPU with this index: a field of just enough bits for each level."""
    identity, shift, rest = 0, 0, index
    for count in (topology.threads, topology.cores, topology.dies):
        identity |= rest % count << shift
        shift, rest = shift + (count - 1).bit_length(), rest // count
    return identity | rest << shift


def _node(topology: Topology, number: int, mib: int) -> tuple[str, ...]:
    node = topology.nodes[number]
    indexes = format_list(_index(topology, cpu) for cpu in parse_list(node.cpus))
    words = [
        f"node,nodeid={number}",
        *(f"cpus={span}" for span in indexes.split(",") if span),
        *([f"memdev=memory{number}"] if mib else []),
        *([f"initiator={node.beside}"] if topology.hmat and node.beside is not None else []),
    ]
    backend = ("-object", f"memory-backend-ram,id=memory{number},size={mib}M") if mib else ()
    return (*backend, "-numa", ",".join(words))


def _index(topology: Topology, cpu: int) -> int:
    """qemu's index of the CPU that the kernel numbers so: siblings are always adjacent in it."""
    if not topology.threads_last:
        return cpu
    thread, core = divmod(cpu, topology.cpus // topology.threads)
    return core * topology.threads + thread


def _distances(topology: Topology) -> Iterator[str]:
    for source, row in enumerate(topology.distances):
        for target, value in enumerate(row):
            if source != target:
                yield f"dist,src={source},dst={target},val={value}"


def _speeds(topology: Topology) -> Iterator[str]:
    """Latency and bandwidth of each node with memory, from each node with CPUs."""
    for target, node in enumerate(topology.nodes if topology.hmat else ()):
        for source in (i for i, other in enumerate(topology.nodes) if other.cpus):
            far = 1 if source in (target, node.beside) else FAR
            pair = f"hmat-lb,initiator={source},target={target},hierarchy=memory"
            yield f"{pair},data-type=access-latency,latency={LATENCIES[node.kind] * far}"
            yield f"{pair},data-type=access-bandwidth,bandwidth={SPEEDS[node.kind] // far}G"
