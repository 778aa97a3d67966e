"""One step: computing, messages, all-reduce, and how they overlap.

A layer takes as long as its operations at the cores' rate or its bytes at the memory's, whichever is longer (Williams,
Waterman and Patterson 2009, Roofline); where layers were measured, as many times that as there.

Each algorithm is a list of exchanges; an exchange costs latency + bytes x max(1 / core, workers at once / link). The
counts are those of Thakur, Rabenseifner and Gropp 2005 (Optimization of Collective Communication Operations in MPICH)
and, for the ring, of Patarasuk and Yuan 2009.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import inf

from cputrain.affinity.wording import MIB
from cputrain.comm.bucket_sizes import MEASURED_BYTES, bucket_bytes, fit_alpha_beta
from cputrain.simulate.assumptions import Constants, Link
from cputrain.simulate.network import BYTES, DEFAULT_BUCKETS, Layer, LayerSeconds, Setup, Speed

HALF = 0.5  # bytes of bfloat16 in those of float32
# Reads and writes of a bucket, of float32 size. DDP copies each gradient into it. By comm.compression, in the backward
# pass and when the sum of all ranks is there: with bf16 the rounding errors are added, the gradients rounded, widened
# and subtracted for the new errors; the sum is widened again.
BUCKET_COPY_PASSES = 2
ROUNDING_PASSES = {"none": (0.0, 0.0), "bf16": (9.0, 1.5)}
# Reads and writes of a convolution's weights when oneDNN reorders them: before the forward pass, and in the backward
# pass before and, for their gradients, after.
REORDERING_PASSES = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of a worker that computes at the mean speed: each layer's passes, in the order of the forward pass.

    `decoding_s` is what decoding takes from the computing threads in each backward pass, where it has no core of its
    own; `loading_s` what the loader cores need for a step, at which they hold up everything else.
    `memory_bytes_per_s` is the worker's share of the memory's speed.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: float
    memory_bytes_per_s: float
    decoding_s: float
    loading_s: float


def work_of(setup: Setup, speed: Speed, constants: Constants) -> Work:
    """The computation of a worker's step."""
    serial = constants.serial_fraction
    flops = speed.core_flops / ((1 - serial) / setup.threads + serial)
    memory = speed.host_bytes_per_s / setup.workers
    overhead = constants.layer_overhead_s * (constants.phi_core_slowness if setup.phi else 1.0)
    reordered = min(memory, setup.threads * constants.core_reorder_bytes_per_s)
    width = HALF if setup.precision == "bf16" else 1.0

    def seconds(layer: Layer, direction: int) -> float:
        operations = layer.flop[direction] * setup.local_batch / flops
        moved = layer.moved_bytes[direction] * setup.local_batch * width + (1, 2)[direction] * layer.weight_bytes
        reordering = REORDERING_PASSES[direction] * layer.weight_bytes / reordered if layer.reordered else 0.0
        least = max(operations, moved / memory) + reordering + (1, 2)[direction] * overhead
        return layer.slowness[direction] * least

    decoding = loading = 0.0
    if setup.decoded_per_core_s is not None:
        each = constants.decoding_share * setup.local_batch / setup.decoded_per_core_s
        if setup.loader_cores:
            loading = each * setup.accumulation / setup.loader_cores
        else:
            decoding = each / setup.threads
    return Work(
        forward_s=tuple(seconds(layer, 0) for layer in setup.layers),
        backward_s=tuple(seconds(layer, 1) for layer in setup.layers),
        optimizer_s=setup.optimizer_passes * setup.gradient_bytes / memory,
        memory_bytes_per_s=memory,
        decoding_s=decoding,
        loading_s=loading,
    )


def weight_tensors(layers: tuple[Layer, ...]) -> list[tuple[int, int]]:
    """(layer's index, bytes) of every gradient in the order in which the backward pass finishes them."""
    return [(i, BYTES * size) for i in reversed(range(len(layers))) for size in reversed(layers[i].weights)]


NOT_MEASURED = (1.0, 1.0)


