"""One step of a simulated host: compute, messages, all-reduce, and their overlap.

A layer takes the longer of its operations at the cores' rate and its bytes at the memory's rate (Williams, Waterman and
Patterson 2009, Roofline). Layers that were measured are scaled by their measured slowness.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from cputrain.affinity.planner.layouts import LOST_BY_REMOTE_MEMORY
from cputrain.affinity.planner.workload import BYTES
from cputrain.affinity.wording import MIB
from cputrain.predict.collectives import (
    MEASURED_BYTES,
    Cost,
    Link,
    MessagePath,
    all_reduce_exchanges,
    bucket_bytes,
    exchange_cost,
    fit_alpha_beta,
)
from cputrain.predict.layers import Layer

DEFAULT_BUCKETS = 0.0  # DDP's defaults: 1 MiB for the first bucket, then 25 MiB
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 * MIB, 25 * MIB  # defaults of torch's DDP without bucket_cap_mb
# Passes over the weights of an optimizer step: reads of weights, gradients and state, writes of weights and state.
# LARS and LAMB read weights and gradients once more, for their norms.
PLAIN_PASSES, PASSES_PER_COPY, NORM_READS = 3, 2, 2
HALF = 0.5  # size of bfloat16 relative to float32
# Reads and writes of a bucket, in float32 sizes. DDP copies each gradient into the bucket. By comm.compression, in the
# backward pass and when the sum of all ranks is ready: bf16 adds the rounding errors, rounds the gradients, widens and
# subtracts them for the new errors; the sum is widened again.
BUCKET_COPY_PASSES = 2
ROUNDING_PASSES = {"none": (0.0, 0.0), "bf16": (9.0, 1.5)}
# Reads and writes of a convolution's weights when oneDNN reorders them: before the forward pass; in the backward pass
# before it, and after it for their gradients.
REORDERING_PASSES = (2, 4)
MAX_SIGMAS, STEPS = 10.0, 500  # upper limit of the numerical integration in standard deviations, and its steps
SLOWEST, FASTEST = 1e7, 1e15  # bounds of a core's FLOP/s
TOLERANCE, MAX_ITERATIONS = 1e-6, 100  # relative error and iterations of the solution for a core's FLOP/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants that a prediction assumes besides machine, network and fabric: configs/published/assumptions.yaml."""

    host_variation: float
    step_variation: float
    memory_share: float
    serial_fraction: float
    core_move_bytes_per_s: float
    phi_core_slowness: float
    gloo_move_bytes_per_s: float
    gloo_bf16_slowness: float
    ccl_bf16_slowness: float
    tcp_move_bytes_per_s: float
    host_latency_s: float
    layer_overhead_s: float
    core_reorder_bytes_per_s: float
    decoding_share: float
    snapshot_bytes_per_s: float
    checkpoint_bytes_per_s: float
    evaluation_start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A training on `hosts` x `workers` ranks. Cores are per worker; `local_batch` is the number of images per backward
    pass, `accumulation` the number of backward passes per step.

    `move_bytes_per_s` replaces the assumed speed at which a worker's cores move messages, if known. `link` is None on
    one host. `clock_range` is the largest relative increase of the all-core clock over the base clock, of which hosts
    reach different fractions. `bucket_mib` is None if the trainer chooses the size. `slowest_core_speed` is the speed
    of the slowest computing core, as threads wait for it, relative to the host's fastest type; `remote` the part of a
    worker's memory that is on other NUMA nodes than a core.
    """

    layers: tuple[Layer, ...]
    hosts: int
    workers: int
    threads: int
    comm_cores: int
    loader_cores: int
    local_batch: int
    accumulation: int = 1
    precision: str = "float32"
    compression: str = "none"
    optimizer_passes: int = 5
    bucket_mib: float | None = None
    backend: str = "ccl"
    algorithm: str = "ring"
    link: Link | None = None
    phi: bool = False
    clock_range: float = 0.0
    decoded_per_core_s: float | None = None
    move_bytes_per_s: float | None = None
    slowest_core_speed: float = 1.0
    remote: float = 0.0

    @property
    def ranks(self) -> int:
        """Number of workers on all hosts."""
        return self.hosts * self.workers

    @property
    def global_batch(self) -> int:
        """Images per step."""
        return self.ranks * self.local_batch * self.accumulation

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a worker's gradients in float32."""
        return sum(layer.weight_bytes for layer in self.layers)


