"""Steps of twelve networks: torch's operators and ours, with no changed line and with `cputrain.optimize`.

python -m benchmarks.networks [NETWORK...] [--batch 8] [--size 224] [--threads 2] [--rounds 5]

Each network of torchvision trains by SGD with momentum on random images, as an expert's script does (channels-last), in
float32 and in bfloat16 (autocast). A round makes a step each way, in turns in one process, so that the machine's
neighbors disturb all alike; the ratios are of medians. Run it with tcmalloc or jemalloc preloaded, as `cputrain launch`
does, and without other programs.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import geometric_mean, median

import torch
from torch import nn
from torch.nn import functional

import cputrain
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import processor_text
from cputrain.models.vision import import_torchvision

NETWORKS = (
    *("resnet50", "resnet18", "vgg16_bn", "densenet121", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0"),
    *("convnext_tiny", "resnext50_32x4d", "regnet_y_1_6gf", "vit_b_16", "swin_t"),
)
TYPES = (torch.float32, torch.bfloat16)
WAYS = ("expert", "kernels", "kernels + optimize")


@dataclass(frozen=True)
class Training:
    """A network and its optimizer, and how a step is computed."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    kernels: bool


def trainings(name: str, dtype: torch.dtype, images: torch.Tensor) -> dict[str, Training]:
    """Return the network's training in each way, from the same weights."""
    torch.manual_seed(1)
    first = getattr(import_torchvision("models"), name)().to(memory_format=torch.channels_last)
    made = {}
    for way in WAYS:
        network = copy.deepcopy(first)
        optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
        if way == WAYS[2]:
            network, optimizer = cputrain.optimize(network, optimizer, dtype=dtype, sample_input=images)
        made[way] = Training(network, optimizer, kernels=way != WAYS[0])
    return made


def step(training: Training, images: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype) -> float:
    """Train a step; return its seconds."""
    (cputrain.kernels.enable if training.kernels else cputrain.kernels.disable)()
    started = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = functional.cross_entropy(training.network(images), labels)
    training.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    training.optimizer.step()
    return time.perf_counter() - started


def medians(ways: dict[str, Training], rounds: int, step_of: Callable[[Training], float]) -> dict[str, float]:
    """Return the median step of each way; the first round, which compiles and allocates, is left out."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, training in ways.items():
            value = step_of(training)
            if number:
                seconds[way].append(value)
    return {way: median(values) for way, values in seconds.items()}


def main() -> None:
    """Print a table for each type, a row for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    for option, default in (("--batch", 8), ("--size", 224), ("--threads", 2), ("--rounds", 5)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images = torch.randn(options.batch, 3, options.size, options.size).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (options.batch,))
    print(f"{processor_text(this_machine())}\n")
    print(f"{options.batch} images of {options.size} x {options.size}, {options.threads} threads, s a step\n")
    print(f"| network | type | {' | '.join(WAYS)} | times as fast: kernels | + optimize |")
    print("|---" * (len(WAYS) + 4) + "|")
    for dtype in TYPES:
        word = str(dtype).removeprefix("torch.")
        if options.dtype and word not in options.dtype:
            continue
        gains: list[list[float]] = []
        for name in options.networks:
            found = medians(
                trainings(name, dtype, images),
                options.rounds,
                lambda training, dtype=dtype: step(training, images, labels, dtype),  # type: ignore[misc]
            )
            gains.append([found[WAYS[0]] / found[way] for way in WAYS[1:]])
            figures = " | ".join([*(f"{found[way]:.3f}" for way in WAYS), *(f"{gain:.2f}" for gain in gains[-1])])
            print(f"| {name} | {word} | {figures} |", flush=True)
        means = " | ".join(f"{geometric_mean(gain):.2f}" for gain in zip(*gains, strict=True))
        print(f"| geometric mean | {word} | | | | {means} |", flush=True)


if __name__ == "__main__":
    main()
