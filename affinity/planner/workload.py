"""The network that a worker trains, as far as a plan needs it: sizes, speed, memory."""

from dataclasses import dataclass

from affinity.planner.reasons import Reason

BYTES = 4  # float32
PROCESS_BYTES = 650_000_000
PEAK_OVER_KEPT = 1.6  # peak resident memory over what backward keeps: gradients of activations, reordered copies
IMAGE_PIXELS = 204_000  # mean of ImageNet's images, which crops of 224 x 224 are taken from
USUAL_BATCH = 32  # images per step of a worker, where no batch is set
FIGURES = (
    Reason(
        what="memory of a process without a network",
        value=f"{PROCESS_BYTES / 1e9:g} GB",
        why="measured: Python with torch, oneDNN and the loader's batches 0.3-0.4 GB; a CUDA build of torch, which pip "
        "installs on Linux, 0.36 GB more",
    ),
    Reason(
        what="peak memory / activations kept",
        value=f"{PEAK_OVER_KEPT:g}",
        why="measured with torch 2.13: ResNet-50 1.45 (4 to 32 images of 224 x 224), ResNet-18 1.6",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A network in training. `parameters` counts its weights; the others are per image: floating-point operations of
    forward and backward pass in 1e9, and bytes that the forward pass keeps for the backward pass.

    `optimizer_copies` is the optimizer's state in copies of the weights (momentum: 1, Adam: 2). `assumed` marks a
    stand-in for an unknown network: no plan is refused because of it. `decoder` decodes images of `image_pixels`;
    `precision` is that of the computation.
    """

    name: str
    parameters: int
    gflop: float
    activation_bytes: int
    optimizer_copies: int = 1
    assumed: bool = False
    decoder: str = "libjpeg-turbo"
    image_pixels: int = IMAGE_PIXELS
    precision: str = "float32"

    @property
    def gradient_bytes(self) -> int:
        """Bytes that each worker contributes to an all-reduce."""
        return self.parameters * BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """A worker's memory in bytes, by what it is for."""

    process: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.process + self.weights + self.gradients + self.optimizer + self.activations


RESNET50 = Workload(
    name="ResNet-50 at 224 x 224",
    parameters=25_557_032,
    gflop=24.3,
    activation_bytes=86_100_000,
    assumed=True,
)


def footprint(workload: Workload, local_batch: int) -> Footprint:
    """Peak memory of a worker with `local_batch` images per step; gradients count twice, for DDP's buckets.

    With bf16 there is a copy of the weights in bfloat16, which the backward pass needs.
    """
    weights = workload.parameters * BYTES
    return Footprint(
        process=PROCESS_BYTES,
        weights=weights + (weights // 2 if workload.precision == "bf16" else 0),
        gradients=2 * weights,
        optimizer=workload.optimizer_copies * weights,
        activations=round(PEAK_OVER_KEPT * workload.activation_bytes * local_batch),
    )


def largest_batch(workload: Workload, room_bytes: int) -> int:
    """The most images per step whose footprint fits; 0 when not even the weights do."""
    left = room_bytes - footprint(workload, 0).total
    return max(0, int(left / (PEAK_OVER_KEPT * workload.activation_bytes)))
