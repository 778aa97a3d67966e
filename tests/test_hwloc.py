import pytest

from affinity.errors import InputError
from affinity.hwloc import read_synthetic
from affinity.machine import Machine


def synthetic(text: str) -> Machine:
    return read_synthetic(text, name="s", model="m", isa=(), memory_bytes=1 << 30)


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


@pytest.mark.parametrize(
    "text",
    ["core:0", "pu:2", "core:2 pack:2", "pack:1 cores:2", "core:2 core:2", "core:2 pu:2(indexes=3*1)", "core:-1 x"],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="machine"):
        synthetic(text)
