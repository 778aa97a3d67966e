import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.plan_file import plan_to_dict, plan_to_json
from cputrain.affinity.planner.records import plan_this_machine
from cputrain.affinity.planner.request import OPTION_OF, OPTIONS, PROFILES, Request
from cputrain.affinity.planner.workload import RESNET50
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.views import plan_to_svg, plan_to_text
from tests.support.machines import build_machine
from tests.support.plan_facts import reason_of

RUNTIME = Runtime()


@st.composite
def machines_and_requests(draw: st.DrawFn, *, packages: int = 4, cores: int = 30):
    machine = build_machine(
        draw(st.integers(1, packages)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, cores)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from(["block", "adjacent", "interleaved"])),
    )
    if draw(st.booleans()):  # caches of three cores, and some slow cores
        cores_ = tuple(
            replace(core, l3=i // 3, speed=draw(st.sampled_from([1.0, 0.5])) if i % 5 == 4 else 1.0)
            for i, core in enumerate(machine.cores)
        )
        machine = replace(machine, cores=cores_)
    allowed = draw(st.one_of(st.just(set(machine.pus)), st.sets(st.sampled_from(machine.pus), min_size=1)))
    machine = replace(machine, allowed_pus=tuple(sorted(allowed)))
    request = Request(
        ppn=draw(st.one_of(st.none(), st.integers(1, len(machine.allowed_cores)))),
        smt=draw(st.booleans()),
        nodes=draw(st.sampled_from([1, 4])),
        link_gbit=draw(st.sampled_from([1.0, 100.0, 800.0])),
        balance=draw(st.sampled_from(OPTION_OF["balance"].choices)),
        local_batch=draw(st.integers(1, 100)),
        workload=draw(st.sampled_from([None, RESNET50])),
        profile=draw(st.sampled_from(list(PROFILES))),
    )
    if request.profile == "mlperf-spr":
        request = replace(request, smt=False)  # which it excludes
    return machine, request


@given(machines_and_requests())
def test_domains_are_disjoint_allowed_and_complete(drawn) -> None:
    machine, request = drawn
    plan = plan_machine(machine, request, RUNTIME)
    core_of = machine.core_of
    used: set = set()
    for worker in plan.workers:
        cores = {core_of[pu] for pu in worker.pus}
        assert not cores & used
        used |= cores
        assert set(worker.pus) <= set(machine.allowed_pus)
        assert len(worker.compute_pus) == worker.intra_op >= 1
        assert not set(worker.compute_pus) & set(worker.comm_pus + worker.loader_pus)
        env = dict(worker.env)
        assert env["OMP_NUM_THREADS"] == str(worker.intra_op)
        if "CCL_WORKER_COUNT" in env:
            entries = [int(pu) for pu in env["CCL_WORKER_AFFINITY"].split(",")]
            assert len(entries) == len(plan.workers) * int(env["CCL_WORKER_COUNT"]) == len(set(entries))
            assert set(entries) <= {pu for other in plan.workers for pu in other.comm_pus}
    named = {pu for worker in plan.workers for pu in worker.pus} | {pu for item in plan.unused for pu in item.pus}
    assert named == set(machine.allowed_pus)
    assert all(reason.why for reason in plan.reasons)
    assert plan == plan_machine(machine, request, RUNTIME)


@given(machines_and_requests())
def test_no_worker_crosses_a_numa_node_that_it_need_not(drawn) -> None:
    machine, request = drawn
    plan = plan_machine(machine, request, RUNTIME)
    node_of = {pu: core.numa_node for core in machine.cores for pu in core.pus}
    spanning = [worker for worker in plan.workers if len({node_of[pu] for pu in worker.pus}) > 1]
    nodes = {core.numa_node for core in machine.allowed_cores}
    if len(plan.workers) >= len(nodes):
        assert not spanning
    elif spanning:
        assert any("span" in text for text in plan.warnings)


def test_the_published_256_node_plan(golden) -> None:
    plan = plan_machine(find_machine("skx-8160-2s"), Request(ppn=2, nodes=256), RUNTIME)
    assert [(w.intra_op, w.inter_op, w.memory_policy, w.memory_nodes) for w in plan.workers] == [
        (22, 2, "bind", (0,)),
        (22, 2, "bind", (1,)),
    ]
    golden("skx-8160-2s-256nodes.txt", plan_to_text(plan))
    golden("skx-8160-2s-256nodes.json", plan_to_json(plan))


@pytest.mark.parametrize(
    ("machine", "workers", "intra"),
    [
        ((1, 1, 2, 1), 2, 1),  # two cores: one thread a worker
        ((1, 1, 4, 2), 4, 1),
        ((1, 1, 8, 2), 1, 7),
        ((2, 1, 24, 2), 2, 23),  # 2 x 8160: one worker a package
        ((2, 1, 28, 2), 4, 13),  # 2 x 8180: MLPerf's four workers
    ],
)
def test_workers_of_ordinary_machines(machine, workers: int, intra: int) -> None:
    plan = plan_machine(build_machine(*machine), Request(), RUNTIME)
    assert [worker.intra_op for worker in plan.workers] == [intra] * workers


@pytest.mark.parametrize(
    ("machine", "workers", "intra"),
    [((1, 1, 2, 1), 1, 2), ((1, 1, 4, 2), 1, 4), ((2, 1, 2, 1), 2, 2), ((1, 1, 1, 1), 1, 1), ((2, 1, 24, 2), 2, 23)],
)
def test_a_small_host_with_amx_has_one_worker_in_each_node(machine, workers: int, intra: int) -> None:
    """Measured on two cores of a Xeon with AMX: one worker of two threads is faster than two of one."""
    with_amx = replace(build_machine(*machine), isa=("avx2", "avx512f", "amx_tile"))
    plan = plan_machine(with_amx, Request(), RUNTIME)
    assert [worker.intra_op for worker in plan.workers] == [intra] * workers
    (why,) = (reason.why for reason in plan.reasons if reason.what == "workers per host")
    measured = (
        "(two cores of a Xeon with AMX: 1.05-1.1x over two workers of one thread); cputrain tune measures this host"
    )
    assert why.endswith(measured) == (workers == 1 and intra > 1)


def test_the_published_evaluation_on_one_worker(golden) -> None:
    """The 256-node document's 5a: OMP_NUM_THREADS=46, --num_inter_threads 2, on one host of 2 x 24 cores."""
    plan = plan_machine(find_machine("skx-8160-2s"), Request(ppn=1, threads=46, inter_op=2), RUNTIME)
    worker = plan.workers[0]
    assert (worker.intra_op, worker.inter_op, dict(worker.env)["OMP_NUM_THREADS"]) == (46, 2, "46")
    assert (worker.memory_policy, worker.memory_nodes) == ("interleave", (0, 1))
    golden("skx-8160-2s-evaluation.txt", plan_to_text(plan))


@settings(max_examples=40)
@given(machines_and_requests(), st.integers(1, 40))
def test_more_workers_than_cores_share_them_evenly(drawn, more: int) -> None:
    machine, request = drawn
    cores = len(machine.allowed_cores)
    request = replace(request, ppn=cores + more, oversubscribe=True)
    plan = plan_machine(machine, request, RUNTIME)
    core_of = machine.core_of
    load = dict.fromkeys((core_of[pu] for pu in machine.allowed_pus), 0)
    for worker in plan.workers:
        assert worker.pus and set(worker.pus) <= set(machine.allowed_pus)
        (core,) = {core_of[pu] for pu in worker.pus}
        load[core] += 1
    assert len(plan.workers) == cores + more and plan.oversubscribed
    assert max(load.values()) - min(load.values()) <= 1
    assert any("share" in text for text in plan.warnings)
    assert plan_to_dict(plan)["oversubscribed"] is True
    assert dict(plan.workers[0].env)["I_MPI_WAIT_MODE"] == "1"


def test_each_planning_option_is_a_field_of_the_request_with_the_same_default() -> None:
    blank = Request()
    for option in OPTIONS:
        assert option.name == "share" or hasattr(blank, option.name), option
        if option.manual and option.name != "share":
            assert option.requested(option.default) == getattr(blank, option.name), option


@given(machines_and_requests())
def test_permission_to_share_cores_changes_nothing_where_there_are_enough(drawn) -> None:
    machine, request = drawn
    plan = plan_machine(machine, request, RUNTIME)
    allowed = plan_machine(machine, replace(request, oversubscribe=True), RUNTIME)
    assert not allowed.oversubscribed
    assert (allowed.workers, allowed.warnings) == (plan.workers, plan.warnings)


def test_shared_cores_are_shown(golden) -> None:
    plan = plan_machine(build_machine(1, 1, 3, 2), Request(ppn=8, oversubscribe=True), RUNTIME)
    golden("oversubscribed.txt", plan_to_text(plan))
    drawn = plan_to_svg(plan)
    assert "+: computes for several workers" in drawn and "oversubscribed: 8 workers share 3 cores" in drawn


@given(machines_and_requests(), st.data())
def test_cores_of_taken_pus_are_left_alone(drawn, data: st.DataObject) -> None:
    machine, request = drawn
    taken = tuple(sorted(data.draw(st.sets(st.sampled_from(machine.pus), max_size=4))))
    occupied = {pu for core in machine.cores if set(core.pus) & set(taken) for pu in core.pus}
    request = replace(request, ppn=None, occupied=taken)
    if set(machine.allowed_pus) <= occupied:
        with pytest.raises(InputError, match="share=true: processes of other plans use all"):
            plan_machine(machine, request, RUNTIME)
        return
    plan = plan_machine(machine, request, RUNTIME)
    assert not occupied & {pu for worker in plan.workers for pu in worker.pus}


@pytest.mark.parametrize(
    ("machine", "fields", "kind"),
    [
        ("skx-8160-2s", {}, "DRAM"),
        ("knl-7250-quad-cache", {}, "DRAM"),
        ("knl-7250-quad-flat", {"ppn": 1}, "MCDRAM"),
        ("max-9480-2s-snc4-flat", {}, "HBM"),
        ("max-9480-2s-snc4-flat", {"local_batch": 256}, "HBM + DRAM"),
        ("max-9480-2s-quad-hbm", {}, "HBM"),
    ],
)
def test_a_plan_names_the_memory_that_its_workers_use(machine: str, fields: dict, kind: str) -> None:
    plan = plan_machine(find_machine(machine), Request(**{"local_batch": 8, "workload": RESNET50, **fields}), RUNTIME)
    assert {plan.memory_kind(worker) for worker in plan.workers} == {kind}
    assert reason_of(plan, "memory per worker").value.endswith(f" GiB of {kind}")


def test_unequal_nodes_get_workers_in_proportion() -> None:
    machine = build_machine(1, 2, 4, 1)
    machine = replace(machine, allowed_pus=(0, 4, 5, 6, 7))
    plan = plan_machine(machine, Request(ppn=3), RUNTIME)
    assert [worker.compute_pus for worker in plan.workers] == [(0,), (4, 5), (6, 7)]
    assert any("sets the pace" in text for text in plan.warnings)


def test_a_worker_over_two_nodes_interleaves_its_memory_and_the_plan_warns() -> None:
    plan = plan_machine(build_machine(2, 1, 4, 1), Request(ppn=1), RUNTIME)
    assert (plan.workers[0].memory_policy, plan.workers[0].memory_nodes) == ("interleave", (0, 1))
    assert plan.warnings


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(ppn=64), "or let workers share cores with oversubscribe=true"),
        (Request(openmp="libomp5"), "openmp=libomp5: must be auto, libgomp or libiomp5"),
        (Request(ppn=64), "ppn=64 needs 64 cores; host made has 48 available: set ppn to 48 or fewer"),
        (Request(ppn=0), "ppn=0"),
        (Request(comm_cores=-1), "comm_cores=-1: must be 0 or more"),
        (Request(ppn=2, threads=99), "threads=99"),
        (Request(ppn=2, comm_cores=24), "leave none"),
        (Request(link_gbit=math.nan, nodes=2), "link_gbit=nan: must be a number of Gbit/s"),
        (Request(link_gbit=math.inf, nodes=2), "link_gbit=inf: must be a number of Gbit/s"),
        (Request(ppn=10**7, oversubscribe=True), "ppn=10000000: must be 65,536 or fewer, the most CPUs of a host"),
    ],
)
def test_requests_that_do_not_fit_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_machine(build_machine(2, 1, 24, 2), request_, RUNTIME)


