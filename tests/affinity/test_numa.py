"""Memory without PUs: which is fast, which is slow, whose it is, and what a plan makes of it."""

import shutil
import tarfile
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.planner.workload import RESNET50
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.topology.sysfs import read_machine
from cputrain.affinity.views import plan_to_text
from cputrain.affinity.wording import GIB
from tests.support.machines import build_machine, write_sysfs
from tests.support.plan_facts import reason_of

PHI = "cpu family\t: 6\nmodel\t\t: 87\nmodel name\t: Intel(R) Xeon Phi(TM) CPU 7250 @ 1.40GHz\n"
MAX = "cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) CPU Max 9480\n"
MEMORY_KIB = (16 << 20) - 300_000  # as the kernel shows 16 GiB of HBM or MCDRAM
DISTANCES = ((10, 21, 41, 31), (21, 10, 31, 41))  # of nodes 0 and 1 to 0, 1 and two memories: 3 is near 0, 2 near 1


def with_memories(
    root: Path,
    cpuinfo: str = "",
    bandwidth: tuple[int, int] | None = None,
    latency: tuple[int, int] | None = None,
    tier: int | None = None,
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
        (folder / "meminfo").write_text(f"Node {memory} MemTotal: {MEMORY_KIB} kB\n")
        (folder / "distance").write_text(" ".join(str(row[memory - 10]) for row in DISTANCES) + " 10 41\n")
        if bandwidth:
            hmat(folder, owner, "read_bandwidth", bandwidth[1])
        if latency:
            hmat(folder, owner, "read_latency", latency[1])
    for node in (0, 1):
        if bandwidth:
            hmat(nodes / f"node{node}", node, "read_bandwidth", bandwidth[0])
        if latency:
            hmat(nodes / f"node{node}", node, "read_latency", latency[0])
    if tier is not None:
        for number, listed in ((4, "0-1"), (tier, "12-13")) if tier != 4 else ((4, "0-1,12-13"),):
            path = root / f"sys/devices/virtual/memory_tiering/memory_tier{number}/nodelist"
            path.parent.mkdir(parents=True)
            path.write_text(listed + "\n")
    return read_machine(root)


def hmat(folder: Path, initiator: int, figure: str, value: int) -> None:
    initiators = folder / "access1/initiators"
    (initiators / f"node{initiator}").mkdir(parents=True, exist_ok=True)
    (initiators / figure).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"cpuinfo": PHI}, "hbm"),
        ({"cpuinfo": MAX}, "hbm"),
        ({}, "unknown"),  # nothing tells HBM from CXL
        ({"tier": 4}, "unknown"),  # nor do equal tiers, which kernels before 6.8 give to all memory
        ({"tier": 4, "bandwidth": (200, 400)}, "hbm"),
        ({"tier": 4, "bandwidth": (200, 60)}, "slow"),
        ({"tier": 4, "bandwidth": (200, 195)}, "dram"),
        ({"tier": 4, "latency": (100, 250)}, "slow"),
        ({"bandwidth": (100, 100), "latency": (100, 300)}, "slow"),
        ({"bandwidth": (100, 140), "latency": (100, 300)}, "slow"),  # many CXL links together
        ({"bandwidth": (100, 400), "latency": (100, 130)}, "hbm"),
        ({"latency": (100, 110)}, "unknown"),
        ({"bandwidth": (100, 0)}, "unknown"),  # 0: the firmware gives no figure
        ({"bandwidth": (100, 400)}, "hbm"),
        ({"bandwidth": (400, 100)}, "slow"),
        ({"bandwidth": (400, 100), "cpuinfo": PHI}, "slow"),  # the firmware's word goes before the model's name
        ({"tier": 2}, "hbm"),
        ({"tier": 22}, "slow"),
        ({"tier": 22, "bandwidth": (100, 400)}, "hbm"),  # as DAX puts HBM online
        ({"tier": 22, "cpuinfo": MAX}, "hbm"),
    ],
)
def test_the_kind_of_memory_comes_from_facts(tmp_path: Path, facts: dict, kind: str) -> None:
    nodes = {node.id: node for node in with_memories(tmp_path, **facts).numa_nodes}
    assert {i: node.kind for i, node in nodes.items()} == {0: "dram", 1: "dram", 12: kind, 13: kind}
    assert (nodes[12].near, nodes[13].near) == ((1,), (0,))


