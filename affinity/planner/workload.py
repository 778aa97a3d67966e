"""The network that a worker trains, as far as a plan needs it: sizes, speed, memory."""

from dataclasses import dataclass

BYTES = 4  # float32
# A Python with torch, oneDNN's code and scratch space, and the image loader's batches; measured 0.3-0.4 GB with a CPU
# build of torch, 0.36 GB more with a CUDA build, which pip installs on Linux.
PROCESS_BYTES = 650_000_000
# Peak resident memory over what backward keeps: gradients of activations, reordered copies. Measured with torch 2.13:
# 1.45 for ResNet-50 (batch 4 to 32, 224 x 224), 1.6 for ResNet-18.
PEAK_OVER_KEPT = 1.6
# GFLOP/s of one core in a whole training step, float32. Measured 48 on AVX2 (Zen 3), 88 on AVX-512 (Zen 4);
# the 256-node run comes to 35 (16,400 img/s on 256 x 44 computing cores), 44 before its loss to communication. AMX
# speeds up bfloat16 only.
CORE_GFLOPS = {"avx2": 50.0, "avx512f": 90.0}
LEAST_GFLOPS = 20.0
# ns of one core per pixel of a JPEG that is decoded into random crops. Measured in CPU time on an AMD EPYC with images
# of 204,000 pixels (ImageNet's mean), 108,000 (flowers) and 86,000 (prepared, short side 256): libjpeg-turbo 6.8, 7.1
# and 5.2 (722, 1,311 and 2,230 images/s), Pillow 15.8, 20.3 and 18.1 (311, 457 and 644).
DECODING_NS = {"libjpeg-turbo": 7.0, "Pillow": 18.0}
IMAGE_PIXELS = 204_000  # mean of ImageNet's images, which crops of 224 x 224 are taken from
USUAL_BATCH = 32  # images per step of a worker, where no batch is set


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A network in training. `parameters` counts its weights; the others are per image: floating-point operations of
    forward and backward pass in 1e9, and bytes that the forward pass keeps for the backward pass.

    `optimizer_copies` is the optimizer's state in copies of the weights (momentum: 1, Adam: 2). `assumed` marks a
    stand-in for an unknown network: no plan is refused because of it. `decoder` decodes images of `image_pixels`.
    """

    name: str
    parameters: int
    gflop: float
    activation_bytes: int
    optimizer_copies: int = 1
    assumed: bool = False
    decoder: str = "libjpeg-turbo"
    image_pixels: int = IMAGE_PIXELS

    @property
    def decoded_per_core_s(self) -> float:
        """Images/s that one core decodes."""
        return 1e9 / (DECODING_NS[self.decoder] * self.image_pixels)

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
    """Peak memory of a worker with `local_batch` images per step; gradients count twice, for DDP's buckets."""
    weights = workload.parameters * BYTES
    return Footprint(
        process=PROCESS_BYTES,
        weights=weights,
        gradients=2 * weights,
        optimizer=workload.optimizer_copies * weights,
        activations=round(PEAK_OVER_KEPT * workload.activation_bytes * local_batch),
    )


def largest_batch(workload: Workload, room_bytes: int) -> int:
    """The most images per step whose footprint fits; 0 when not even the weights do."""
    left = room_bytes - footprint(workload, 0).total
    return max(0, int(left / (PEAK_OVER_KEPT * workload.activation_bytes)))


def images_per_core_s(workload: Workload, isa: tuple[str, ...]) -> float:
    """Images/s that one core trains, at most."""
    gflops = max((CORE_GFLOPS[flag] for flag in isa if flag in CORE_GFLOPS), default=LEAST_GFLOPS)
    return gflops / workload.gflop
