"""Where workers' memory lies, and whether it is enough."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinity.errors import InputError
from affinity.planner.plan import Plan, Request, plan_machine
from affinity.planner.runtime import Runtime
from affinity.planner.workload import RESNET50, footprint, largest_batch
from affinity.topology.catalog import find_machine
from tests.support.machines import build_machine

KNOWN = replace(RESNET50, assumed=False)
GIB = 1 << 30


def plan(machine, batch: int, **fields: object) -> Plan:
    return plan_machine(machine, Request(local_batch=batch, workload=KNOWN, **fields), Runtime())


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
        plan(machine, 4096)
    fits = int(str(refused.value).split("local_batch to ")[1].split()[0])
    assert plan(machine, fits).workers[0].memory_bytes <= 16 * GIB
    with pytest.raises(InputError):
        plan(machine, fits + 2)


def test_workers_share_their_node_s_memory() -> None:
    machine = build_machine(1, 1, 8, 1, memory_bytes=16 * GIB)
    assert plan(machine, 64, ppn=1)
    with pytest.raises(InputError, match=r"worker 0 has 1\.9 GiB"):
        plan(machine, 64, ppn=8)


def test_control_groups_limit_memory() -> None:
    machine = replace(build_machine(1, 1, 8, 1), memory_limit_bytes=8 * GIB)
    with pytest.raises(InputError, match=r"worker 0 has 4\.0 GiB"):
        plan(machine, 64, ppn=2)
    with pytest.raises(InputError, match="use fewer workers"):
        plan(replace(machine, memory_limit_bytes=GIB), 1, ppn=8)


def test_an_assumed_workload_is_never_refused() -> None:
    machine = build_machine(1, 1, 8, 1, memory_bytes=2 * GIB)
    made = plan_machine(machine, Request(ppn=1, local_batch=64, workload=RESNET50), Runtime())
    assert {reason.what: reason.value for reason in made.reasons}["memory per worker"] == "9.2 of 1.9 GiB of DRAM"


@given(room=st.integers(GIB, 100 * GIB))
def test_the_largest_batch_is_the_largest(room: int) -> None:
    most = largest_batch(KNOWN, room)
    assert footprint(KNOWN, most).total <= room < footprint(KNOWN, most + 1).total