def test_pus_beyond_the_requested_threads_are_named_as_unused() -> None:
    plan = plan_machine(build_machine(1, 1, 8, 2), Request(ppn=1, threads=4, loader_cores=0), RUNTIME)
    assert plan.workers[0].compute_pus == (0, 1, 2, 3)
    assert {item.why: item.pus for item in plan.unused}["{threads=4} leaves them out"] == (4, 5, 6, 7, 12, 13, 14, 15)


def test_a_cpu_quota_limits_the_cores() -> None:
    machine = replace(build_machine(1, 1, 16, 2), cpu_quota=2.5)
    plan = plan_machine(machine, Request(), RUNTIME)
    assert [worker.compute_pus for worker in plan.workers] == [(0,), (1,)]
    assert {item.why: len(item.pus) for item in plan.unused}["beyond the CPU quota"] == 28
    assert reason_of(plan, "cores used").numbers == {"used": 2, "allowed": 16, "quota": 2.5}
    with pytest.raises(InputError, match="ppn=3 needs 3 cores"):
        plan_machine(machine, Request(ppn=3), RUNTIME)
    assert len(plan_machine(replace(machine, cpu_quota=64.0), Request(ppn=16), RUNTIME).workers) == 16


@pytest.mark.parametrize(
    ("quota", "smt", "cores", "threads"),
    [
        *((4.0, False, 4, 4), (8.0, False, 8, 8), (12.0, False, 8, 8), (16.0, False, 8, 8)),
        *((4.0, True, 2, 4), (8.0, True, 4, 8), (13.0, True, 6, 12), (16.0, True, 8, 16), (1.0, True, 1, 1)),
    ],
)
def test_a_cpu_quota_counts_threads(quota: float, smt: bool, cores: int, threads: int) -> None:
    """Eight cores of two threads: no more threads than the quota feeds, those that load and communicate included."""
    machine = replace(build_machine(1, 1, 8, 2), cpu_quota=quota)
    plan = plan_machine(machine, Request(smt=smt, loader_cores=0), RUNTIME)
    core_of = machine.core_of
    busy = [pu for worker in plan.workers for pu in worker.pus]
    assert (len({core_of[pu] for pu in busy}), len(busy)) == (cores, threads)
    reserved = plan_machine(machine, Request(ppn=1, smt=smt, loader_cores=min(1, cores - 1)), RUNTIME)
    assert sum(len(worker.pus) for worker in reserved.workers) <= quota


