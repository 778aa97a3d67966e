"""Where workers' memory lies, and whether it is enough."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.domains import Domain
from cputrain.affinity.planner.memory import USABLE, place_memory
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.planner.workload import RESNET50, footprint, largest_batch
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import NumaNode
from tests.support.machines import build_machine, planned
from tests.support.plan_facts import reason_of

KNOWN = replace(RESNET50, assumed=False)
GIB = 1 << 30


def plan(machine, batch: int, **fields: object) -> Plan:
    return planned(machine, local_batch=batch, workload=KNOWN, **fields)


def placed(name: str, batch: int, **fields: object) -> list[tuple[str, tuple[int, ...]]]:
    return [(worker.memory_policy, worker.memory_nodes) for worker in plan(find_machine(name), batch, **fields).workers]


def test_mcdram_is_bound_where_the_batch_fits_and_preferred_where_not() -> None:
    assert placed("knl-7250-snc4-flat", 16) == [("bind", (4 + i,)) for i in range(4)]
    assert placed("knl-7250-snc4-flat", 64) == [("preferred", (4 + i,)) for i in range(4)]


def test_a_worker_over_two_quadrants_interleaves_their_mcdram() -> None:
    assert placed("knl-7250-snc4-flat", 32, ppn=2) == [("interleave", (4, 5)), ("interleave", (6, 7))]
    assert placed("knl-7250-snc4-flat", 128, ppn=2) == [("interleave", (0, 1)), ("interleave", (2, 3))]


def test_a_batch_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    machine = build_machine(2, 1, 8, 1, memory_bytes=16 * GIB)
    with pytest.raises(InputError, match=r"set local_batch to \d+ or fewer") as refused:
        plan(machine, 4096, ppn=2)
    fits = int(str(refused.value).split("local_batch to ")[1].split()[0])
    assert plan(machine, fits, ppn=2).workers[0].memory_bytes <= 16 * GIB
    with pytest.raises(InputError):
        plan(machine, fits + 2, ppn=2)


def test_workers_share_their_node_s_memory() -> None:
    machine = build_machine(1, 1, 8, 1, memory_bytes=16 * GIB)
    assert plan(machine, 64, ppn=1)
    with pytest.raises(InputError, match=r"worker 0 has 1\.9 GiB"):
        plan(machine, 64, ppn=8)


def test_control_groups_limit_memory() -> None:
    machine = replace(build_machine(1, 1, 8, 1), memory_limit_bytes=8 * GIB)
    with pytest.raises(InputError, match=r"worker 0 has 4\.0 GiB"):
        plan(machine, 64, ppn=2)
    with pytest.raises(InputError, match=r"use fewer workers$"):
        plan(replace(machine, memory_limit_bytes=2 * GIB), 1, ppn=8)


@pytest.mark.parametrize(
    ("gib", "ppn", "remedy"),
    [
        (16, 8, "set local_batch to 7 or fewer or use fewer workers"),
        (6, 2, "set local_batch to 15 or fewer"),
        (4, 8, "use a single worker, with local_batch set to 22 or fewer"),
        (0.5, 8, "train a smaller network or smaller crops, or use another host"),
    ],
)
def test_fewer_workers_are_advised_where_they_would_have_enough_memory(gib: float, ppn: int, remedy: str) -> None:
    machine = replace(build_machine(1, 1, 8, 1), memory_limit_bytes=int(gib * GIB))
    with pytest.raises(InputError) as refused:
        plan(machine, 64, ppn=ppn)
    assert str(refused.value).endswith(f": {remedy}")


def test_an_assumed_workload_is_never_refused() -> None:
    machine = build_machine(1, 1, 8, 1, memory_bytes=2 * GIB)
    made = plan_machine(machine, Request(ppn=1, local_batch=64, workload=RESNET50), Runtime())
    numbers = reason_of(made, "memory per worker").numbers
    assert numbers["need"] == footprint(RESNET50, 64).total > numbers["room"] == 2 * GIB * USABLE
    assert any("would not fit in memory" in text and "use fewer" not in text for text in made.warnings)


def test_fewer_workers_are_planned_where_more_would_not_fit() -> None:
    """A plan refuses no batch for a number of workers that it chose itself."""
    made = plan(build_machine(4, 1, 8, 1, memory_bytes=4 * GIB), 32)
    assert len(made.workers) == 2 and reason_of(made, "workers per host").numbers == {"workers": 2, "suited": 4}
    with pytest.raises(InputError, match=r"worker 0 has 3\.8 GiB"):
        plan(build_machine(4, 1, 8, 1, memory_bytes=4 * GIB), 32, ppn=4)


def test_memory_of_which_nothing_is_known_is_left_out_and_the_plan_says_so() -> None:
    base = build_machine(1, 1, 8, 1, memory_bytes=64 * GIB)
    for kind, words in (("unknown", "of unknown speed"), ("slow", "slower than the DRAM")):
        extra = NumaNode(id=1, pus=(), memory_bytes=64 * GIB, kind=kind, near=(0,))
        machine = replace(base, numa_nodes=(*base.numa_nodes, extra), allowed_nodes=(0, 1))
        made = plan(machine, 32)
        assert [(w.memory_policy, w.memory_nodes) for w in made.workers] == [("bind", (0,))]
        assert words in reason_of(made, "memory left out").why


def test_high_bandwidth_memory_that_no_worker_uses_is_named_with_the_reason() -> None:
    for ppn, batch, nodes, words in (
        (2, 128, "4-7", "only one node can be preferred"),
        (2, 32, "", ""),
        (4, 128, "", ""),
    ):
        made = plan(find_machine("knl-7250-snc4-flat"), batch, ppn=ppn)
        found = [(reason.value, words in reason.why) for reason in made.reasons if reason.what == "memory left out"]
        assert found == ([(f"NUMA nodes {nodes}", True)] if nodes else [])
    part = find_machine("knl-7250-snc4-flat")
    first = tuple(pu for core in part.cores if core.numa_node == 0 for pu in core.pus)
    made = plan(replace(part, allowed_pus=first), 16)
    assert "next to no worker" in reason_of(made, "memory left out").why


@pytest.mark.parametrize(
    ("mib", "ppn", "remedy"),
    [
        (2048, 4, "use fewer workers"),
        (300, 4, "give it more memory"),
        (300, 1, "give it more memory"),
        (1024, 1, None),
        (8192, 4, None),
    ],
)
def test_a_plan_for_an_unknown_program_warns_where_torch_alone_would_not_fit(
    mib: int, ppn: int, remedy: str | None
) -> None:
    machine = build_machine(1, 1, 8, 1, memory_bytes=mib << 20)
    found = [text for text in plan_machine(machine, Request(ppn=ppn)).warnings if "would not fit in memory" in text]
    assert len(found) == (remedy is not None)
    assert all(f": {remedy}" in text for text in found)


def test_memory_next_to_no_worker_helps_where_the_worker_s_own_is_too_small() -> None:
    machine = replace(build_machine(2, 1, 8, 1, memory_bytes=4 * GIB), allowed_pus=tuple(range(8)))
    made = plan(machine, 32)
    assert [(w.memory_policy, w.memory_nodes) for w in made.workers] == [("preferred", (0,))]
    assert reason_of(made, "memory policy").numbers == {"need": footprint(RESNET50, 32).total, "near": 4 * GIB * USABLE}


def test_the_room_of_all_workers_is_not_more_than_the_memory() -> None:
    machine = build_machine(2, 1, 8, 1, memory_bytes=16 * GIB)
    machine = replace(machine, numa_nodes=(machine.numa_nodes[0], replace(machine.numa_nodes[1], memory_bytes=0)))
    domains = tuple(Domain(cores=tuple(c for c in machine.cores if c.numa_node == node)) for node in (0, 1))
    rooms = [memory.room_bytes for memory in place_memory(machine, domains, (None, None))]
    assert sum(rooms) <= 16 * GIB


@given(room=st.integers(2 * GIB, 100 * GIB))
def test_the_largest_batch_is_the_largest(room: int) -> None:
    most = largest_batch(KNOWN, room)
    assert footprint(KNOWN, most).total <= room < footprint(KNOWN, most + 1).total
