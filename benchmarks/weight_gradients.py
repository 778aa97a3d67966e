"""The weight gradients of ResNet-50's convolutions in bfloat16, by oneDNN and by native kernels.

    python -m benchmarks.weight_gradients [--batch 16] [--rounds 9] [--threads 1]

Both take turns, layer by layer; milliseconds of all layers of a kind, medians over the rounds. oneDNN's are rounded to
bfloat16 and converted to float32, as in a training. Errors are the largest difference from float64, relative to the
largest value. The layer of three input channels, which stays with oneDNN, is left out.
"""

import argparse
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from cputrain.kernels.convolution import load_convolutions, native_weight_gradients
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.studies.bench.figures import interleaved, seconds_of

SIDE = 224
Shape = tuple[int, int, int, int, int]
"""Channels of the input and of the output, size of the kernel, stride, height of the input."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"| weight gradients, {options.batch} images, bf16 | layers | oneDNN, ms | native, ms | ratio | errors |")
    print("|---|---|---|---|---|---|")
    totals = [0.0, 0.0]
    for shape, layers in shapes().items():
        passes, errors = compared(shape, options.batch)
        runs = dict(enumerate(partial(seconds_of, one) for one in passes))
        with torch.no_grad():
            taken = [layers * 1000 * median(seconds) for seconds in interleaved(runs, options.rounds).values()]
        totals = [total + own for total, own in zip(totals, taken, strict=True)]
        inputs, outputs, kernel, stride, side = shape
        row = f"{inputs} to {outputs}, {kernel} x {kernel}, {side} x {side}{f', stride {stride}' * (stride > 1)}"
        off = ", ".join(f"{error:.0e}" for error in errors)
        print(f"| {row} | {layers} | {taken[0]:.1f} | {taken[1]:.1f} | {taken[0] / taken[1]:.2f} | {off} |", flush=True)
    print(f"| all | {shapes().total()} | {totals[0]:.1f} | {totals[1]:.1f} | {totals[0] / totals[1]:.2f} | |")


@torch.no_grad()
def shapes() -> Counter[Shape]:
    """Return the shapes of ResNet-50's convolutions that the kernels support, with the number of layers of each."""
    network, found = build_model(ModelSettings(name="resnet50"), 1000, SIDE).eval(), Counter[Shape]()

    def record(layer: nn.Conv2d, inputs: tuple[Tensor], _output: Tensor) -> None:
        shape = layer.in_channels, layer.out_channels, layer.kernel_size[0], layer.stride[0], inputs[0].shape[2]
        found[shape] += 1

    native_weight_gradients(network, load_convolutions(os.environ))
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and type(layer) is not nn.Conv2d:
            layer.register_forward_hook(record)
    network(torch.zeros(1, 3, SIDE, SIDE))
    return found


def compared(shape: Shape, batch: int) -> tuple[list[Callable[[], Tensor]], list[float]]:
    """Return a layer's weight gradient by oneDNN and by the kernels, and the errors of both."""
    inputs, outputs, size, step, side = shape
    stride, padding = (step, step), (size // 2, size // 2)
    generator = torch.Generator().manual_seed(1)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).bfloat16().to(memory_format=torch.channels_last)

    x, weight = random(batch, inputs, side, side), random(outputs, inputs, size, size)
    g = random(*torch.conv2d(x, weight, stride=stride, padding=padding).shape)
    kernels = load_convolutions(os.environ)

    def onednn(gradient: Tensor, images: Tensor, by: Tensor) -> Tensor:
        options = None, stride, padding, (1, 1), False, (0, 0), 1, (False, True, False)
        return torch.ops.aten.convolution_backward(gradient, images, by, *options)[1]

    passes = [
        lambda: onednn(g, x, weight).float(),
        lambda: kernels.direct_weight_gradient(x, g, weight, stride, padding),
    ]
    exact = onednn(g.double(), x.double(), weight.double())
    return passes, [float((one().double() - exact).abs().max() / exact.abs().max()) for one in passes]


if __name__ == "__main__":
    main()
