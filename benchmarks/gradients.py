"""Gradients of a whole network with direct and with Winograd convolutions, each compared to float64.

    python -m benchmarks.gradients [--model resnet50] [--images 8] [--size 224] [--seeds 5]

One backward pass of the initial weights over random images. The error of a layer is the norm of its weight gradient's
difference from float64, relative to the norm in float64; medians over the seeds. If rounding moves a value across
ReLU's zero, its whole gradient appears or disappears, so that a deep network's errors are far above rounding with any
algorithm. Winograd computes every layer that it can, even if it is slower here.
"""

import argparse
import copy
import os
from statistics import median

import torch
from torch import Tensor, nn

from cputrain.kernels.convolution import load_convolutions, use_winograd
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings

CLASSES = 1000
Gradients = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    seeds = [errors(options.model, options.images, options.size, seed) for seed in range(1, options.seeds + 1)]
    print(f"| relative error of gradients, {options.model}, {options.images} images | {' | '.join(seeds[0])} |")
    print("|---|" + "---|" * len(seeds[0]))
    for name, of_all in (("median", median), ("largest", max)):
        columns = [median(of_all(seed[column]) for seed in seeds) for column in seeds[0]]
        print(f"| {name} of all parameters | {' | '.join(f'{error:.1e}' for error in columns)} |")


def errors(model: str, count: int, size: int, seed: int) -> dict[str, list[float]]:
    """Return the error of each parameter's gradient, by algorithm and precision."""
    torch.manual_seed(seed)
    network = build_model(ModelSettings(name=model), CLASSES, size)
    images = torch.randn(count, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (count,))
    exact = gradients(copy.deepcopy(network).double(), images.double(), labels, torch.float64)
    fast = copy.deepcopy(network)
    use_winograd(fast, load_convolutions(os.environ))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, computed in (("direct", network), ("Winograd", fast)):
            got = gradients(copy.deepcopy(computed), images, labels, dtype)
            off = [float((got[one].double() - value).norm() / value.norm()) for one, value in exact.items()]
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = off
    return found


def gradients(network: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> Gradients:
    """Return each parameter's gradient of the mean cross-entropy, computed in `dtype`."""
    network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = network(images)
    nn.functional.cross_entropy(outputs.to(images.dtype), labels).backward()
    return {name: one.grad for name, one in network.named_parameters() if one.grad is not None}


if __name__ == "__main__":
    main()
