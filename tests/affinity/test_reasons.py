"""Every number in a reason or a warning is computed here again, from the plan's own values."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.request import PROFILES, Request
from cputrain.affinity.planner.rules import inter_op_threads
from cputrain.affinity.planner.workload import PROCESS_BYTES, RESNET50, footprint, largest_batch
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import NumaNode, narrow_machine, ordered_cores
from cputrain.affinity.wording import numbers_text, spread
from tests.affinity.test_plan import machines_and_requests
from tests.support.machines import build_machine
from tests.support.plan_facts import GIB, Facts, every, reason_of, workers_with_plenty_of_memory

PUBLISHED = rf"(?:{'|'.join(re.escape(f'profile {name}: {one.source}') for name, one in PROFILES.items())})"
Pattern = tuple[str, Callable[[Facts], tuple[object, ...]]]
N, RANGE, REAL = r"([\d,]+)", r"(\d+(?:-\d+)?)", r"([\d.]+)"


def memory_of(name: str) -> Callable[[Facts], int]:
    """A part of the largest worker's memory."""
    return lambda facts: getattr(footprint(RESNET50, max(facts.images)), name)


def training_bytes(facts: Facts) -> int:
    return footprint(RESNET50, facts.worker.local_batch or 0).total


def need_and_room(facts: Facts, need: int) -> tuple[object, ...]:
    """As a warning has them: with as many digits as tell them apart."""
    digits = 1 if f"{need / GIB:.1f}" != f"{facts.room / GIB:.1f}" else 3
    return f"{need / GIB:.{digits}f}", facts.worker.local_rank, f"{facts.room / GIB:.{digits}f}"


