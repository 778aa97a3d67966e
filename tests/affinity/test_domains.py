"""Domains along dies, caches and core types."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.domains import OTHER_TYPE, Domain, partition_host
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import Machine
from tests.affinity.test_core_types import hybrid
from tests.support.machines import build_machine, planned, synthetic
from tests.support.plan_facts import reason_of


def plenty(domains: tuple[Domain, ...]) -> float:
    """Memory for any domains."""
    return 2.0


def widths(machine: Machine, ppn: int | None = None) -> list[int]:
    return [len(domain.cores) for domain in partition_host(machine, ppn, proportional=False, headroom=plenty).domains]


@pytest.mark.parametrize(
    ("shape", "ppn", "expected"),
    [
        ("pack:1 numa:1 l3:8 core:8 pu:2", None, [16] * 4),  # 64 cores; 3 workers would share caches
        ("pack:1 numa:1 l3:12 core:8", None, [24] * 4),
        ("pack:1 numa:1 l3:2 core:3", None, [6]),
        ("pack:1 numa:1 core:68 pu:4", None, [17] * 4),  # Xeon Phi 7250: 3 workers would not be equal
        ("pack:1 numa:1 core:43", None, [21, 22]),  # 43 is prime
        ("pack:1 die:2 core:10", 2, [10, 10]),
        ("pack:1 numa:1 l3:3 core:8", 2, [12, 12]),  # caches do not divide: equal shares matter more
        ("pack:1 numa:1 l3:2 core:8", 4, [4] * 4),
    ],
)
def test_domains_follow_caches_and_are_even(shape: str, ppn: int | None, expected: list[int]) -> None:
    assert widths(synthetic(shape), ppn) == expected


@given(caches=st.integers(1, 6), cores=st.integers(1, 8), ppn=st.integers(1, 12))
def test_workers_share_caches_only_where_they_must(caches: int, cores: int, ppn: int) -> None:
    machine = synthetic(f"pack:1 numa:1 l3:{caches} core:{cores}")
    if ppn > caches * cores or caches % ppn:
        return
    domains = partition_host(machine, ppn, proportional=False, headroom=plenty).domains
    used = [{core.l3 for core in domain.cores} for domain in domains]
    assert sum(map(len, used)) == caches


def test_a_shared_cache_is_reported() -> None:
    found = reason_of(planned(synthetic("pack:1 numa:1 l3:3 core:8"), ppn=2), "level-3 caches per worker")
    assert found.numbers == {"each": (2, 2), "shared": 1, "caches": 3}


def test_only_a_single_worker_computes_on_two_core_types() -> None:
    """4 fast cores and 8 of 0.6: together 7.2 fast ones for one worker, and each type for itself with more workers."""
    machine = hybrid()
    speed = {pu: core.speed for core in machine.cores for pu in core.pus}
    for ppn in (None, *range(1, 13)):
        for balance in ("equal", "batch"):
            made = planned(machine, ppn=ppn, balance=balance, local_batch=64)
            for worker in made.workers:
                assert len({speed[pu] for pu in worker.compute_pus}) == (2 if ppn == 1 else 1)
            assert ppn is None or len(made.workers) == ppn


def test_one_worker_computes_on_all_types_if_that_does_most_and_else_loads_on_the_others() -> None:
    """12 cores at 0.6 do more than 4 at 1; at 0.3, the four fast ones do more and the others load."""
    machine = hybrid()
    worker = planned(machine, ppn=1).workers[0]
    assert (worker.intra_op, worker.loader_pus) == (11, (0, 1))
    halves = tuple(replace(core, speed=core.speed / 2 if core.speed < 1 else 1.0) for core in machine.cores)
    made = planned(replace(machine, cores=halves), ppn=1)
    assert (made.workers[0].compute_pus, made.workers[0].loader_pus) == ((0, 2, 4, 6), (8,))
    assert {item.why: item.pus for item in made.unused}[OTHER_TYPE] == tuple(range(9, 16))


def test_every_core_of_a_hybrid_processor_has_work() -> None:
    """An i7-1370P's shape: 6 fast cores of two PUs, 8 slow ones; every one of its 14 cores has work."""
    base = build_machine(1, 1, 14, 1)
    cores = [replace(base.cores[i], pus=(2 * i, 2 * i + 1)) for i in range(6)]
    cores += [replace(base.cores[i], pus=(6 + i,), speed=39 / 64) for i in range(6, 14)]
    pus = tuple(range(20))
    node = replace(base.numa_nodes[0], pus=pus)
    machine = replace(base, cores=tuple(cores), numa_nodes=(node,), allowed_pus=pus)
    made = planned(machine, balance="batch", local_batch=32)
    assert [(worker.intra_op, worker.local_batch) for worker in made.workers] == [(6, 37), (7, 27)]
    assert sum(len(worker.pus) for worker in made.workers) == 14


