"""The gradients of a whole network by direct and by Winograd's convolutions, each against float64.

    python -m benchmarks.gradients [--model resnet50] [--images 8] [--size 224] [--seeds 5]

One backward pass of the first weights over random images. The error of a layer is the norm of its weight gradient's
difference from float64, in units of the norm of float64's; medians over the seeds. Where rounding moves a value across
ReLU's zero, its gradient appears or disappears whole, so that a deep network's errors are far above rounding with any
algorithm. Winograd computes all layers that it can, whatever is faster here.
"""

import argparse
import copy
import os
from statistics import median

import torch
from torch import Tensor, nn

from cputrain.models import build_model, load_winograd, use_winograd
from cputrain.recipe import ModelSection

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
    """The error of each parameter's gradient, by algorithm and precision."""
    torch.manual_seed(seed)
    network = build_model(ModelSection(name=model), CLASSES, size)
    images = torch.randn(count, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (count,))
    exact = gradients(copy.deepcopy(network).double(), images.double(), labels, torch.float64)
    fast = copy.deepcopy(network)
    use_winograd(fast, load_winograd(os.environ))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, computed in (("direct", network), ("Winograd", fast)):
            got = gradients(copy.deepcopy(computed), images, labels, dtype)
            off = [float((got[one].double() - value).norm() / value.norm()) for one, value in exact.items()]
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = off
    return found


def gradients(network: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> Gradients:
    """Each parameter's gradient of the mean cross-entropy, computed in `dtype`."""
    network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = network(images)
    nn.functional.cross_entropy(outputs.to(images.dtype), labels).backward()
    return {name: one.grad for name, one in network.named_parameters() if one.grad is not None}


if __name__ == "__main__":
    main()
