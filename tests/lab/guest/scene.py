"""What the guest's checks look at: the topology that was asked for, and what this kernel makes of it."""

from dataclasses import dataclass
from pathlib import Path

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, Request, plan_machine
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.topology.sysfs import this_machine
from tests.lab.topologies import Topology

NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")
HUGETLB_PAGES = 24  # of 2 MiB, in each node: two for each worker of it, those that run and those that are started again


class NotApplicableError(Exception):
    """A topology has nothing that the check is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The topology, the machine that the project reads, its plan."""

    topology: Topology
    machine: Machine
    plan: Plan

    @property
    def cpu_nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have CPUs."""
        return tuple(node.id for node in self.machine.numa_nodes if node.pus)

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have memory."""
        return tuple(node.id for node in self.machine.numa_nodes if node.memory_bytes)


def set_scene(topology: Topology) -> Scene:
    """Take the CPUs offline that the topology has so, reserve huge pages, read the machine, plan it."""
    for pu in topology.offline:
        set_online(pu, online=False)
    scene = Scene(topology=topology, machine=this_machine(), plan=plan_here())
    for folder in NODES.glob("node*/hugepages/hugepages-2048kB"):
        (folder / "nr_hugepages").write_text(str(HUGETLB_PAGES))
    return scene


def compact_memory() -> None:
    """Free memory in pieces of 2 MiB, which transparent huge pages need; the boot and other checks may leave none."""
    for name in ("drop_caches", "compact_memory"):
        Path(f"/proc/sys/vm/{name}").write_text("1", encoding="ascii")


def plan_here(**fields: object) -> Plan:
    """A plan of this machine as this process may use it."""
    return plan_machine(this_machine(), Request(**fields), Runtime())


def set_online(pu: int, *, online: bool) -> None:
    """Take a CPU offline, or back online."""
    (CPUS / f"cpu{pu}/online").write_text(str(int(online)))
