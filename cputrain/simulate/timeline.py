"""A step in time: the backward pass, DDP's buckets as gradients are ready, and what of them is left at its end."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cputrain.simulate.assumptions import Constants
from cputrain.simulate.compute import BUCKET_COPY_PASSES, ROUNDING_PASSES, Work, work_of
from cputrain.simulate.messages import Message, messages_of
from cputrain.simulate.setup import Setup, Speed
from cputrain.simulate.stragglers import slowest


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
