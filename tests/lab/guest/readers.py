"""The machine as the project reads it, compared with lscpu, numactl and lstopo, and with what was emulated."""

import re
import subprocess
import xml.etree.ElementTree as ET

from cputrain.affinity.topology.machine import parse_list, parse_mask
from cputrain.affinity.wording import MIB
from tests.lab.guest.scene import Scene
from tests.lab.qemu import FIRST_NODE_MIB

SAME = 2 * MIB  # numactl rounds to MiB


def output(*argv: str) -> str:
    """What a program prints."""
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def as_emulated(scene: Scene) -> None:
    """CPUs, packages, threads, nodes, memory and its kind are those of the topology."""
    topology, machine = scene.topology, scene.machine
    assert machine.pus == tuple(pu for pu in range(topology.cpus) if pu not in topology.offline), machine.pus
    assert len(machine.packages) == topology.sockets, machine.packages
    assert max(len(core.pus) for core in machine.cores) == topology.threads
    dies = {(core.package, core.die) for core in machine.cores}
    assert len(dies) == topology.sockets * topology.dies, dies
    for number, (wanted, node) in enumerate(zip(topology.nodes, machine.numa_nodes, strict=True)):
        assert node.pus == tuple(pu for pu in parse_list(wanted.cpus) if pu not in topology.offline), node
        assert (node.memory_bytes > 0) == (wanted.mib > 0), node
        mib = wanted.mib + (0 if number else FIRST_NODE_MIB)
        assert abs(node.memory_bytes / MIB - mib) <= mib * 0.25, node


def memory_kinds(scene: Scene) -> None:
    """Every node's memory is of the kind that was emulated, on every kernel."""
    wanted = [node.kind for node in scene.topology.nodes]
    found = [node.kind for node in scene.machine.numa_nodes]
    assert found == wanted, f"kinds {found}, emulated {wanted}"


def lscpu(scene: Scene) -> None:
    """lscpu's cores, sockets and nodes are the project's."""
    rows = [line.split(",") for line in output("lscpu", "-p=CPU,CORE,SOCKET,NODE").splitlines() if line[0] != "#"]
    for column, of in ((1, lambda core: core.pus), (2, lambda core: core.package), (3, lambda core: core.numa_node)):
        theirs: dict[str, set[int]] = {}
        for row in rows:
            theirs.setdefault(row[column], set()).add(int(row[0]))
        ours: dict[object, set[int]] = {}
        for core in scene.machine.cores:
            ours.setdefault(of(core), set()).update(core.pus)
        assert sorted(map(sorted, ours.values())) == sorted(map(sorted, theirs.values())), (column, ours, theirs)


def numactl(scene: Scene) -> None:
    """numactl's nodes have the project's CPUs and memory."""
    text = output("numactl", "-H")
    for node in scene.machine.numa_nodes:
        cpus = re.search(rf"^node {node.id} cpus:(.*)$", text, re.MULTILINE)
        size = re.search(rf"^node {node.id} size: (\d+) MB$", text, re.MULTILINE)
        assert cpus and tuple(map(int, cpus[1].split())) == node.pus, (node, text)
        assert size and abs(int(size[1]) * MIB - node.memory_bytes) <= SAME, (node, text)


def lstopo(scene: Scene) -> None:
    """hwloc's cores, nodes, memory, level-3 caches and packages are the project's."""
    root = ET.fromstring(output("lstopo-no-graphics", "--of", "xml", "--no-io", "-"))
    objects = list(root.iter("object"))

    def sets(kind: str) -> list[tuple[int, ...]]:
        return sorted(parse_mask(str(item.get("cpuset"))) for item in objects if item.get("type") == kind)

    machine = scene.machine
    assert sets("Core") == sorted(core.pus for core in machine.cores)
    for kind, of in (("Package", lambda core: core.package), ("L3Cache", lambda core: core.l3)):
        groups: dict[object, list[int]] = {}
        for core in machine.cores:
            groups.setdefault(of(core), []).extend(core.pus)
        ours = sorted(tuple(sorted(pus)) for name, pus in groups.items() if name is not None)
        assert sets(kind) == ours, (kind, sets(kind), ours)
    nodes = {int(str(item.get("os_index"))): item for item in objects if item.get("type") == "NUMANode"}
    for node in machine.numa_nodes:
        if not node.memory_bytes:  # hwloc leaves such nodes out
            continue
        assert int(nodes[node.id].get("local_memory", "0")) == node.memory_bytes, node
        if node.pus:
            assert parse_mask(str(nodes[node.id].get("cpuset"))) == node.pus, node
