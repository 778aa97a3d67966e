"""Memory without PUs: which is fast, which is slow, whose it is, and what a plan makes of it."""

import tarfile
from pathlib import Path

import pytest

from affinity.planner.plan import Request, plan_machine
from affinity.planner.runtime import Runtime
from affinity.topology.catalog import find_machine
from affinity.topology.machine import Machine
from affinity.topology.sysfs import read_machine
from affinity.views.text import plan_to_text
from tests.support.machines import build_machine, write_sysfs

PHI = "cpu family\t: 6\nmodel\t\t: 87\nmodel name\t: Intel(R) Xeon Phi(TM) CPU 7250 @ 1.40GHz\n"
MAX = "cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) CPU Max 9480\n"
DISTANCES = ((10, 21, 41, 31), (21, 10, 31, 41))  # of nodes 0 and 1 to 0, 1 and two memories: 3 is near 0, 2 near 1


def with_memories(
    root: Path, cpuinfo: str = "", bandwidth: tuple[int, int] | None = None, tier: int | None = None
) -> Machine:
    """Two nodes of four cores and two memory-only nodes, paired crosswise by distance or by HMAT."""
    write_sysfs(build_machine(2, 1, 4, 1), root)
    if cpuinfo:
        (root / "proc/cpuinfo").write_text(cpuinfo)
    nodes = root / "sys/devices/system/node"
    for memory, owner in ((12, 1), (13, 0)):  # ids with a gap, above nine
        folder = nodes / f"node{memory}"
        folder.mkdir()
        (folder / "cpulist").write_text("\n")
        (folder / "meminfo").write_text(f"Node {memory} MemTotal: 4194304 kB\n")
        (folder / "distance").write_text(" ".join(str(row[memory - 10]) for row in DISTANCES) + " 10 41\n")
        if bandwidth:
            hmat(folder, owner, bandwidth[1])
    for node in (0, 1):
        if bandwidth:
            hmat(nodes / f"node{node}", node, bandwidth[0])
    if tier is not None:
        for number, listed in ((4, "0-1"), (tier, "12-13")):
            path = root / f"sys/devices/virtual/memory_tiering/memory_tier{number}/nodelist"
            path.parent.mkdir(parents=True)
            path.write_text(listed + "\n")
    return read_machine(root)


def hmat(folder: Path, initiator: int, bandwidth: int) -> None:
    initiators = folder / "access1/initiators"
    initiators.mkdir(parents=True)
    (initiators / f"node{initiator}").mkdir()
    (initiators / "read_bandwidth").write_text(f"{bandwidth}\n")


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"cpuinfo": PHI}, "hbm"),
        ({"cpuinfo": MAX}, "hbm"),
        ({}, "slow"),  # CXL or NVM: nothing says that it is fast
        ({"bandwidth": (100, 400)}, "hbm"),
        ({"bandwidth": (400, 100)}, "slow"),
        ({"bandwidth": (400, 100), "cpuinfo": PHI}, "slow"),  # the firmware's word goes before the model's name
        ({"tier": 2}, "hbm"),
        ({"tier": 22}, "slow"),
        ({"tier": 22, "bandwidth": (100, 400)}, "slow"),
    ],
)
def test_the_kind_of_memory_comes_from_facts(tmp_path: Path, facts: dict, kind: str) -> None:
    nodes = {node.id: node for node in with_memories(tmp_path, **facts).numa_nodes}
    assert {i: node.kind for i, node in nodes.items()} == {0: "dram", 1: "dram", 12: kind, 13: kind}
    assert (nodes[12].near, nodes[13].near) == ((1,), (0,))


def test_workers_prefer_their_own_high_bandwidth_memory(tmp_path: Path) -> None:
    plan = plan_machine(with_memories(tmp_path, PHI), Request(ppn=2), Runtime())
    assert [(w.memory_policy, w.memory_nodes) for w in plan.workers] == [("preferred", (13,)), ("preferred", (12,))]


def test_a_tarball_keeps_what_tells_memories_apart(tmp_path: Path) -> None:
    for name, facts in (("phi", {"cpuinfo": PHI}), ("hmat", {"bandwidth": (100, 400)}), ("tier", {"tier": 22})):
        machine = with_memories(tmp_path / name, **facts)
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            tar.add(tmp_path / name, arcname=name)
        assert find_machine(str(tmp_path / f"{name}.tar")) == machine


def test_memory_without_pus_is_shown(tmp_path: Path) -> None:
    shown = plan_to_text(plan_machine(with_memories(tmp_path, PHI), Request(ppn=2), Runtime()))
    assert "NUMA node 12: 4 GiB of hbm memory, next to node 1" in shown


def test_workers_stay_off_slow_memory(tmp_path: Path) -> None:
    plan = plan_machine(with_memories(tmp_path), Request(ppn=2), Runtime())
    assert [(w.memory_policy, w.memory_nodes) for w in plan.workers] == [("bind", (0,)), ("bind", (1,))]


def test_a_node_without_memory_uses_the_memory_near_it(tmp_path: Path) -> None:
    with_memories(tmp_path, bandwidth=(100, 100))
    nodes = tmp_path / "sys/devices/system/node"
    for node in (0, 1):
        (nodes / f"node{node}/meminfo").write_text(f"Node {node} MemTotal: 0 kB\n")
        (nodes / f"node{node}/access1/initiators/read_bandwidth").unlink()
    machine = read_machine(tmp_path)
    assert [node.kind for node in machine.numa_nodes] == ["dram"] * 4
    plan = plan_machine(machine, Request(ppn=2), Runtime())
    assert [w.memory_nodes for w in plan.workers] == [(13,), (12,)]
