"""A network in training as the planner knows it: its sizes, and the memory of a worker that trains it."""

import json
from dataclasses import dataclass

from cputrain.affinity.filesystem import shipped_folder
from cputrain.affinity.topology.machine import Count

BYTES = 4  # float32
PROCESS_BYTES = 750_000_000
CUDA_BYTES = 360_000_000  # more with a CUDA build of torch
PEAK_OVER_KEPT = 1.6  # peak / activations kept for backward; the rest: gradients of activations, reordered copies
IMAGE_PIXELS = 204_000  # mean of ImageNet's images before cropping
USUAL_BATCH = 32  # local batch if none is set


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A network in training.

    name: the network and its input size, as shown.
    network: the network whose layers were traced; "" if only its sizes are known.
    side: side of an image in pixels, as the network gets it.
    parameters: number of weights.
    gflop: floating-point operations of forward and backward pass in 1e9, per image.
    activation_bytes: bytes that the forward pass keeps for the backward pass, per image.
    optimizer_copies: size of the optimizer's state in copies of the weights (momentum: 1, Adam: 2).
    assumed: whether it stands in for an unknown network; no plan is refused because of it.
    decoder: library that decodes the images.
    image_pixels: pixels of an image before cropping.
    precision: precision of the computation.
    norms: whether the optimizer reads weights and gradients once more for their norms, as LARS and LAMB do.
    backend: library that sums the gradients: ccl or gloo.
    compression: format in which gradients are sent: none or bf16.
    bucket_mib: size of a gradient bucket in MiB; None if the trainer chooses it.
    process_bytes: memory of a process without the network.
    """

    name: str
    network: str = ""
    side: int = 224
    parameters: int
    gflop: float
    activation_bytes: int
    optimizer_copies: int = 1
    assumed: bool = False
    decoder: str = "libjpeg-turbo"
    image_pixels: int = IMAGE_PIXELS
    precision: str = "float32"
    norms: bool = False
    backend: str = "ccl"
    compression: str = "none"
    bucket_mib: float | None = None
    process_bytes: Count = PROCESS_BYTES

    @property
    def gradient_bytes(self) -> int:
        """Bytes that each worker contributes to the all-reduce of a step."""
        return self.parameters * BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """A worker's memory in bytes, by purpose."""

    process: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.process + self.weights + self.gradients + self.optimizer + self.activations


def _resnet50() -> Workload:
    """ResNet-50 as traced by tools/network_table.py."""
    traced = json.loads((shipped_folder("networks") / "resnet50.json").read_text(encoding="utf-8"))
    sizes = {key: traced[key] for key in ("parameters", "gflop", "activation_bytes")}
    return Workload(name="ResNet-50 at 224 x 224", network="resnet50", assumed=True, **sizes)


RESNET50 = _resnet50()


def footprint(workload: Workload, local_batch: int) -> Footprint:
    """Estimate a worker's peak memory with `local_batch` images per step.

    Gradients count twice, for DDP's buckets; with bf16 the backward pass needs a copy of the weights in bfloat16.
    """
    weights = workload.parameters * BYTES
    return Footprint(
        process=workload.process_bytes,
        weights=weights + (weights // 2 if workload.precision == "bf16" else 0),
        gradients=2 * weights,
        optimizer=workload.optimizer_copies * weights,
        activations=round(PEAK_OVER_KEPT * workload.activation_bytes * local_batch),
    )


def largest_batch(workload: Workload, room_bytes: int) -> int:
    """Return the largest local batch whose footprint fits; 0 if not even the weights fit."""
    free = room_bytes - footprint(workload, 0).total
    return max(0, int(free / (PEAK_OVER_KEPT * workload.activation_bytes)))