@pytest.mark.parametrize(
    ("gib", "tiers", "own", "beside"),
    [
        (128, {}, "hbm", "unknown"),  # no tiers: the size of the package's HBM tells it
        (128, {12: 22, 13: 22, 14: 960, 15: 960}, "hbm", "slow"),
        (128, {12: 4, 13: 4, 14: 4, 15: 4}, "hbm", "unknown"),
        (16, {12: 22, 13: 22, 14: 40, 15: 40}, "hbm", "slow"),  # as large as HBM: the lower tier is
        (16, {}, "unknown", "unknown"),
    ],
)
def test_other_memory_beside_a_packages_hbm_is_not_taken_for_it(
    tmp_path: Path, gib: int, tiers: dict[int, int], own: str, beside: str
) -> None:
    assert added_to_hbm(tmp_path / "unknown", gib, tiers) == {12: own, 13: own, 14: beside, 15: beside}


def test_memory_without_figures_beside_hbm_that_has_them_is_not_hbm(tmp_path: Path) -> None:
    found = added_to_hbm(tmp_path, 16, {}, bandwidth=(100, 400))
    assert found == {12: "hbm", 13: "hbm", 14: "unknown", 15: "unknown"}


def added_to_hbm(root: Path, gib: int, tiers: dict[int, int], **facts: tuple[int, int]) -> dict[int, str]:
    """The kinds of a Xeon Max's memories where each socket has another one, of `gib`, as CXL is."""
    with_memories(root, cpuinfo=MAX, **facts)
    for memory, like in ((14, 12), (15, 13)):
        folder = root / f"sys/devices/system/node/node{memory}"
        folder.mkdir()
        (folder / "cpulist").write_text("\n")
        (folder / "meminfo").write_text(f"Node {memory} MemTotal: {gib << 20} kB\n")
        shutil.copy(folder.parent / f"node{like}/distance", folder)
    for number in {4, *tiers.values()} if tiers else ():
        path = root / f"sys/devices/virtual/memory_tiering/memory_tier{number}/nodelist"
        path.parent.mkdir(parents=True)
        nodes = [node for node, tier in tiers.items() if tier == number] + ([0, 1] if number == 4 else [])
        path.write_text(",".join(map(str, sorted(nodes))) + "\n")
    return {node.id: node.kind for node in read_machine(root).numa_nodes if not node.pus}


def test_workers_prefer_their_own_high_bandwidth_memory(tmp_path: Path) -> None:
    plan = plan_machine(with_memories(tmp_path, PHI), Request(ppn=2), Runtime())
    assert [(w.memory_policy, w.memory_nodes) for w in plan.workers] == [("preferred", (13,)), ("preferred", (12,))]


def test_a_xeon_max_without_dram_has_hbm_next_to_its_cpus(tmp_path: Path) -> None:
    """64 GiB in each package and no other memory; of as many GiB a node in SNC4 mode, 256 GiB of DRAM with HBM as cache
    are DRAM."""

    def kinds(name: str, model: str, gib: float, nodes: int) -> list[str]:
        root = tmp_path / name
        write_sysfs(build_machine(2, nodes, 2, 1, memory_bytes=int(gib * GIB)), root)
        (root / "proc/cpuinfo").write_text(model)
        machine = read_machine(root)
        plan = plan_machine(machine, Request(local_batch=8, workload=RESNET50), Runtime())
        assert len({plan.memory_kind(worker) for worker in plan.workers}) == 1
        return [*{node.kind for node in machine.numa_nodes}, plan.memory_kind(plan.workers[0])]

    assert kinds("quad", MAX, 63.2, 1) == ["hbm", "HBM"]
    assert kinds("snc4", MAX, 15.7, 4) == ["hbm", "HBM"]
    assert kinds("cache", MAX, 31.5, 4) == ["dram", "DRAM"]
    assert kinds("other", MAX.replace("CPU Max 9480", "Platinum 8480+"), 63.2, 1) == ["dram", "DRAM"]


def max_with_64_gib(root: Path, *, cache: bool = False, bandwidth: int | None = None) -> Path:
    """The kernel's files of a Xeon Max with 64 GiB of HBM in each package, or 64 GiB of DRAM that HBM caches."""
    write_sysfs(build_machine(2, 1, 2, 1, memory_bytes=int(63.2 * GIB)), root)
    (root / "proc/cpuinfo").write_text(MAX)
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if cache:
            (node / "memory_side_cache/index1").mkdir(parents=True)
            (node / "memory_side_cache/index1/size").write_text(f"{64 << 30}\n")
        if bandwidth is not None:
            (node / "access1/initiators" / node.name).mkdir(parents=True)
            (node / "access1/initiators/read_bandwidth").write_text(f"{bandwidth}\n")
    return root