def as_measured(layers: tuple[Layer, ...], work: Work, measured: Sequence[LayerSeconds]) -> tuple[Layer, ...]:
    """The layers with the slowness that gives them their measured shares of the time that the model says, `work`.

    The steps in which layers are timed take longer than others: their times count relative to one another. Layers
    without weights share the slowness of the layer before them. The same layers where those measured are others.
    """
    weighted = [i for i, layer in enumerate(layers) if layer.weights]
    if [sum(layers[i].weights) for i in weighted] != [each.weights for each in measured]:
        return layers
    predicted_s = sum(work.forward_s) + sum(work.backward_s)
    scale = predicted_s / sum(each.forward + each.backward for each in measured)
    found = list(layers)
    for (start, end), each in zip(pairwise([*weighted, len(layers)]), measured, strict=True):
        slowness = (
            scale * each.forward / sum(work.forward_s[start:end]),
            scale * each.backward / sum(work.backward_s[start:end]),
        )
        found[start:end] = [replace(layer, slowness=slowness) for layer in layers[start:end]]
    return tuple(found)


def slow_as(layers: tuple[Layer, ...], measured: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The measured layers where they are these ones, else these."""
    plain = tuple(replace(layer, slowness=NOT_MEASURED) for layer in measured)
    return measured if plain == layers else layers


ALGORITHMS = ("ring", "rabenseifner", "recursive-doubling", "two-level")
HOST, LEAF, TOP = "host", "leaf", "top"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """`count` messages in a row, each of `size` bytes that a worker sends while it receives as many.

    `level` is the widest level that they cross: a host, a leaf switch or the top of the network; `at_once` the number
    of a host's workers that send over its link at the same time.
    """

    count: float
    size: float
    level: str
    at_once: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """What messages go through: the link (None on one host), a message's latency inside a host, and the bytes/s that
    the cores of one worker move, sums included: inside a host, and between hosts where that is less."""

    link: Link | None
    host_latency_s: float
    move_bytes_per_s: float
    wire_move_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of an all-reduce, and those of them in which a core of the worker is busy."""

    seconds: float
    core_s: float


def exchanges(algorithm: str, size: float, *, hosts: int, workers: int, leaf_hosts: int) -> tuple[Exchange, ...]:
    """The exchanges of an all-reduce of `size` bytes over hosts x workers ranks, numbered host by host."""
    ranks = hosts * workers
    if ranks == 1:
        return ()
    level = HOST if hosts == 1 else LEAF if hosts <= leaf_hosts else TOP
    if algorithm == "ring":  # one message leaves each host at a time, to its neighbor
        return (Exchange(count=2 * (ranks - 1), size=size / ranks, level=HOST if hosts == 1 else LEAF),)
    if algorithm == "two-level":
        inside = Exchange(count=2 * (workers - 1), size=size / workers, level=HOST)
        across = _halving(size / workers, hosts, lambda distance: LEAF if distance < leaf_hosts else TOP, workers)
        return ((inside,) if workers > 1 else ()) + across

    def crossed(distance: int) -> str:
        """The level between ranks this far apart; hosts of one leaf switch have consecutive numbers."""
        return HOST if distance < workers else LEAF if distance < workers * leaf_hosts else TOP

    if algorithm == "rabenseifner":
        return _halving(size, ranks, crossed, workers)
    powers = int(math.log2(ranks))
    steps = tuple(
        Exchange(count=1, size=size, level=crossed(1 << k), at_once=_senders(crossed(1 << k), workers))
        for k in range(powers)
    )
    return steps + _fold(size, ranks, level, workers)


def _halving(size: float, ranks: int, crossed: Callable[[int], str], workers: int) -> tuple[Exchange, ...]:
    """Recursive halving, nearest ranks first, and doubling back: Rabenseifner's algorithm."""
    if ranks == 1:
        return ()
    powers = int(math.log2(ranks))
    steps = tuple(
        Exchange(count=2, size=size / (2 << k), level=crossed(1 << k), at_once=_senders(crossed(1 << k), workers))
        for k in range(powers)
    )
    return steps + _fold(size, ranks, crossed(ranks - 1), workers)


def _fold(size: float, ranks: int, level: str, workers: int) -> tuple[Exchange, ...]:
    """Ranks beyond a power of two give their values to another rank first and get the sums last."""
    if ranks & (ranks - 1) == 0:
        return ()
    return (Exchange(count=2, size=size, level=level, at_once=_senders(level, workers)),)


def _senders(level: str, workers: int) -> int:
    return 1 if level == HOST else workers


def cost(found: tuple[Exchange, ...], path: Path) -> Cost:
    """Seconds of these exchanges over a path; a core moves one part of a message while the link carries another."""
    seconds = core_s = 0.0
    for exchange in found:
        inside = exchange.level == HOST or path.link is None
        moved = exchange.size / (
            path.move_bytes_per_s if inside else min(path.move_bytes_per_s, path.wire_move_bytes_per_s)
        )
        core_s += exchange.count * moved
        if inside or path.link is None:
            seconds += exchange.count * (path.host_latency_s + moved)
            continue
        narrow = path.link.taper if exchange.level == TOP else 1.0
        carried = exchange.size * exchange.at_once * narrow / path.link.bytes_per_s
        seconds += exchange.count * (path.link.latency_s + max(moved, carried))
    return Cost(seconds=seconds, core_s=core_s)


FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 * MIB, 25 * MIB  # torch's DDP without bucket_cap_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A bucket: the index of the layer whose gradients complete it, its float32 bytes, and its all-reduce."""

    layer: int
    size: int
    cost: Cost


def messages_of(setup: Setup, constants: Constants) -> tuple[Message, ...]:
    """The buckets of a step, in the order in which they are sent; none for a single worker."""
    if setup.ranks == 1:
        return ()
    path = _path(setup, constants)
    return tuple(
        Message(layer=layer, size=size, cost=_all_reduce(setup, size, path))
        for layer, size in assigned_buckets(setup, constants)
    )


def _all_reduce(setup: Setup, size: float, path: Path) -> Cost:
    """The all-reduce of a bucket of `size` bytes of float32 gradients."""
    sent = size * (HALF if setup.compression == "bf16" else 1.0)
    leaf_hosts = setup.hosts if setup.link is None else setup.link.leaf_hosts
    found = exchanges(setup.algorithm, sent, hosts=setup.hosts, workers=setup.workers, leaf_hosts=leaf_hosts)
    return cost(found, path)


def bucket_limits(setup: Setup, constants: Constants) -> tuple[int, int]:
    """Bytes of the first bucket and of the others, as the trainer sets them: the recipe's, or by alpha and beta."""
    if setup.bucket_mib == DEFAULT_BUCKETS:
        return FIRST_BUCKET_BYTES, BUCKET_BYTES
    if setup.bucket_mib is not None:
        return (round(setup.bucket_mib * MIB),) * 2
    if setup.ranks == 1:
        return (BUCKET_BYTES,) * 2
    path = _path(setup, constants)
    points = [(float(size), _all_reduce(setup, size, path).seconds) for size in MEASURED_BYTES]
    return (bucket_bytes(setup.gradient_bytes, *fit_alpha_beta(points)),) * 2


def assigned_buckets(setup: Setup, constants: Constants) -> list[tuple[int, int]]:
    """(index of the layer that completes it, bytes) of each bucket, in the order in which they are sent.

    A bucket takes gradients as the backward pass finishes them and is full once it has reached its limit.
    """
    first, other = bucket_limits(setup, constants)
    found: list[tuple[int, int]] = []
    size, last = 0, 0
    for layer, gradient in weight_tensors(setup.layers):
        size, last = size + gradient, layer
        if size >= (other if found else first):
            found.append((last, size))
            size = 0
    return [*found, (last, size)] if size else found


def _path(setup: Setup, constants: Constants) -> Path:
    wire = inf
    if setup.move_bytes_per_s is not None:
        moved = setup.move_bytes_per_s
    elif setup.backend == "gloo":
        moved = constants.gloo_move_bytes_per_s
    else:
        cores = max(setup.comm_cores, 1) / (constants.phi_core_slowness if setup.phi else 1.0)
        moved = cores * constants.core_move_bytes_per_s
        if setup.link is not None and setup.link.name == "ethernet":
            wire = cores * constants.tcp_move_bytes_per_s
    if setup.compression == "bf16":
        slowness = constants.gloo_bf16_slowness if setup.backend == "gloo" else constants.ccl_bf16_slowness
        moved, wire = moved / slowness, wire / slowness
    return Path(
        link=setup.link,
        host_latency_s=constants.host_latency_s,
        move_bytes_per_s=moved,
        wire_move_bytes_per_s=wire,
    )


LARGEST, STEPS = 10.0, 2000  # of the numerical integration, in standard deviations


@lru_cache(maxsize=256)
def expected_maximum(draws: int) -> float:
    """The mean of the largest of `draws` independent standard normal values: 0 for 1, 1.03 for 4, 3.04 for 512.

    The integral of 1 - F(x)^n over positive x minus that of F(x)^n over negative x, by the midpoint rule.
    """
    width = LARGEST / STEPS
    total = 0.0
    for i in range(STEPS):
        x = (i + 0.5) * width
        tail = 0.5 * math.erfc(x / math.sqrt(2))
        total += -math.expm1(draws * math.log1p(-tail)) - tail**draws
    return total * width


def slowest(hosts: int, workers: int, *, lasting: float, passing: float) -> float:
    """The step of the slowest worker of `hosts` with `workers` each, relative to that of the median one.

    A host is slower or faster than others in every step, a worker in this one; both are lognormal, `lasting` and
    `passing` the standard deviations of the logarithms. Exact for one host and for one worker on each; between, the
    slowest worker of a host is taken to vary as much as any.
    """
    across = math.sqrt(lasting**2 + passing**2)
    return math.exp(across * expected_maximum(hosts) + passing * expected_maximum(workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A gradient bucket: bytes, when it is ready, and when its all-reduce starts and ends, in seconds of the step."""

    size: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the slowest worker, in seconds from its start. The last backward pass ends at `backward_end_s`.

    `exposed_s`: communication after it, or that stopped it; `straggler_s`: how much longer the step is than that of a
    worker at the mean speed; `layer_ends_s` the ends of each layer's backward pass, last layer first.
    """

    forward_end_s: float
    backward_end_s: float
    layer_ends_s: tuple[float, ...]
    buckets: tuple[Bucket, ...]
    optimizer_s: float
    exposed_s: float
    straggler_s: float
    step_s: float


def step_of(setup: Setup, speed: Speed, constants: Constants) -> Step:
    """The step of a setup; every all-reduce waits for the slowest of all workers."""
    work, messages = work_of(setup, speed, constants), messages_of(setup, constants)
    slow = _step(setup, work, messages, _slowness(setup, constants))
    return replace(slow, straggler_s=slow.step_s - _step(setup, work, messages, 1.0).step_s)


def seconds_at(setup: Setup, constants: Constants) -> Callable[[Speed], float]:
    """Seconds of a setup's step as a function of the host's speed."""
    messages, slowness = messages_of(setup, constants), _slowness(setup, constants)
    return lambda speed: _step(setup, work_of(setup, speed, constants), messages, slowness).step_s


def _slowness(setup: Setup, constants: Constants) -> float:
    lasting = constants.host_variation * setup.clock_range
    return slowest(setup.hosts, setup.workers, lasting=lasting, passing=constants.step_variation)


def _step(setup: Setup, work: Work, messages: tuple[Message, ...], slowness: float) -> Step:
    """One step where computing takes `slowness` times as long."""
    forward = slowness * (sum(work.forward_s) + work.decoding_s)
    start = (setup.accumulation - 1) * (forward + slowness * sum(work.backward_s)) + forward
    clock, debt, free, stopped = start, 0.0, 0.0, 0.0
    buckets: list[Bucket] = []
    ends: list[float] = []
    pending = iter(messages)
    message = next(pending, None)
    for layer in reversed(range(len(setup.layers))):
        computed = slowness * work.backward_s[layer]
        # without comm cores, moving messages and computing share the cores evenly
        shared = min(debt, computed)
        debt, stopped = debt - shared, stopped + shared
        clock += computed + shared
        ends.append(clock)
        while message is not None and message.layer == layer:
            pass_s = message.size / work.memory_bytes_per_s
            rounding, widening = (passes * pass_s for passes in ROUNDING_PASSES[setup.compression])
            clock, stopped = clock + BUCKET_COPY_PASSES * pass_s + rounding, stopped + rounding
            began = max(clock, free)
            free = began + message.cost.seconds + widening
            debt += 0.0 if setup.comm_cores else message.cost.core_s + widening
            buckets.append(Bucket(size=message.size, ready_s=clock, start_s=began, end_s=free))
            message = next(pending, None)
    communicated = max(free, clock)
    optimizer = slowness * work.optimizer_s
    return Step(
        forward_end_s=start,
        backward_end_s=clock,
        layer_ends_s=tuple(ends),
        buckets=tuple(buckets),
        optimizer_s=optimizer,
        exposed_s=communicated - clock + stopped,
        straggler_s=0.0,
        step_s=max(communicated + optimizer, work.loading_s),
    )
