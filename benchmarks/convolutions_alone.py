"""Lower limit of a training step: ResNet-50's convolutions alone, by oneDNN, forward and backward.

    python -m benchmarks.convolutions_alone --batch 16 --steps 4 [--threads 1] [--bf16]

Prints the median seconds of a pass over all layers. Under torchrun the processes compute at the same time, with one
core each.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn

from cputrain.models.vision import import_torchvision

SIDE = 224


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A layer with its input and its output's gradient; the first layer's input needs no gradient."""

    layer: nn.Conv2d
    images: Tensor
    gradient: Tensor
    first: bool

    def forward(self) -> Tensor:
        layer = self.layer
        return nn.functional.conv2d(self.images, layer.weight, None, layer.stride, layer.padding, 1, layer.groups)

    def backward(self) -> None:
        layer = self.layer
        geometry = (layer.stride, layer.padding, (1, 1), False, (0, 0), layer.groups)
        mask = (not self.first, True, False)
        torch.ops.aten.convolution_backward(self.gradient, self.images, layer.weight, None, *geometry, mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    layers = convolutions(options.batch, torch.bfloat16 if options.bf16 else torch.float32)
    seconds = []
    with torch.no_grad():
        for _ in range(options.steps + 1):
            if distributed:
                dist.barrier()
            started = time.perf_counter()
            for layer in layers:
                layer.forward()
            for layer in reversed(layers):
                layer.backward()
            seconds.append(time.perf_counter() - started)
    if not distributed or dist.get_rank() == 0:
        print(statistics.median(seconds[1:]))
    if distributed:
        dist.destroy_process_group()


def convolutions(batch: int, dtype: torch.dtype) -> list[Convolution]:
    """Return all convolutions in order, with inputs of their sizes."""
    network = import_torchvision("models").resnet50().to(memory_format=torch.channels_last)
    made: list[Convolution] = []

    def record(layer: nn.Conv2d, inputs: tuple[Tensor], output: Tensor) -> None:
        images, gradient = (
            torch.rand(batch, *each.shape[1:]).to(dtype=dtype, memory_format=torch.channels_last)
            for each in (inputs[0], output)
        )
        made.append(Convolution(layer=layer, images=images, gradient=gradient, first=not made))

    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    hooks = [layer.register_forward_hook(record) for layer in layers]  # type: ignore[arg-type]
    with torch.no_grad():
        network(torch.zeros(1, 3, SIDE, SIDE))
    for hook in hooks:
        hook.remove()
    network.to(dtype)
    return made


if __name__ == "__main__":
    main()
