"""ResNet-50's 1 x 1 layers as convolutions of oneDNN and as matrix products, forward and backward, on one thread.

    python -m benchmarks.pointwise [--batch 16] [--rounds 9] [--bf16]

Both take turns, layer by layer; CPU milliseconds of all layers of a kind, medians over the rounds. oneDNN reorders the
convolutions' weights in each pass, as in a training.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import nn

from cputrain.kernels.convolution import has_amx, pointwise_as_matmul
from cputrain.models.vision import import_torchvision
from cputrain.studies.bench.figures import interleaved, seconds_of

SIDE = 224
Shape = tuple[int, int, int, int]
"""Channels of the input and of the output, stride, height of the input."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    precision = "bf16" if options.bf16 else "float32"
    print(f"AMX: {'yes' if has_amx() else 'no'}")
    print(f"| 1 x 1 layers, {options.batch} images, {precision} | layers | convolutions, ms | products, ms | ratio |")
    print("|---|---|---|---|---|")
    totals = [0.0, 0.0]
    for shape, layers in pointwise_layers().items():
        taken = [layers * 1000 * seconds for seconds in compared(shape, options.batch, options.rounds, options.bf16)]
        totals = [total + own for total, own in zip(totals, taken, strict=True)]
        inputs, outputs, stride, side = shape
        print_row(f"{inputs} to {outputs}, {side} x {side}" + f", stride {stride}" * (stride > 1), layers, taken)
    print_row("all", sum(pointwise_layers().values()), totals)


def print_row(name: str, layers: int, taken: list[float]) -> None:
    conv, product = taken
    print(f"| {name} | {layers} | {conv:.1f} | {product:.1f} | {product / conv:.2f} |")


def pointwise_layers() -> Counter[Shape]:
    """Return the number of 1 x 1 layers of each shape in ResNet-50."""
    network = import_torchvision("models").resnet50()
    found: Counter[Shape] = Counter()

    def record(layer: nn.Conv2d, inputs: tuple[torch.Tensor], _output: torch.Tensor) -> None:
        found[layer.in_channels, layer.out_channels, layer.stride[0], inputs[0].shape[2]] += 1

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
            layer.register_forward_hook(record)
    with torch.device("meta"):
        network.to("meta")(torch.empty(1, 3, SIDE, SIDE))
    return found


def compared(shape: Shape, batch: int, rounds: int, bf16: bool) -> tuple[float, float]:
    """Return the median CPU seconds of a forward and backward pass, as a convolution and as a matrix product."""
    inputs, outputs, stride, side = shape
    images = torch.randn(batch, inputs, side, side).to(memory_format=torch.channels_last)
    dtype = torch.bfloat16 if bf16 else torch.float32
    images = images.to(dtype).requires_grad_()
    passes: dict[str, Callable[[], float]] = {}
    for product in (False, True):
        layer = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False).to(memory_format=torch.channels_last)
        if product:
            holder = nn.Sequential(layer)
            pointwise_as_matmul(holder)
        gradient = torch.randn_like(layer(images.float())).to(dtype)
        run = partial(one_pass, layer, images, gradient, bf16)
        passes["product" if product else "convolution"] = partial(seconds_of, run, time.thread_time)
    conv, product_s = map(median, interleaved(passes, rounds).values())
    return conv, product_s


def one_pass(layer: nn.Module, images: torch.Tensor, gradient: torch.Tensor, bf16: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        outputs = layer(images)
    torch.autograd.grad(outputs, [images, *layer.parameters()], gradient)


if __name__ == "__main__":
    main()
