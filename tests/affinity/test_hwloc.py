import subprocess
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.hwloc import read_lstopo
from cputrain.affinity.topology.machine import Machine
from tests.support.commands import need
from tests.support.machines import synthetic


def test_levels_multiply() -> None:
    machine = synthetic("pack:2 numa:2 core:3 pu:2")
    assert (len(machine.packages), len(machine.numa_nodes), len(machine.cores), len(machine.pus)) == (2, 4, 12, 24)
    assert machine.cores[0].pus == (0, 1)
    assert machine.cores[-1] == machine.cores[11]
    assert machine.cores[11].numa_node == 3


def test_interleaved_numbering() -> None:
    machine = synthetic("pack:2 numa:1 core:24 pu:2(indexes=2*48:48*1)")
    assert machine.cores[0].pus == (0, 48)
    assert machine.cores[24].pus == (24, 72)
    assert machine.numa_nodes[1].pus == (*range(24, 48), *range(72, 96))


def test_dies_caches_and_attached_nodes() -> None:
    machine = synthetic("pack:2 [numa] die:2 l3:2 l2:3 core:2 pu:2(indexes=2*48:48*1)")
    assert (len(machine.cores), [node.pus[:2] for node in machine.numa_nodes]) == (48, [(0, 1), (24, 25)])
    first, last = machine.cores[0], machine.cores[-1]
    assert (first.die, first.l3, first.l2) == (0, 0, 0)
    assert (last.package, last.die, last.l3, last.l2) == (1, 1, 42, 46)
    assert len({(core.package, core.die) for core in machine.cores}) == 4
    assert len({core.l3 for core in machine.cores}) == 8


def test_levels_nest_in_any_order_and_nodes_have_sizes() -> None:
    machine = synthetic("numa:2(memory=16GB) pack:1 core:2")
    assert [node.memory_bytes for node in machine.numa_nodes] == [16_000_000_000] * 2
    assert [(core.package, core.numa_node) for core in machine.cores] == [(0, 0), (0, 0), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    "shape", ["pack:2 numa:2 l3:2 core:3 pu:2", "pack:1 numa:4 core:3", "pack:3 [numa] core:5 pu:4"]
)
def test_shapes_are_hwloc_s(shape: str) -> None:
    need("hwloc-nox", "hwloc-calc")
    machine = synthetic(shape)
    counts = {"package": machine.packages, "numanode": machine.numa_nodes, "core": machine.cores, "pu": machine.pus}
    wanted = shape if "pu:" in shape else f"{shape} pu:1"
    for kind, items in counts.items():
        argv = ["hwloc-calc", "-i", wanted, "-N", kind, "all"]
        printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        assert int(printed) == len(items), kind


@pytest.mark.parametrize(
    "text",
    [
        *("core:0", "pu:2", "core:2 pack:2", "pack:1 cores:2", "core:2 core:2", "core:2 pu:2(indexes=3*1)"),
        *("core:-1 x", "core:2 pu:2(indexes=2**2:2)", "numa:1(memory=big) core:2", "core:2(memory=1GB)"),
        *("pack:2 [numa] l3:2 [numa] core:1", "pack:2 l3:0", "[numa core:2", "pack:[numa]"),
        *("core:2 pu:2(indexes=0,1,2)", "core:2 pu:2(indexes=0,1,2,9)", "pack:999999 core:999999"),
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="machine"):
        synthetic(text)


def test_what_lstopo_writes_is_read() -> None:
    """Memory of the whole host, groups, sizes of caches, numbers of PUs in loops or as a list."""
    written = (
        "[NUMANode(memory=102978359296)] Package:1 Group:2 L3Cache:1(size=1048576) L2Cache:17(size=1048576) "
        "L1dCache:2(size=32768) L1iCache:1(size=32768) Core:1 PU:4(indexes=4*68:1*4)"
    )
    machine = synthetic(written)
    assert (len(machine.cores), machine.cores[0].pus, machine.cores[67].pus) == (
        68,
        (0, 68, 136, 204),
        (67, 135, 203, 271),
    )
    assert [(node.id, len(node.pus), node.memory_bytes) for node in machine.numa_nodes] == [(0, 272, 102978359296)]
    assert [core.pus for core in synthetic("core:2 pu:2(indexes=0,2,1,3)").cores] == [(0, 2), (1, 3)]


def test_a_second_memory_has_no_pus() -> None:
    machine = synthetic("pack:2 [numa(memory=64GiB)][numa(memory=16GiB)] core:2")
    assert [(node.id, node.pus, node.memory_bytes >> 30, node.kind, node.near) for node in machine.numa_nodes] == [
        (0, (0, 1), 64, "dram", (0,)),
        (1, (), 16, "unknown", (0,)),
        (2, (2, 3), 64, "dram", (2,)),
        (3, (), 16, "unknown", (2,)),
    ]


def test_without_packages_and_nodes_the_host_is_one_of_each() -> None:
    machine = synthetic("l3:2 core:4")
    assert [(node.id, len(node.pus)) for node in machine.numa_nodes] == [(0, 8)]


@pytest.mark.parametrize(
    "memories",
    [
        *("pack:2 [numa][numa] core:2", "pack:2 [numa(memory=3GB)][numa(memory=1GiB)] core:2", "pack:2 numa:3 core:2"),
        *("pack:2 [numa(indexes=3,1,0,2)][numa] core:2", "pack:2 [numa][numa(indexes=2*2:1*2)] core:2"),
        *("[numa][numa] pack:2 core:2", "[numa(indexes=1,0)][numa] pack:2 core:2", "numa:4(indexes=2,3,0,1) core:2"),
        "pack:2 l3:2 [numa(memory=5kB)][numa(memory=7)][numa(memory=1TiB)] core:2",
    ],
)
def test_memories_are_numbered_and_sized_as_by_hwloc(memories: str, tmp_path: Path) -> None:
    need("hwloc-nox", "lstopo-no-graphics")
    argv = ["lstopo-no-graphics", "-i", f"{memories} pu:1", "--of", "xml", str(tmp_path / "x.xml")]
    subprocess.run(argv, check=True, capture_output=True)

    def nodes(machine: Machine) -> list[tuple[object, ...]]:
        sizes = [node.memory_bytes for node in machine.numa_nodes] if "memory=" in memories else []
        return [*((node.id, node.pus, node.near) for node in machine.numa_nodes), *sizes]

    assert nodes(synthetic(memories)) == nodes(read_lstopo(tmp_path / "x.xml"))