@pytest.mark.parametrize(
    ("speeds", "workers"),
    [((1.0, 1.0, 1.0, 0.4), 3), ((1.0, 1.0, 0.4, 0.4), 2), ((1.0, 0.6, 0.6, 0.6), 4), ((1.0, 1.0), 2), ((1.0,), 1)],
)
def test_few_cores_have_a_worker_each_unless_all_would_wait_for_a_slow_one(speeds: tuple, workers: int) -> None:
    machine = build_machine(1, 1, len(speeds), 1)
    cores = tuple(replace(core, speed=speed) for core, speed in zip(machine.cores, speeds, strict=True))
    made = planned(replace(machine, cores=cores))
    assert [worker.compute_pus for worker in made.workers] == [(i,) for i in range(workers)]


def test_balanced_batches_are_in_proportion_and_add_up() -> None:
    made = planned(find_machine("knl-7250-snc4-flat"), balance="batch", local_batch=32)
    assert [(w.intra_op, w.local_batch) for w in made.workers] == [(17, 34), (17, 34), (15, 30), (15, 30)]
    assert not made.warnings


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 20))


@given(SHAPES, st.integers(1, 300), st.sets(st.integers(0, 179)), st.data())
def test_batches_always_add_up(shape, batch, taken, data) -> None:
    machine = build_machine(*shape, 1)
    allowed = tuple(pu for pu in machine.pus if pu not in taken) or machine.pus
    machine = replace(machine, allowed_pus=allowed)
    ppn = data.draw(st.integers(1, len(allowed)))
    made = planned(machine, ppn=ppn, balance="batch", local_batch=batch)
    batches = [worker.local_batch for worker in made.workers]
    assert sum(batches) == batch * ppn
    assert min(batches) >= 1
    slow, fast = min(made.workers, key=lambda w: w.intra_op), max(made.workers, key=lambda w: w.intra_op)
    assert slow.local_batch <= fast.local_batch


def test_a_balance_needs_a_batch() -> None:
    with pytest.raises(InputError, match="needs a batch to balance"):
        planned(hybrid(), balance="batch")


def test_a_warning_of_unequal_domains_names_the_workers_that_would_compute_more() -> None:
    machine = synthetic("pack:1 numa:8 core:6")
    hint = "{balance=batch} makes batches proportional to cores; {ppn=8} computes 1.8 times as much"
    assert planned(machine, ppn=9).warnings == (
        f"domains of 3-6 cores: the smallest sets the pace of each step ({hint})",
    )
    assert not planned(machine, ppn=8).warnings
    assert "times as much" not in "".join(planned(find_machine("knl-7250-snc4-flat"), ppn=4).warnings)


def test_cores_of_any_speed_are_planned() -> None:
    """So slow ones, beside fast ones, that twice the usual number of workers leaves more than 24 to one of them."""
    machine = build_machine(1, 1, 230, 1)
    cores = tuple(replace(core, speed=1.0 if i < 30 else 0.09) for i, core in enumerate(machine.cores))
    assert planned(replace(machine, cores=cores)).workers