@pytest.mark.parametrize(("allowed", "kept"), [((0, 1), {0, 1, 2, 3}), ((1,), {4, 5, 6, 7})])
def test_a_cpu_quota_keeps_cores_next_to_memory(allowed: tuple[int, ...], kept: set[int]) -> None:
    machine = replace(build_machine(2, 1, 4, 1), cpu_quota=4.0, allowed_nodes=allowed)
    plan = plan_machine(machine, Request(ppn=1), RUNTIME)
    assert {pu for worker in plan.workers for pu in worker.pus} == kept


def test_a_cpu_quota_keeps_the_cores_of_one_node_that_has_enough() -> None:
    machine = build_machine(2, 1, 8, 1)
    machine = replace(machine, allowed_pus=(0, 1, *range(8, 16)), cpu_quota=6.0)
    assert {*plan_machine(machine, Request(), RUNTIME).workers[0].pus} <= {*range(8, 16)}


@pytest.mark.parametrize(
    ("nodes", "ppn", "expected"),
    [
        ((4,) * 16, None, [4] * 16),  # EPYC with a cache as a NUMA node
        ((5, 4, 5, 4), None, [5, 4, 5, 4]),
        ((16, 2), None, [16]),  # a worker of two threads would set the pace of all
        ((6,) * 8, 7, [12, 6, 6, 6, 6, 6, 6]),
        ((16, 2), 2, [8, 8]),
        ((16, 16, 16), 2, [24, 24]),
        ((18, 18, 16, 16), 2, [36, 32]),
        ((24, 24), 1, [48]),
    ],
)
def test_workers_are_nearly_equal_and_inside_nodes(
    nodes: tuple[int, ...], ppn: int | None, expected: list[int]
) -> None:
    machine = unequal(nodes)
    plan = plan_machine(machine, Request(ppn=ppn), RUNTIME)
    assert [len(worker.pus) for worker in plan.workers] == expected


