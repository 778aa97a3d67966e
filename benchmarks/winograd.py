"""ResNet-50's 3 x 3 layers of stride 1 with Winograd's algorithm and with oneDNN: outputs and both gradients.

    python -m benchmarks.winograd [--batch 32] [--rounds 9] [--threads 1] [--bf16]

Both take turns, layer by layer; milliseconds of all layers of a kind, medians over the rounds. Transforming the weights
is included, as in a training; errors are the largest difference from float64, relative to the largest value.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from cputrain.kernels.convolution import ConvolutionKernels, load_convolutions
from cputrain.studies.bench.figures import interleaved, seconds_of

LAYERS = ((64, 56, 3), (128, 28, 3), (256, 14, 5), (512, 7, 2))
"""Channels, height of the images, and number of layers of this kind in ResNet-50."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels, dtype = load_convolutions(os.environ), torch.bfloat16 if options.bf16 else torch.float32
    print(f"| 3 x 3, {options.batch} images, {dtype} | layers | pass | oneDNN, ms | Winograd, ms | ratio | error |")
    print("|---|---|---|---|---|---|---|")
    totals = [0.0, 0.0]
    for channels, side, layers in LAYERS:
        for name, passes, error in pairs(kernels, options.batch, channels, side, dtype):
            runs = dict(enumerate(partial(seconds_of, one) for one in passes))
            with torch.no_grad():
                taken = [layers * 1000 * median(seconds) for seconds in interleaved(runs, options.rounds).values()]
            totals = [total + own for total, own in zip(totals, taken, strict=True)]
            row = f"{channels} channels, {side} x {side} | {layers} | {name}"
            print(f"| {row} | {taken[0]:.1f} | {taken[1]:.1f} | {taken[0] / taken[1]:.2f} | {error:.0e} |", flush=True)
    layers = sum(count for _, _, count in LAYERS)
    print(f"| all | {layers} | all | {totals[0]:.1f} | {totals[1]:.1f} | {totals[0] / totals[1]:.2f} | |")


Passes = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""One pass with oneDNN and with Winograd's algorithm."""


def pairs(
    kernels: ConvolutionKernels, batch: int, channels: int, side: int, dtype: torch.dtype
) -> list[tuple[str, Passes, float]]:
    """Return the three passes of a layer, each with the error of Winograd's algorithm."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(memory_format=torch.channels_last)

    x, g = (random(batch, channels, side, side).to(dtype) for _ in range(2))
    weight = random(channels, channels, 3, 3)
    own = weight.to(dtype)
    same = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def backward(gradient: Tensor, images: Tensor, by: Tensor, index: int) -> Tensor:
        mask = [index == 0, index == 1, False]
        return torch.ops.aten.convolution_backward(gradient, images, by, None, *same, mask)[index]

    found: list[tuple[str, Passes, float]] = []
    for name, direct, ours, exact in (
        (
            "outputs",
            lambda: torch.conv2d(x, own, padding=1),
            lambda: kernels.output(x, weight, 1),
            lambda: torch.conv2d(x[:1].double(), weight.double(), padding=1),
        ),
        (
            "gradient of the images",
            lambda: backward(g, x, own, 0),
            lambda: kernels.input_gradient(g, weight, 1),
            lambda: backward(g[:1].double(), x[:1].double(), weight.double(), 0),
        ),
        (
            "gradient of the weights",
            lambda: backward(g, x, own, 1),
            lambda: kernels.weight_gradient(x, g, 1),
            lambda: backward(g.double(), x.double(), weight.double(), 1),
        ),
    ):
        expected = exact()
        got = ours()[: len(expected)].double()
        found.append((name, (direct, ours), float((got - expected).abs().max() / expected.abs().max())))
    return found


if __name__ == "__main__":
    main()