# Each decision's numbers by name, in plain units.
NUMBERS: dict[str, dict[str, Callable[[Facts], object]]] = {
    "workers per host": {
        "workers": lambda f: f.ranks,
        "cores": lambda f: len(f.kept),
        "used": lambda f: sum(f.sizes),
        "groups": lambda f: len(f.groups),
        "group_cores": lambda f: sorted(f.groups.values()),
        "nodes": lambda f: f.nodes,
        "packages": lambda f: f.packages_without_node,
        "worker_cores": lambda f: sorted(f.sizes),
        "most_workers": lambda f: max(1, (f.plan.request.most_workers or 0) // f.plan.request.nodes),
        "suited": workers_with_plenty_of_memory,
    },
    "core types": {"speed": lambda f: f.own[0].speed},
    "level-3 caches per worker": {
        "each": lambda f: sorted(map(len, f.caches)),
        "workers": lambda f: f.ranks,
        "shared": lambda f: f.caches_of(shared=True),
        "caches": lambda f: f.caches_of(shared=False),
    },
    "cores used": {"used": lambda f: len(f.usable), "allowed": lambda f: len(f.plan.machine.allowed_cores)},
    "cores that a quota feeds": {
        "used": lambda f: len(f.kept),
        "allowed": lambda f: len(f.usable),
        "quota": lambda f: f.plan.machine.cpu_quota,
    },
    "cost of the workers": {
        "ranks": lambda f: f.ranks * f.plan.request.nodes,
        "images": lambda f: sum(f.images) * f.plan.request.nodes,
        "memory": lambda f: sum(footprint(RESNET50, images).total for images in f.images),
    },
    "comm cores per worker": {
        "comm_cores": lambda f: f.comm_cores,
        "comm_siblings": lambda f: f.comm_siblings,
        "cores": lambda f: len(f.own),
        "wire_s": lambda f: 2 * RESNET50.parameters * 4 / f.link,
        "step_s": lambda f: f.batch / f.rate,
        "link_gbit": lambda f: f.plan.request.link_gbit,
        "link_bytes_per_s": lambda f: f.link,
        "core_bytes_per_s": lambda f: 8e9,
    },
    "loader cores per worker": {
        "loader_cores": lambda f: f.loader_cores,
        "cores": lambda f: len(f.own),
        "trained_per_s": lambda f: f.rate,
        "decoded_per_s": lambda f: 1e9 / (7 * 204_000),
    },
    "intra-op threads": {"intra_op": lambda f: f.worker.intra_op},
    "inter-op threads": {"inter_op": lambda f: f.worker.inter_op},
    "memory policy": {"need": training_bytes, "near": lambda f: f.near_dram},
    "memory left out": {},
    "local batch": {
        "images": lambda f: sorted({*f.images}),
        "global_batch": lambda f: f.plan.request.global_batch,
        "workers": lambda f: f.ranks * f.plan.request.nodes,
        "average": lambda f: sum(f.images) // f.ranks,
    },
    "memory per worker": {
        "need": memory_of("total"),
        "room": lambda f: min(other.room for other in every(f.plan)),
        "images": lambda f: max(f.images),
        **{name: memory_of(name) for name in ("activations", "weights", "gradients", "optimizer", "process")},
    },
    "oneCCL threads per worker": {"threads": lambda f: int(f.worker.env["CCL_WORKER_COUNT"])},
    "waiting of MPI and oneCCL": {},
    "OpenMP runtime": {},
    "allocator": {},
}
# Numbers of texts that stand in the rules, in sources, in names and in lists of CPUs and nodes.
CONSTANT = re.compile(
    r"with 4 cores or fewer|Zen 3: 1\.2-1\.35x|of Zen 4|AMX: 1\.05-1\.1x|at most 24"
    r"|24-core packages \(intra-op 22, inter-op 2\)|ResNet-50 at 224 x 224|NUMA nodes? [\d,-]+|\d+ of speed \d\.\d\d"
    r"|lib(?:gomp|iomp5): .*|" + PUBLISHED
)
WARNINGS: list[Pattern] = [
    (
        rf"a training would not fit in memory, \D* alone needs {REAL} GiB; worker {N} has {REAL} GiB: \D*",
        lambda f: need_and_room(f, PROCESS_BYTES),
    ),
    (rf"the worker spans {N} NUMA nodes: \D*", lambda f: (f.nodes,)),
    (rf"{N} of {N} workers span several of the {N} NUMA nodes: \D*", lambda f: (f.spanning, f.ranks, f.nodes)),
    # What fewer workers compute has a test of its own: test_domains.py.
    (rf"domains of {RANGE} cores: \D*(?:; {{ppn=\d+}} computes [\d.]+ times \D*)?", lambda f: (spread(f.sizes),)),
    (
        rf"oversubscribed: {N} workers share {N} cores?, up to {N} per core, \D*",
        lambda f: (f.ranks, len(f.kept), -(-f.ranks // len(f.kept))),
    ),
    (
        rf"a typical \D*, as ResNet-50 at 224 x 224 with {N} images? per step needs {REAL} GiB; "
        rf"worker {N} has {REAL} GiB: \D*",
        lambda f: (f.worker.local_batch, *need_and_room(f, training_bytes(f))),
    ),
    (
        rf"a typical \D*, as ResNet-50 at 224 x 224 with {N} images? per step needs {REAL} GiB; "
        rf"worker {N} has {REAL} GiB: set {{local_batch}} to {N} or fewer(?: or use fewer workers)?",
        lambda f: (
            *(f.worker.local_batch, *need_and_room(f, training_bytes(f))),
            largest_batch(RESNET50, int(f.room)),
        ),
    ),
    (
        rf"a typical \D*, as ResNet-50 at 224 x 224 with {N} images? per step needs {REAL} GiB; "
        rf"worker {N} has {REAL} GiB: use a single worker, with {{local_batch}} set to {N} or fewer",
        lambda f: (
            *(f.worker.local_batch, *need_and_room(f, training_bytes(f))),
            largest_batch(RESNET50, int(sum(other.room for other in every(f.plan)))),
        ),
    ),
    (r"planned for \S+, not \S+ \(.*", lambda f: ()),  # of the OpenMP runtime
]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of machines with and without caches, types of cores, small and fast memory, limits and neighbors."""
    machine, request = draw(machines_and_requests(packages=2, cores=12))
    mib = draw(st.sampled_from([512, 3 << 10, 6 << 10, 64 << 10]))
    nodes = tuple(replace(node, memory_bytes=mib << 20) for node in machine.numa_nodes)
    if kind := draw(st.sampled_from([None, None, "hbm", "slow", "unknown"])):
        nodes += (NumaNode(id=len(nodes), pus=(), memory_bytes=4 << 30, kind=kind, near=(0,)),)
    machine = replace(
        machine,
        numa_nodes=nodes,
        allowed_nodes=tuple(node.id for node in nodes),
        cpu_quota=draw(st.sampled_from([None, 1.5, 6.0])),
        memory_limit_bytes=draw(st.sampled_from([None, 8 << 30])),
    )
    request = replace(
        request,
        ppn=draw(st.sampled_from([None, request.ppn])),
        oversubscribe=draw(st.booleans()),
        occupied=draw(st.sampled_from([(), machine.allowed_pus[:1]])),
        global_batch=draw(st.sampled_from([None, 512])),
        most_workers=draw(st.sampled_from([None, 8])),
    )
    if request.oversubscribe and request.ppn:
        request = replace(request, ppn=request.ppn + draw(st.integers(0, 9)))
    try:
        return plan_machine(machine, request, Runtime())
    except InputError:
        reject()


def written(numbers: tuple[object, ...]) -> tuple[str, ...]:
    """As the texts write them."""
    return tuple(f"{number:,}" if isinstance(number, int) else str(number) for number in numbers)


def forms(number: object) -> set[str]:
    """As texts may write a number, or the least and the most of several."""
    if isinstance(number, tuple):
        return {form for each in number for form in forms(each)}
    assert isinstance(number, int | float)
    scaled = [number / unit for unit in (1, GIB, 1e9, 1e-3)]
    return {f"{each:{spec}}" for each in scaled for spec in (",.0f", ".1f", ".2f", "g", ".3g")} | {str(number)}


def same(number: object, fact: object) -> bool:
    return sorted(number) == fact if isinstance(number, tuple) else bool(number == pytest.approx(fact))


def test_a_text_carries_the_numbers_that_it_names_in_plain_units() -> None:
    part = numbers_text("{cores:core} each", cores=(4, 5))
    text = numbers_text(
        "{room:GiB .1f} GiB, {part}, {workers:worker} ({{ppn}})", room=GIB, part=part, workers=1, unnamed=7
    )
    assert text == "1.0 GiB, 4-5 cores each, 1 worker ({ppn})"
    assert text.numbers == {"room": GIB, "cores": (4, 5), "workers": 1}


@settings(max_examples=60)
@given(plans())
def test_every_number_of_a_reason_is_the_plan_s(plan: Plan) -> None:
    for reason in plan.reasons:
        facts = NUMBERS["cores that a quota feeds" if "quota" in reason.numbers else reason.what]
        assert any(
            all(same(number, facts[name](one)) for name, number in reason.numbers.items()) for one in every(plan)
        ), (reason, reason.numbers, {name: facts[name](every(plan)[0]) for name in reason.numbers})
        text = CONSTANT.sub("", f"{reason.value}: {reason.why}")
        known = {form for number in reason.numbers.values() for form in forms(number)}
        assert known.issuperset(re.findall(r"\d(?:[\d,.]*\d)?", text)), (reason, known)


@settings(max_examples=60)
@given(plans())
def test_every_number_of_a_warning_is_the_plan_s(plan: Plan) -> None:
    for text in plan.warnings:
        found = [(match.groups(), expected) for p, expected in WARNINGS if (match := re.fullmatch(p, text))]
        assert found, f"a text with unchecked numbers: {text}"
        (numbers, expected), *ambiguous = found
        assert not ambiguous, text
        assert any(numbers == written(expected(facts)) for facts in every(plan)), (text, expected(every(plan)[0]))


def test_a_chain_of_operators_is_the_reason_only_where_the_network_is_known_to_be_one() -> None:
    known = replace(RESNET50, name="resnet18 at 64 x 64", network="resnet18", side=64, assumed=False)
    for workload, is_chain in (
        (known, True),
        (replace(known, network="torchvision:vit_b_16"), False),
        (RESNET50, False),  # stands for any network
        (None, False),
    ):
        threads, why = inter_op_threads(4, workload)
        assert threads == 1 and ("ResNet" in why) == is_chain


def test_workers_share_caches_equally_only_where_each_cache_has_as_many() -> None:
    """As in a cpuset that cuts level-3 caches: cores 4-19 of caches of eight."""
    machine = find_machine("genoa-9654-2s-nps1")
    cut = plan_machine(machine, Request(ppn=3, cores=tuple(range(4, 20))), Runtime())
    found = reason_of(cut, "level-3 caches per worker")
    assert found.numbers == {"each": (2, 1, 2), "shared": 1, "caches": 3} and "as equal as possible" in found.why
    whole = plan_machine(machine, Request(ppn=4, cores=tuple(range(16))), Runtime())
    numbers = reason_of(whole, "level-3 caches per worker").numbers
    assert numbers == {"each": (1, 1, 1, 1), "workers": 4, "caches": 2}


def test_caches_of_several_core_types_are_shared_for_their_types() -> None:
    """As on GB10, whose two clusters have five cores of each type and a cache."""
    machine = build_machine(1, 1, 20, 1)
    cores = [replace(c, l3=c.pus[0] // 10 * 10, speed=0.7 if c.pus[0] % 10 < 5 else 1.0) for c in machine.cores]
    plan = plan_machine(replace(machine, cores=ordered_cores(cores)), Request(), Runtime())
    found = reason_of(plan, "level-3 caches per worker")
    assert found.numbers == {"each": (2, 2), "shared": 2, "caches": 2} and "cores of one type" in found.why


def test_an_assumed_rate_is_called_so() -> None:
    arm = ("asimd", "sve", "sve2", "bf16")
    for isa, assumed in (((), 20), (arm[:1], 20), (arm[:2], 40), (arm, 50), (("avx2",), None)):
        plan = plan_machine(replace(build_machine(1, 1, 16, 1), isa=isa), Request(), Runtime())
        why = reason_of(plan, "loader cores per worker").why
        assert ("(assumed: " in why) == (assumed is not None)
        assert assumed is None or f"(assumed: {assumed} GFLOP/s per core)" in why


def test_one_node_with_memory_is_one_of_the_machine() -> None:
    machine = find_machine("numa:2(memory=64GiB) core:4")
    here = plan_machine(narrow_machine(machine, frozenset(range(4)), frozenset({0})), Request(), Runtime())
    assert reason_of(here, "memory policy").why.startswith("the process may use the memory of one NUMA node")
    remote = plan_machine(narrow_machine(machine, frozenset(range(4)), frozenset({1})), Request(), Runtime())
    assert reason_of(remote, "memory policy").why.startswith("the process may not use the memory next to the worker")
    nodes = tuple(replace(node, memory_bytes=0) for node in machine.numa_nodes)
    unknown = plan_machine(replace(machine, numa_nodes=nodes), Request(), Runtime())
    assert reason_of(unknown, "memory policy").why.startswith("place and size of the memory are unknown")


def test_a_quota_below_one_cpu_throttles_a_single_thread() -> None:
    machine = replace(find_machine("numa:1(memory=64GiB) core:4"), cpu_quota=0.5)
    found = plan_machine(machine, Request(), Runtime())
    reason = reason_of(found, "cores used")
    assert reason.numbers["quota"] == 0.5 and "even a single thread is throttled" in reason.why