def test_dram_that_hbm_caches_is_not_called_hbm(tmp_path: Path) -> None:
    """Though it is as large; without the firmware's tables nothing tells, and the plan says so."""
    for name, facts, kind, warned in (
        ("cached", {"cache": True}, "dram", False),
        ("hmat", {"bandwidth": 500_000}, "hbm", False),
        ("both", {"cache": True, "bandwidth": 200_000}, "dram", False),
        ("neither", {}, "hbm", True),
    ):
        root = max_with_64_gib(tmp_path / name, **facts)
        machine = read_machine(root)
        assert {node.kind for node in machine.numa_nodes} == {kind}, name
        assert any("the firmware does not tell" in warning for warning in machine.warnings) == warned, name
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            tar.add(root, arcname=name)
        assert find_machine(str(tmp_path / f"{name}.tar")) == machine


def test_a_tarball_keeps_what_tells_memories_apart(tmp_path: Path) -> None:
    for name, facts in (("phi", {"cpuinfo": PHI}), ("hmat", {"bandwidth": (100, 400)}), ("tier", {"tier": 22})):
        machine = with_memories(tmp_path / name, **facts)
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            tar.add(tmp_path / name, arcname=name)
        assert find_machine(str(tmp_path / f"{name}.tar")) == machine


def test_memory_without_pus_is_shown(tmp_path: Path) -> None:
    shown = plan_to_text(plan_machine(with_memories(tmp_path, PHI), Request(ppn=2), Runtime()))
    assert "NUMA node 12: 16 GiB of hbm memory, next to node 1" in shown


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


def test_beside_empty_nodes_a_pool_of_cxl_memory_is_not_taken_for_their_own(tmp_path: Path) -> None:
    with_memories(tmp_path, bandwidth=(100, 100), latency=(100, 100))
    nodes = tmp_path / "sys/devices/system/node"
    for node in (0, 1):
        (nodes / f"node{node}/meminfo").write_text(f"Node {node} MemTotal: 0 kB\n")
    shutil.copytree(nodes / "node13", nodes / "node14")
    hmat(nodes / "node14", 0, "read_bandwidth", 140)
    hmat(nodes / "node14", 0, "read_latency", 300)
    kinds = {node.id: node.kind for node in read_machine(tmp_path).numa_nodes if not node.pus}
    assert kinds == {12: "dram", 13: "dram", 14: "slow"}


def test_beside_empty_nodes_hbm_is_told_from_dram(tmp_path: Path) -> None:
    """A worker that needs more than the HBM has is not refused while there is DRAM."""
    with_memories(tmp_path, bandwidth=(100, 100), latency=(100, 100))
    nodes = tmp_path / "sys/devices/system/node"
    for node in (0, 1):
        (nodes / f"node{node}/meminfo").write_text(f"Node {node} MemTotal: 0 kB\n")
        shutil.copytree(nodes / f"node{13 - node}", nodes / f"node{14 + node}")
        hmat(nodes / f"node{14 + node}", node, "read_bandwidth", 400)
        hmat(nodes / f"node{14 + node}", node, "read_latency", 110)
    machine = read_machine(tmp_path)
    assert {node.id: node.kind for node in machine.numa_nodes if not node.pus} == {
        **{12: "dram", 13: "dram"},
        **{14: "hbm", 15: "hbm"},
    }
    plan = plan_machine(machine, Request(ppn=2), Runtime())
    assert [(w.memory_policy, w.memory_nodes) for w in plan.workers] == [("preferred", (14,)), ("preferred", (15,))]


