"""A step in time: the backward pass, DDP's buckets as gradients are ready, and what of them is left at its end."""

from dataclasses import dataclass, replace

from affinity.units import MIB
from cputrain.comm.bucket_sizes import MEASURED_BYTES, bucket_bytes, fit_alpha_beta
from cputrain.simulate.all_reduce import Cost, Path, cost, exchanges
from cputrain.simulate.assumptions import Constants
from cputrain.simulate.compute import HALF, Work, weight_tensors, work_of
from cputrain.simulate.setup import DEFAULT_BUCKETS, Setup, Speed
from cputrain.simulate.stragglers import slowest

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 * MIB, 25 * MIB  # torch's DDP without bucket_cap_mb


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
    work = work_of(setup, speed, constants)
    slow = _step(setup, work, constants, _slowness(setup, constants))
    return replace(slow, straggler_s=slow.step_s - _step(setup, work, constants, 1.0).step_s)


def slowest_step(setup: Setup, speed: Speed, constants: Constants) -> float:
    """Seconds of a step, without its parts."""
    return _step(setup, work_of(setup, speed, constants), constants, _slowness(setup, constants)).step_s


def _slowness(setup: Setup, constants: Constants) -> float:
    return slowest(constants.phi_step_variation if setup.phi else constants.step_variation, setup.ranks)


def all_reduce_cost(setup: Setup, size: float, constants: Constants) -> Cost:
    """The all-reduce of a bucket of `size` bytes of float32 gradients."""
    sent = size * (HALF if setup.compression == "bf16" else 1.0)
    leaf_hosts = setup.hosts if setup.link is None else setup.link.leaf_hosts
    found = exchanges(setup.algorithm, sent, hosts=setup.hosts, workers=setup.workers, leaf_hosts=leaf_hosts)
    return cost(found, _path(setup, constants))


def bucket_limits(setup: Setup, constants: Constants) -> tuple[int, int]:
    """Bytes of the first bucket and of the others, as the trainer sets them: the recipe's, or by alpha and beta."""
    if setup.bucket_mib == DEFAULT_BUCKETS:
        return FIRST_BUCKET_BYTES, BUCKET_BYTES
    if setup.bucket_mib is not None:
        return (round(setup.bucket_mib * MIB),) * 2
    if setup.ranks == 1:
        return (BUCKET_BYTES,) * 2
    points = [(float(size), all_reduce_cost(setup, size, constants).seconds) for size in MEASURED_BYTES]
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
    if setup.move_bytes_per_s is not None:
        moved = setup.move_bytes_per_s
    elif setup.backend == "gloo":
        moved = constants.gloo_move_bytes_per_s
    else:
        each = constants.phi_core_move_bytes_per_s if setup.phi else constants.core_move_bytes_per_s
        moved = each * max(setup.comm_cores, 1)
    return Path(link=setup.link, host_latency_s=constants.host_latency_s, move_bytes_per_s=moved)


def _step(setup: Setup, work: Work, constants: Constants, slowness: float) -> Step:
    """One step where computing takes `slowness` times as long."""
    forward = slowness * (sum(work.forward_s) + work.decoding_s)
    start = (setup.accumulation - 1) * (forward + slowness * sum(work.backward_s)) + forward
    clock, debt, free, stopped = start, 0.0, 0.0, 0.0
    buckets: list[Bucket] = []
    ends: list[float] = []
    pending = assigned_buckets(setup, constants) if setup.ranks > 1 else []
    for layer in reversed(range(len(setup.layers))):
        computed = slowness * work.backward_s[layer]
        # without comm cores, moving messages and computing share the cores evenly
        shared = min(debt, computed)
        debt, stopped = debt - shared, stopped + shared
        clock += computed + shared
        ends.append(clock)
        while pending and pending[0][0] == layer:
            _, size = pending.pop(0)
            spent = _compression_s(setup, work, size)
            clock, stopped = clock + spent, stopped + spent
            found = all_reduce_cost(setup, size, constants)
            began = max(clock, free)
            free = began + found.seconds
            debt += 0.0 if setup.comm_cores else found.core_s
            buckets.append(Bucket(size=size, ready_s=clock, start_s=began, end_s=free))
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


def _compression_s(setup: Setup, work: Work, size: int) -> float:
    """Rounding and widening of a bucket, in the thread that computes the backward pass."""
    return size / work.compression_bytes_per_s if setup.compression == "bf16" else 0.0