def unequal(sizes: tuple[int, ...]) -> Machine:
    """NUMA nodes with these numbers of cores."""
    machine = build_machine(1, len(sizes), max(sizes), 1)
    allowed = (pu for node, size in zip(machine.numa_nodes, sizes, strict=True) for pu in node.pus[:size])
    return replace(machine, allowed_pus=tuple(allowed))


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=10).map(tuple)


@given(SIZES, st.integers(1, 64), st.sampled_from([1, 8, 32]), st.data())
def test_workers_that_the_rules_choose_are_near_equal_fit_and_stay_inside_nodes(sizes, gib, batch, data) -> None:
    machine = unequal(sizes)
    machine = replace(machine, numa_nodes=tuple(replace(node, memory_bytes=gib << 30) for node in machine.numa_nodes))
    known = replace(RESNET50, assumed=False)
    try:
        plan = plan_machine(machine, Request(local_batch=batch, workload=known), RUNTIME)
    except InputError:  # then no other number of workers fits either
        drawn = data.draw(st.sets(st.integers(1, sum(sizes)), max_size=4))
        for ppn in {1, min(2, sum(sizes)), len(sizes), sum(sizes), *drawn}:
            with pytest.raises(InputError, match="needs"):
                plan_machine(machine, Request(ppn=ppn, local_batch=batch, workload=known), RUNTIME)
        return
    cores = [len(worker.pus) for worker in plan.workers]
    if all(size == sizes[0] for size in sizes) and gib == 64:
        assert max(cores) - min(cores) <= 1
    if sum(sizes) > 4:
        assert len(cores) <= 2 * sum(-(-size // 24) for size in sizes)
    idle = sum(sizes) - sum(cores)
    assert len(cores) * min(cores) + idle <= sum(sizes)
    assert plan.workers == plan_machine(machine, replace(plan.request, ppn=len(cores)), RUNTIME).workers or idle


def test_smt_on_computes_on_every_pu() -> None:
    plan = plan_machine(build_machine(1, 1, 4, 2), Request(ppn=1, smt=True), RUNTIME)
    assert plan.workers[0].intra_op == 8
    assert not plan.unused


def test_a_plan_takes_only_the_requested_cpus() -> None:
    machine = find_machine("skx-8160-2s")
    listed = (*range(8), *range(24, 32))
    plan = plan_machine(machine, Request(cores=listed, ppn=2))
    assert {pu for worker in plan.workers for pu in worker.pus} == set(listed)
    assert any(item.why == "{cores=0-7,24-31} leaves them out" for item in plan.unused)
    with pytest.raises(InputError, match=r"CPUs 96 of host .* are not available to this process"):
        plan_machine(machine, Request(cores=(0, 96)))


def test_all_cpus_requested_leave_none_out() -> None:
    assert plan_machine(build_machine(1, 1, 4, 1), Request(cores=(0, 1, 2, 3), ppn=1)).unused == ()


def test_slower_cores_are_left_out_on_request() -> None:
    machine = find_machine("pack:1 core:8 pu:1")
    slow = replace(machine, cores=tuple(replace(core, speed=0.5 + core.pus[0] // 4 / 2) for core in machine.cores))
    for e_cores, expected in (("off", {4, 5, 6, 7}), ("auto", set(range(8)))):
        plan = plan_machine(slow, Request(e_cores=e_cores, ppn=1, loader_cores=0, comm_cores=0))
        named = {pu for item in plan.unused for pu in item.pus if "{e_cores=off}" in item.why}
        assert named == set(range(8)) - expected


def test_the_caller_s_comparison_makes_the_plan_of_the_rules_and_of_what_was_chosen() -> None:
    compared = []

    def compare(plan: Plan, chosen: Mapping[str, tuple[int, str]]) -> Plan:
        compared.append((plan, dict(chosen)))
        return replace(plan, warnings=("compared",))

    machine, chosen = build_machine(1, 1, 8, 1), {"loader_cores": (2, "measured")}
    plan = plan_machine(machine, Request(ppn=1), RUNTIME, chosen=chosen, compare=compare)
    assert plan.warnings == ("compared",) and len(plan.workers[0].loader_pus) == 2
    assert compared == [(plan_machine(machine, Request(ppn=1), RUNTIME, chosen=chosen), chosen)]
    assert plan_this_machine(Request(ppn=1), {}, machine=machine, compare=compare).warnings == ("compared",)
    assert len(compared) == 2 and plan_this_machine(Request(ppn=1), {}, machine=machine).warnings == ()