def passes_over_weights(copies: int, *, norms: bool = False) -> int:
    """Return the number of passes over the weights in an optimizer step, by the size of its state in copies."""
    return PLAIN_PASSES + PASSES_PER_COPY * copies + (NORM_READS if norms else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed of a host: FLOP/s of a core in convolutions and matrix products, and bytes/s of all its memory."""

    core_flops: float
    host_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of a worker that computes at the mean speed: each layer's passes, in the order of the forward pass.

    `decoding_s` is the time that computing waits for decoding before each backward pass, if there are no loader cores;
    `loading_s` the loader cores' time per step, which is a lower bound of the step. `memory_bytes_per_s` is the
    worker's share of the memory bandwidth.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: float
    memory_bytes_per_s: float
    decoding_s: float
    loading_s: float


def work_of(setup: Setup, speed: Speed, constants: Constants) -> Work:
    """Return the computation of a worker's step."""
    serial = constants.serial_fraction
    local = 1 - LOST_BY_REMOTE_MEMORY * setup.remote
    flops = setup.slowest_core_speed * local * speed.core_flops / ((1 - serial) / setup.threads + serial)
    memory = local * speed.host_bytes_per_s / setup.workers
    overhead = constants.layer_overhead_s * (constants.phi_core_slowness if setup.phi else 1.0)
    reordered = min(memory, setup.threads * constants.core_reorder_bytes_per_s)
    width = HALF if setup.precision == "bf16" else 1.0

    images, weights = setup.local_batch, [layer.weight_bytes for layer in setup.layers]

    def seconds(direction: int) -> tuple[float, ...]:
        passes, reordering = (1, 2)[direction], REORDERING_PASSES[direction] / reordered
        return tuple(
            layer.slowness[direction]
            * (
                max(
                    layer.flop[direction] * images / flops,
                    (layer.moved_bytes[direction] * images * width + passes * size) / memory,
                )
                + (reordering * size if layer.reordered else 0.0)
                + passes * overhead
            )
            for layer, size in zip(setup.layers, weights, strict=True)
        )

    decoding = loading = 0.0
    if setup.decoded_per_core_s is not None:
        decode_s = constants.decoding_share * setup.local_batch / setup.decoded_per_core_s
        if setup.loader_cores:
            loading = decode_s * setup.accumulation / setup.loader_cores
        else:
            decoding = (
                decode_s  # by a single thread, which shares a core with a compute thread that all others wait for
            )
    return Work(
        forward_s=seconds(0),
        backward_s=seconds(1),
        optimizer_s=setup.optimizer_passes * sum(weights) / memory,
        memory_bytes_per_s=memory,
        decoding_s=decoding,
        loading_s=loading,
    )


def weight_tensors(layers: tuple[Layer, ...]) -> list[tuple[int, int]]:
    """Return (layer index, bytes) of every gradient, in the order in which the backward pass finishes them."""
    return [(i, BYTES * size) for i in reversed(range(len(layers))) for size in reversed(layers[i].weights)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMessage:
    """A bucket: index of the layer whose gradients complete it, float32 bytes, and cost of its all-reduce."""

    layer: int
    size: int
    cost: Cost


def messages_of(setup: Setup, constants: Constants) -> tuple[BucketMessage, ...]:
    """Return the buckets of a step in the order in which they are sent; empty for a single worker."""
    if setup.ranks == 1:
        return ()
    path = _path(setup, constants)
    return tuple(
        BucketMessage(layer=layer, size=size, cost=_all_reduce(setup, size, path))
        for layer, size in assigned_buckets(setup, constants)
    )


def _all_reduce(setup: Setup, size: float, path: MessagePath) -> Cost:
    """Return the cost of the all-reduce of a bucket with `size` bytes of float32 gradients."""
    sent = size * (HALF if setup.compression == "bf16" else 1.0)
    leaf_hosts = setup.hosts if setup.link is None else setup.link.leaf_hosts
    messages = all_reduce_exchanges(
        setup.algorithm, sent, hosts=setup.hosts, workers=setup.workers, leaf_hosts=leaf_hosts
    )
    return exchange_cost(messages, path)


def bucket_limits(setup: Setup, constants: Constants) -> tuple[int, int]:
    """Return the bytes of the first bucket and of the others as the trainer sets them: the recipe's size, or computed
    from alpha and beta."""
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
    """Return (index of the layer that completes it, bytes) of each bucket, in the order in which they are sent.

    Gradients are added to a bucket as the backward pass finishes them, until the bucket reaches its limit.
    """
    first, bucket = bucket_limits(setup, constants)
    buckets: list[tuple[int, int]] = []
    size, last = 0, 0
    for layer, gradient in weight_tensors(setup.layers):
        size, last = size + gradient, layer
        if size >= (bucket if buckets else first):
            buckets.append((last, size))
            size = 0
    return [*buckets, (last, size)] if size else buckets


def _path(setup: Setup, constants: Constants) -> MessagePath:
    wire = math.inf
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
    return MessagePath(
        link=setup.link,
        host_latency_s=constants.host_latency_s,
        move_bytes_per_s=moved,
        wire_move_bytes_per_s=wire,
    )


@lru_cache(maxsize=256)
def expected_maximum(draws: int) -> float:
    """Return the expected maximum of `draws` independent standard normal values: 0 for 1, 1.03 for 4, 3.04 for 512.

    The integral of 1 - F(x)^n over positive x minus the integral of F(x)^n over negative x, by the midpoint rule.
    """
    width = MAX_SIGMAS / STEPS
    total = 0.0
    for i in range(STEPS):
        x = (i + 0.5) * width
        tail = 0.5 * math.erfc(x / math.sqrt(2))
        total += -math.expm1(draws * math.log1p(-tail)) - tail**draws
    return total * width


def slowest(hosts: int, workers: int, *, lasting: float, passing: float) -> float:
    """Return the step time of the slowest worker of `hosts` with `workers` each, relative to the median worker.

    A host is slower or faster in every step, a worker only in this one. Both factors are lognormal; `lasting` and
    `passing` are the standard deviations of their logarithms. Exact for one host and for one worker per host; in
    between, the slowest worker of a host is assumed to vary as much as any worker.
    """
    across = math.sqrt(lasting**2 + passing**2)
    return math.exp(across * expected_maximum(hosts) + passing * expected_maximum(workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A gradient bucket: bytes, and when it is ready, when its all-reduce starts and ends, in seconds of the step."""

    size: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the slowest worker, in seconds from its start. The last backward pass ends at `backward_end_s`.

    `exposed_s`: communication after the backward pass or that delayed it; `straggler_s`: how much longer the step is
    than the step of a worker at the mean speed; `layer_ends_s`: ends of each layer's backward pass, last layer first.
    """

    forward_end_s: float
    backward_end_s: float
    layer_ends_s: tuple[float, ...]
    buckets: tuple[Bucket, ...]
    optimizer_s: float
    exposed_s: float
    straggler_s: float
    step_s: float


def predict_step(setup: Setup, speed: Speed, constants: Constants) -> Step:
    """Simulate the step of a setup; every all-reduce waits for the slowest worker."""
    work, messages = work_of(setup, speed, constants), messages_of(setup, constants)
    slow = _step(setup, work, messages, _slowness(setup, constants))
    return replace(slow, straggler_s=slow.step_s - _step(setup, work, messages, 1.0).step_s)


def seconds_at(setup: Setup, constants: Constants) -> Callable[[Speed], float]:
    """Return a function from the host's speed to the seconds of a setup's step."""
    messages, slowness = messages_of(setup, constants), _slowness(setup, constants)
    return lambda speed: _step(setup, work_of(setup, speed, constants), messages, slowness).step_s


def solve_core_flops(seconds: Callable[[float], float], target_s: float) -> float | None:
    """Solve for the FLOP/s of a core at which `seconds` is the target (regula falsi, Anderson-Björck); None if no
    speed reaches it."""

    def excess(seconds_per_flop: float) -> float:
        """Return the seconds by which a step exceeds the target, nearly linear in the argument."""
        return seconds(1 / seconds_per_flop) - target_s

    low, high = 1 / FASTEST, 1 / SLOWEST
    below, above = excess(low), excess(high)
    if not below <= 0 <= above:
        return None
    for _ in range(MAX_ITERATIONS):
        middle = (low * above - high * below) / (above - below)
        error = excess(middle)
        if abs(error) <= TOLERANCE * target_s:
            return 1 / middle
        if error > 0:
            below *= _kept_share(error, above)
            high, above = middle, error
        else:
            above *= _kept_share(error, below)
            low, below = middle, error
    return 1 / middle


def _kept_share(residual: float, replaced: float) -> float:
    """Return the factor for the excess at the end that stays, given that at the end that `residual` replaces."""
    return 1 - residual / replaced if abs(residual) < abs(replaced) else 0.5


def _slowness(setup: Setup, constants: Constants) -> float:
    lasting = constants.host_variation * setup.clock_range
    return slowest(setup.hosts, setup.workers, lasting=lasting, passing=constants.step_variation)


def _step(setup: Setup, work: Work, messages: tuple[BucketMessage, ...], slowness: float) -> Step:
    """Simulate one step in which computing takes `slowness` times as long."""
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
