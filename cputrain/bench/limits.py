"""What the processor reaches at best: oneDNN's convolutions and matrix products, on this process's threads."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

CHANNELS, SIDE, KERNEL = 128, 28, 3  # the 3 x 3 convolutions of ResNet-50's second stage
MATRIX, TEST_MATRIX = 2048, 256
MOST_IMAGES = 16
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A computation and its floating-point operations."""

    name: str
    precision: str
    flop: float
    run: Callable[[], object]

    def flops(self) -> float:
        """FLOP/s of one run."""
        started = time.perf_counter()
        with torch.no_grad():
            self.run()
        return self.flop / (time.perf_counter() - started)


def kernels(precision: str, images: int, *, quick: bool) -> tuple[Kernel, ...]:
    """Convolution forward and backward, and matrix product, in a precision."""
    dtype, images = TYPES[precision], min(images, MOST_IMAGES)
    shape = (images, CHANNELS, SIDE, SIDE)
    x, gradient = (torch.rand(shape).to(dtype=dtype, memory_format=torch.channels_last) for _ in range(2))
    weights = torch.rand(CHANNELS, CHANNELS, KERNEL, KERNEL).to(dtype=dtype, memory_format=torch.channels_last)
    flop = 2.0 * weights.numel() * images * SIDE * SIDE
    geometry = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    side = TEST_MATRIX if quick else MATRIX
    left, right = (torch.rand(side, side).to(dtype) for _ in range(2))
    name = f"{KERNEL} x {KERNEL} convolution"
    return (
        Kernel(
            name=f"{name} forward",
            precision=precision,
            flop=flop,
            run=lambda: functional.conv2d(x, weights, padding=1),
        ),
        Kernel(
            name=f"{name} backward",
            precision=precision,
            flop=2 * flop,
            run=lambda: torch.ops.aten.convolution_backward(gradient, x, weights, None, *geometry, (True, True, False)),
        ),
        Kernel(name="matrix product", precision=precision, flop=2.0 * side**3, run=lambda: left @ right),
    )
