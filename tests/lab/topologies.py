"""The machines of the lab, as qemu can emulate them, and what the planner is to know of their memory."""

from dataclasses import dataclass

DRAM, HBM, SLOW, UNKNOWN = "dram", "hbm", "slow", "unknown"  # as cputrain.affinity.topology.machine names them
SPEEDS = {DRAM: 60, HBM: 200, SLOW: 20}  # GB/s of a node as its nearest CPUs see it, in the firmware's HMAT
LATENCIES = {DRAM: 10, HBM: 12, SLOW: 60}  # ns, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A NUMA node: its CPUs (kernel's list format, "" for none), memory in MiB (0: none), its kind of memory.

    `beside` is the node whose CPUs are nearest to a node without CPUs.
    """

    cpus: str = ""
    mib: int = 1024  # a worker on each node needs 715 MiB
    kind: str = DRAM
    beside: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """An emulated host. CPUs are sockets x dies x cores x threads, siblings adjacent or, with `threads_last`, second
    threads numbered after all first ones, as most servers' firmware does. With `hmat` the firmware tells the nodes'
    bandwidths and latencies. `distances` is the SLIT. `offline` are CPUs taken offline after the boot. `words` are more
    of the kernel's command line. `workers` are the cores of each worker that suits it."""

    nodes: tuple[Node, ...]
    workers: tuple[int, ...]
    sockets: int = 1
    dies: int = 1
    cores: int
    threads: int = 1
    threads_last: bool = False
    hmat: bool = False
    distances: tuple[tuple[int, ...], ...] = ()
    offline: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    cpu: str = "Skylake-Server-v4"  # an Intel name: dies and threads of AMD ones need more flags

    @property
    def cpus(self) -> int:
        """Number of CPUs (hardware threads)."""
        return self.sockets * self.dies * self.cores * self.threads


def even(nodes: int, cpus: int, mib: int = 1024) -> tuple[Node, ...]:
    """Nodes of equally many consecutive CPUs."""
    each = cpus // nodes
    return tuple(Node(cpus=f"{i * each}-{(i + 1) * each - 1}", mib=mib) for i in range(nodes))


SNC2 = ((10, 12, 21, 21), (12, 10, 21, 21), (21, 21, 10, 12), (21, 21, 12, 10))
TOPOLOGIES: dict[str, Topology] = {
    "one-node": Topology(cores=2, nodes=(Node(cpus="0-1", mib=1536),), workers=(1, 1)),
    "two-sockets": Topology(
        workers=(4, 4),
        sockets=2,
        cores=4,
        threads=2,
        threads_last=True,
        nodes=(Node(cpus="0-3,8-11"), Node(cpus="4-7,12-15")),
        distances=((10, 21), (21, 10)),
    ),
    "snc2": Topology(workers=(3,) * 4, sockets=2, cores=6, threads=2, nodes=even(4, 24), distances=SNC2),
    "unequal": Topology(
        workers=(5, 4, 5, 4),
        sockets=2,
        cores=9,
        threads=2,
        nodes=(Node(cpus="0-9"), Node(cpus="10-17"), Node(cpus="18-27"), Node(cpus="28-35")),
        distances=SNC2,
    ),
    "hbm": Topology(
        workers=(2,) * 4,
        cores=8,
        threads=2,
        nodes=(*even(4, 16), *(Node(kind=HBM, beside=i, mib=256) for i in range(4))),
        hmat=True,
    ),
    "phi-flat": Topology(
        workers=(1,) * 4,
        cores=4,
        threads=4,
        nodes=(Node(cpus="0-15", mib=2560), Node(kind=HBM, beside=0)),
        distances=((10, 31), (31, 10)),
        cpu="KnightsMill",
    ),
    "phi-snc4": Topology(
        workers=(2,) * 4,
        cores=8,
        threads=4,
        nodes=(*even(4, 32), *(Node(kind=HBM, beside=i, mib=256) for i in range(4))),
        distances=tuple(
            tuple(10 if i == j else (31 if i % 4 == j % 4 else 41) if (i < 4) != (j < 4) else 21 for j in range(8))
            for i in range(8)
        ),
        cpu="KnightsMill",
    ),
    "dies-cxl": Topology(
        workers=(8,),
        dies=4,
        cores=2,
        nodes=(Node(cpus="0-7"), Node(kind=SLOW, beside=0)),
        hmat=True,
        distances=((10, 24), (24, 10)),
    ),
    "hbm-cxl": Topology(
        workers=(3, 3),
        sockets=2,
        cores=3,
        threads=2,
        nodes=(*even(2, 12), Node(kind=HBM, beside=0), Node(kind=SLOW, beside=1)),
        hmat=True,
        distances=((10, 21, 13, 28), (21, 10, 23, 17), (13, 23, 10, 30), (28, 17, 30, 10)),
    ),
    "unknown-memory": Topology(
        workers=(1,) * 4, cores=4, nodes=(Node(cpus="0-3", mib=3328), Node(kind=UNKNOWN, beside=0))
    ),
    "four-sockets": Topology(
        workers=(3,) * 3,
        sockets=4,
        cores=3,
        threads=2,
        nodes=even(4, 24),
        distances=((10, 21, 21, 31), (21, 10, 31, 21), (21, 31, 10, 21), (31, 21, 21, 10)),
        offline=(3, 8, 9, 21),  # the second socket has two cores left: with it, all workers would do less
    ),
    "empty-node": Topology(
        workers=(4, 4),
        sockets=2,
        cores=4,
        nodes=(Node(cpus="0-3", mib=2048), Node(cpus="4-7", mib=0)),
        distances=((10, 21), (21, 10)),
    ),
    "many": Topology(workers=(24,) * 4, sockets=2, cores=48, nodes=even(4, 96)),
}
SLOW_TO_BOOT = ("many", "unequal", "four-sockets", "hbm", "phi-snc4")