@pytest.mark.parametrize(
    ("listed", "pus", "near"),
    [
        (("0-7",) * 4, [8, 0, 0, 0], [0, 0, 0, 0]),
        (("0-3", "2-5", "6-7"), [6, 0, 2], [0, 0, 2]),
        (("0-3", "4-7", "3-4"), [8, 0, 0], [0, 0, 0]),
    ],
)
def test_nodes_that_list_the_same_cpus_count_as_one(
    tmp_path: Path, listed: tuple[str, ...], pus: list[int], near: list[int]
) -> None:
    """A fault of firmware: every CPU belongs to one node only; the memory of all nodes stays in use."""
    write_sysfs(build_machine(1, 1, 8, 1), tmp_path)
    for i, cpus in enumerate(listed):
        folder = tmp_path / f"sys/devices/system/node/node{i}"
        folder.mkdir(exist_ok=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {i} MemTotal: 2097152 kB\n")
    machine = read_machine(tmp_path)
    assert [len(node.pus) for node in machine.numa_nodes] == pus
    assert [node.near for node in machine.numa_nodes] == [(i,) for i in near]
    assert {node.kind for node in machine.numa_nodes} == {"dram"}
    plan = plan_machine(machine, Request(ppn=1), Runtime())
    assert plan.workers[0].memory_nodes == tuple(range(len(listed)))
    assert any("list the same CPUs" in warning for warning in plan.warnings)


def test_figures_of_accelerators_are_not_those_of_cpus(tmp_path: Path) -> None:
    """access0 may name a node without CPUs as the nearest initiator."""
    with_memories(tmp_path)
    for node, initiator in ((0, 0), (1, 1), (12, 13), (13, 13)):
        initiators = tmp_path / f"sys/devices/system/node/node{node}/access0/initiators"
        (initiators / f"node{initiator}").mkdir(parents=True)
        (initiators / "read_bandwidth").write_text("400\n" if node > 1 else "100\n")
    nodes = {node.id: node for node in read_machine(tmp_path).numa_nodes}
    assert (nodes[12].kind, nodes[12].bandwidth_mb_s, nodes[12].near) == ("unknown", None, (1,))


def test_a_kernel_without_numa_has_one_node(tmp_path: Path) -> None:
    write_sysfs(build_machine(1, 1, 2, 1), tmp_path)
    shutil.rmtree(tmp_path / "sys/devices/system/node")
    (tmp_path / "proc/meminfo").write_text("MemTotal:        2097152 kB\nMemFree: 1 kB\n")
    machine = read_machine(tmp_path)
    assert [(node.id, node.pus, node.memory_bytes) for node in machine.numa_nodes] == [(0, (0, 1), 2 << 30)]
    assert (machine.allowed_nodes, machine.warnings) == ((0,), ())


def test_the_only_node_has_all_memory_of_the_host_though_its_own_file_tells_less(tmp_path: Path) -> None:
    """As in guests that initialize memory when it is first used."""
    write_sysfs(build_machine(1, 1, 2, 1, memory_bytes=8 << 30), tmp_path)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       25165824 kB\n")
    assert [node.memory_bytes for node in read_machine(tmp_path).numa_nodes] == [24 << 30]
    write_sysfs(build_machine(1, 2, 2, 1, memory_bytes=8 << 30), tmp_path)
    (tmp_path / "proc/meminfo").write_text("cut off\n")
    assert [node.memory_bytes for node in read_machine(tmp_path).numa_nodes] == [8 << 30] * 2


def test_cores_whose_node_is_missing_are_named(tmp_path: Path) -> None:
    write_sysfs(build_machine(4, 1, 4, 1), tmp_path)
    for node in (2, 3):
        shutil.rmtree(tmp_path / f"sys/devices/system/node/node{node}")
    plan = plan_machine(read_machine(tmp_path), Request(), Runtime())
    assert "CPUs 8-15 belong to no NUMA node" in plan.warnings[0]
    package = {pu: core.package for core in plan.machine.cores for pu in core.pus}
    assert all(len({package[pu] for pu in worker.pus}) == 1 for worker in plan.workers)
    assert reason_of(plan, "workers per host").numbers == {"workers": 4, "groups": 4, "nodes": 2, "packages": 2}
    one = plan_machine(plan.machine, Request(ppn=1), Runtime())
    assert "the worker spans 2 NUMA nodes and 2 packages without one: part of its memory is remote" in one.warnings


def test_a_member_packed_twice_counts_as_the_last_and_no_temporary_folder_is_named(tmp_path: Path) -> None:
    """`tar rf` appends; where CPUs share a clock, cpufreq is a link, which must not stand in its own way."""
    write_sysfs(build_machine(1, 1, 2, 1), tmp_path / "host")
    cpus = tmp_path / "host/sys/devices/system/cpu"
    (cpus / "cpufreq/policy0").mkdir(parents=True)
    (cpus / "cpufreq/policy0/cpuinfo_max_freq").write_text("2000000\n")
    (cpus / "cpu1/cpufreq").symlink_to("../cpufreq/policy0")
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for _ in range(2):
            tar.add(tmp_path / "host", arcname="host")
    assert find_machine(str(tmp_path / "twice.tar")).cores == read_machine(tmp_path / "host").cores
    with tarfile.open(tmp_path / "clash.tar", "w") as tar:
        tar.add(cpus / "cpufreq/policy0/cpuinfo_max_freq", arcname="host/sys/devices/system/cpu/cpu1/cpufreq")
        tar.add(tmp_path / "host", arcname="host")
    with pytest.raises(InputError) as refused:
        find_machine(str(tmp_path / "clash.tar"))
    assert "affinity-" not in str(refused.value) and "\n" not in str(refused.value)
