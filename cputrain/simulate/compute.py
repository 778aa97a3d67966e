"""The time that a worker computes: forward and backward pass of each layer, optimizer, decoding.

A layer takes as long as its operations at the cores' rate or its bytes at the memory's, whichever is longer (Williams,
Waterman and Patterson 2009, Roofline); where layers were measured, as many times that as there.
"""

from dataclasses import dataclass

from cputrain.simulate.assumptions import Constants
from cputrain.simulate.layers import BYTES, Layer
from cputrain.simulate.setup import Setup, Speed

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
