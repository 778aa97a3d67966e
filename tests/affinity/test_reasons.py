"""Every number in a reason or a warning is computed here again, from the plan's own values."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner import (
    PROCESS_BYTES,
    PROFILES,
    RESNET50,
    Plan,
    Request,
    Runtime,
    footprint,
    inter_op_threads,
    largest_batch,
    plan_machine,
)
from cputrain.affinity.topology import NumaNode, find_machine, format_list, narrowed, ordered
from cputrain.affinity.wording import spread
from tests.affinity.test_plan import machines_and_requests
from tests.support.machines import build_machine
from tests.support.plan_facts import GIB, Facts, every, workers_with_plenty_of_memory

PUBLISHED = rf"(?:{'|'.join(re.escape(f'profile {name}: {one.source}') for name, one in PROFILES.items())})"
Pattern = tuple[str, Callable[[Facts], tuple[object, ...]]]
N, RANGE, REAL = r"([\d,]+)", r"(\d+(?:-\d+)?)", r"([\d.]+)"
FEW_CORES = r"with 4 cores or fewer \D* \(measured on two cores: 1.2-1.35x \D*"


def memory_parts(facts: Facts) -> tuple[object, ...]:
    most = max(facts.images)
    parts = footprint(RESNET50, most)
    return (
        *(f"{parts.total / GIB:.1f}", f"{min(other.room for other in every(facts.plan)) / GIB:.1f}", most),
        *(f"{part / GIB:.2f}" for part in (parts.activations, parts.weights, parts.gradients)),
        *(f"{part / GIB:.2f}" for part in (parts.optimizer, parts.process)),
    )


def training_bytes(facts: Facts) -> int:
    return footprint(RESNET50, facts.worker.local_batch or 0).total


def need_and_room(facts: Facts, need: int) -> tuple[object, ...]:
    """As a warning has them: with as many digits as tell them apart."""
    digits = 1 if f"{need / GIB:.1f}" != f"{facts.room / GIB:.1f}" else 3
    return f"{need / GIB:.{digits}f}", facts.worker.local_rank, f"{facts.room / GIB:.{digits}f}"


# What each decision's text may be, `\D*` where it has no number, and the numbers in it.
REASONS: dict[str, list[Pattern]] = {
    "workers per host": [
        (rf"{N}: (?:set by the recipe or an option|{PUBLISHED})", lambda f: (f.ranks,)),
        (rf"{N}: set by the recipe or an option, more than the {N} cores? \D*", lambda f: (f.ranks, len(f.kept))),
        (rf"{N}: one for the only core", lambda f: (len(f.kept),)),
        (rf"{N}: one for each core: {FEW_CORES}", lambda f: (len(f.kept),)),
        (
            rf"{N}: one for each of the {N} fastest of {N} cores: {FEW_CORES}",
            lambda f: (f.ranks, len(f.sizes), len(f.kept)),
        ),
        (rf"{N}: one for the host: its {N} cores \D*", lambda f: (1, len(f.kept))),
        (rf"{N}: one for the host: {N} of its {N} cores \D*", lambda f: (1, len(f.own), len(f.kept))),
        (rf"{N}: one for each of {N} NUMA nodes: \D*", lambda f: (f.ranks, f.nodes)),
        (
            rf"{N}: one for each of {N} groups of cores \({N} NUMA nodes? and {N} packages? without one\): \D*",
            lambda f: (f.ranks, len(f.groups), f.nodes, f.packages_without_node),
        ),
        (rf"{N}: one for each core type that computes in a NUMA node: \D*", lambda f: (len(f.groups),)),
        (
            rf"{N}: {N} (?:NUMA nodes?|groups? of [a-z ]+) of {RANGE} cores?: \D* have {RANGE} cores? each, and 24\D*",
            lambda f: (f.ranks, len(f.groups), spread(f.groups.values()), spread(f.sizes)),
        ),
        (
            rf"{N}: the batch and the images suffice for {N} workers? per host",
            lambda f: (f.ranks, max(1, (f.plan.request.most_workers or 0) // f.plan.request.nodes)),
        ),
        (
            rf"{N}: the memory is too small for the {N} workers? \D*",
            lambda f: (f.ranks, workers_with_plenty_of_memory(f)),
        ),
        (rf"{N}: no worker count fits \D*", lambda f: (f.ranks,)),
    ],
    "core types": [
        (
            rf"{N} of speed 1.00, {N} of speed 0.50: each \D*",
            lambda f: tuple(Counter(core.speed for core in f.kept)[speed] for speed in (1.0, 0.5)),
        ),
        (
            rf"{N} of speed 1.00, {N} of speed 0.50: only those of speed {REAL} compute\D*",
            lambda f: (
                *(Counter(core.speed for core in f.kept)[speed] for speed in (1.0, 0.5)),
                f"{f.own[0].speed:.2f}",
            ),
        ),
    ],
    "level-3 caches per worker": [
        (rf"{RANGE}: whole caches\D*", lambda f: (spread([*map(len, f.caches)]),)),
        (
            rf"{RANGE}: {N} workers share {N} caches\D*",
            lambda f: (spread([*map(len, f.caches)]), f.ranks, f.caches_of(shared=False)),
        ),
        (
            rf"{RANGE}: workers share {N} of {N} caches\D*",
            lambda f: (spread([*map(len, f.caches)]), f.caches_of(shared=True), f.caches_of(shared=False)),
        ),
    ],
    "cores used": [
        (
            rf"{N} of {N}: \D* quota is the time of {REAL} CPUs: \D*",
            lambda f: (len(f.kept), len(f.usable), f"{f.plan.machine.cpu_quota:g}"),
        ),
        (rf"{N} of {N}: running processes \D*", lambda f: (len(f.usable), len(f.plan.machine.allowed_cores))),
    ],
    "cost of the workers": [
        (rf"{N} ranks in each all-reduce: \D*", lambda f: (f.ranks * f.plan.request.nodes,)),
        (
            rf"{N} ranks in each all-reduce, {N} images in one backward pass of all workers: \D*",
            lambda f: (f.ranks * f.plan.request.nodes, sum(f.images) * f.plan.request.nodes),
        ),
        (
            rf"{N} ranks in each all-reduce, {N} images in one backward pass of all workers, {REAL} GiB on a host: \D*",
            lambda f: (
                *(f.ranks * f.plan.request.nodes, sum(f.images) * f.plan.request.nodes),
                f"{sum(footprint(RESNET50, images).total for images in f.images) / GIB:.1f}",
            ),
        ),
    ],
    "comm cores per worker": [
        (rf"{N}: (?:one host: \D*|{PUBLISHED})", lambda f: (f.comm_cores,)),
        (rf"{N} and {N} second threads: {PUBLISHED}", lambda f: (0, len(f.worker.comm_pus))),
        (rf"{N}: a domain of {N} cores? is too small \D*", lambda f: (0, len(f.own))),
        (
            rf"{N}: {REAL} ms of communication in a step of {REAL} s \D*",
            lambda f: (0, f"{2 * RESNET50.parameters * 4 / f.link * 1e3:.1f}", f"{f.batch / f.rate:.1f}"),
        ),
        (
            rf"{N}: several hosts: \D* {REAL} Gbit/s per host is {REAL} GB/s per worker, and one core \D* 8 GB/s",
            lambda f: (f.comm_cores, f"{f.plan.request.link_gbit:g}", f"{f.link / 1e9:.1f}"),
        ),
    ],
    "loader cores per worker": [
        (rf"{N}: {PUBLISHED}", lambda f: (f.loader_cores,)),
        (rf"{N}: a domain of {N} cores? is too small \D*", lambda f: (0, len(f.own))),
        (
            rf"{N}: ResNet-50 at 224 x 224 trains at most {N} images/s on {N} cores?; one core decodes about {N} \D*",
            lambda f: (f.loader_cores, f"{f.rate:,.0f}", len(f.own), f"{1e9 / (7 * 204_000):,.0f}"),
        ),
    ],
    "intra-op threads": [(rf"{N}: one for each \D*", lambda f: (f.worker.intra_op,))],
    "inter-op threads": [
        (rf"{N}: (?:ResNet is \D*|few cores compute: \D*|{PUBLISHED})", lambda f: (f.worker.inter_op,)),
        (rf"{N}: published practice on 24-core packages \(intra-op 22, inter-op 2\)", lambda f: (f.worker.inter_op,)),
    ],
    "memory policy": [
        (r"([a-z]+): \D*", lambda f: (f.worker.memory_policy,)),
        (r"([a-z]+): \D* all of its ([\d.]+) GiB", lambda f: (f.worker.memory_policy, f.need)),
        (
            r"([a-z]+): \D* has ([\d.]+) of the ([\d.]+) GiB \D* nodes (\S+), next to no worker",
            lambda f: (
                *(f.worker.memory_policy, f"{f.near_dram / GIB:.1f}", f.need),
                format_list(node.id for node in f.spare),
            ),
        ),
    ],
    "memory left out": [
        (
            r"NUMA nodes? (\S+): (?!high)\D*",
            lambda f: (format_list(n.id for n in f.plan.machine.numa_nodes if n.kind in ("slow", "unknown")),),
        ),
        (r"NUMA nodes? (\S+): high-bandwidth memory\D*", lambda f: (format_list(f.unused_hbm),)),
    ],
    "local batch": [
        (rf"{RANGE}: (?:set by the recipe or an option|a typical value, \D*)", lambda f: (spread(f.images),)),
        (
            rf"{RANGE}: equal parts of the global batch of {N} images on {N} workers?, \D*",
            lambda f: (spread(f.images), f.plan.request.global_batch, f.ranks * f.plan.request.nodes),
        ),
        (
            rf"{RANGE}: in proportion to compute threads, {N} on average: \D*",
            lambda f: (spread(f.images), sum(f.images) // f.ranks),
        ),
    ],
    "memory per worker": [
        (
            rf"{REAL} of {REAL} GiB of \D*: ResNet-50 at 224 x 224 \(assumed\), {N} images? per step: "
            + ", ".join(rf"{name} {REAL}" for name in ("activations", "weights", "gradients", "optimizer"))
            + rf", the process itself {REAL} GiB",
            memory_parts,
        )
    ],
    "oneCCL threads per worker": [(rf"{N}: (?:\D*|{PUBLISHED})", lambda f: (dict(f.worker.env)["CCL_WORKER_COUNT"],))],
    "waiting of MPI and oneCCL": [(r"\D*", lambda f: ())],
    "OpenMP runtime": [(r"lib(?:gomp|iomp5): .*", lambda f: ())],  # of a profile and of pip's packages, not of the plan
    "allocator": [(r"\D*", lambda f: ())],
}
WARNINGS: list[Pattern] = [
    (
        rf"a training would not fit in memory: \D* alone needs {REAL} GiB; worker {N} has {REAL} GiB: \D*",
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
        rf"a typical \D*: ResNet-50 at 224 x 224 with {N} images? per step needs {REAL} GiB; "
        rf"worker {N} has {REAL} GiB: \D*",
        lambda f: (f.worker.local_batch, *need_and_room(f, training_bytes(f))),
    ),
    (
        rf"a typical \D*: ResNet-50 at 224 x 224 with {N} images? per step needs {REAL} GiB; "
        rf"worker {N} has {REAL} GiB: set {{local_batch}} to {N} or fewer(?: or use fewer workers)?",
        lambda f: (
            *(f.worker.local_batch, *need_and_room(f, training_bytes(f))),
            largest_batch(RESNET50, int(f.room)),
        ),
    ),
    (
        rf"a typical \D*: ResNet-50 at 224 x 224 with {N} images? per step needs {REAL} GiB; "
        rf"worker {N} has {REAL} GiB: use fewer workers, a single one with {{local_batch}} of {N} or fewer",
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


def texts(plan: Plan) -> Iterator[tuple[str, list[Pattern]]]:
    """Each text with numbers, and what it may be."""
    yield from ((f"{reason.value}: {reason.why}", REASONS[reason.what]) for reason in plan.reasons)
    yield from ((text, WARNINGS) for text in plan.warnings)


def written(numbers: tuple[object, ...]) -> tuple[str, ...]:
    """As the texts write them."""
    return tuple(f"{number:,}" if isinstance(number, int) else str(number) for number in numbers)


@settings(max_examples=60)
@given(plans())
def test_every_number_of_a_text_is_the_plan_s(plan: Plan) -> None:
    for text, patterns in texts(plan):
        found = [(match.groups(), expected) for p, expected in patterns if (match := re.fullmatch(p, text))]
        assert found, f"a text with unchecked numbers: {text}"
        (numbers, expected), *ambiguous = found
        assert not ambiguous, text
        assert any(numbers == written(expected(facts)) for facts in every(plan)), (text, expected(every(plan)[0]))


def test_a_chain_of_operators_is_the_reason_only_where_the_network_is_known_to_be_one() -> None:
    known = replace(RESNET50, name="resnet18 at 64 x 64", assumed=False)
    for workload, is_chain in (
        (known, True),
        (replace(known, name="torchvision:vit_b_16 at 224 x 224"), False),
        (RESNET50, False),  # stands for any network
        (None, False),
    ):
        _, reason = inter_op_threads(4, workload)
        assert reason.value == "1" and ("ResNet" in reason.why) == is_chain


def reason(plan: Plan, what: str) -> str:
    return next(f"{one.value}: {one.why}" for one in plan.reasons if one.what == what)


def test_workers_share_caches_equally_only_where_each_cache_has_as_many() -> None:
    """As in a cpuset that cuts level-3 caches: cores 4-19 of caches of eight."""
    machine = find_machine("genoa-9654-2s-nps1")
    cut = plan_machine(machine, Request(ppn=3, cores=tuple(range(4, 20))), Runtime())
    assert reason(cut, "level-3 caches per worker").startswith("1-2: workers share 1 of 3 caches, so that")
    whole = plan_machine(machine, Request(ppn=4, cores=tuple(range(16))), Runtime())
    assert reason(whole, "level-3 caches per worker") == "1: 4 workers share 2 caches, equally many each"


def test_caches_of_several_core_types_are_shared_for_their_types() -> None:
    """As on GB10, whose two clusters have five cores of each type and a cache."""
    machine = build_machine(1, 1, 20, 1)
    cores = [replace(c, l3=c.pus[0] // 10 * 10, speed=0.7 if c.pus[0] % 10 < 5 else 1.0) for c in machine.cores]
    plan = plan_machine(replace(machine, cores=ordered(cores)), Request(), Runtime())
    assert reason(plan, "level-3 caches per worker") == (
        "2: workers share 2 of 2 caches: each worker has cores of one type, a cache several"
    )


def test_an_assumed_rate_is_called_so() -> None:
    for isa, found in (((), True), (("asimd", "sve"), True), (("avx2",), False)):
        plan = plan_machine(replace(build_machine(1, 1, 16, 1), isa=isa), Request(), Runtime())
        why = reason(plan, "loader cores per worker")
        assert ("on 16 cores (assumed: 20 GFLOP/s per core); one core decodes" in why) == found


def test_one_node_with_memory_is_one_of_the_machine() -> None:
    machine = find_machine("numa:2(memory=64GiB) core:4")
    here = plan_machine(narrowed(machine, frozenset(range(4)), frozenset({0})), Request(), Runtime())
    assert reason(here, "memory policy") == (
        "default: the process may use the memory of one NUMA node: nothing to choose"
    )
    remote = plan_machine(narrowed(machine, frozenset(range(4)), frozenset({1})), Request(), Runtime())
    assert reason(remote, "memory policy") == (
        "default: the process may use no memory next to the worker: the kernel takes the nearest"
    )
    nodes = tuple(replace(node, memory_bytes=0) for node in machine.numa_nodes)
    unknown = plan_machine(replace(machine, numa_nodes=nodes), Request(), Runtime())
    assert reason(unknown, "memory policy") == (
        "default: where memory is, or how much, is not known: the kernel takes the nearest"
    )


def test_a_quota_below_one_cpu_throttles_a_single_thread() -> None:
    machine = replace(find_machine("numa:1(memory=64GiB) core:4"), cpu_quota=0.5)
    found = plan_machine(machine, Request(), Runtime())
    assert reason(found, "cores used").endswith("the time of 0.5 CPUs: even a single thread is throttled")
