"""ResNet-50 at 224 x 224 by each engine, a training step and an evaluation: CPU seconds of one thread, in turns.

    python -m benchmarks.engines [--batch 16] [--rounds 5] [--engines eager native] [--bf16]

CPU time, not time on the clock: other processes disturb it less. The first round is a warm-up.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cputrain.models.build import build_model
from cputrain.recipe.schema import ModelSection
from cputrain.training.engine import Engine, autocast, choose_engine, evaluation_network, prepare_model

SIDE, CLASSES = 224, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", default=["eager", "native"])
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    precision = "bf16" if options.bf16 else "float32"
    images = torch.randn(options.batch, 3, SIDE, SIDE).to(memory_format=torch.channels_last)
    taken: dict[str, dict[str, list[float]]] = {}
    contenders = {name: contender(name, precision, images) for name in options.engines}
    for _ in range(options.rounds + 1):
        for name, parts in contenders.items():
            for part, run in parts.items():
                started = time.thread_time()
                run()
                taken.setdefault(name, {}).setdefault(part, []).append(time.thread_time() - started)
    medians = {name: {part: statistics.median(s[1:]) for part, s in parts.items()} for name, parts in taken.items()}
    first = medians[options.engines[0]]
    print(f"| ResNet-50, {options.batch} images, {precision}, one thread | {' | '.join(first)} |")
    print("|---|" + "---|" * len(first))
    for name, parts in medians.items():
        print(f"| {name} | {' | '.join(f'{s:.2f} s ({first[part] / s:.2f})' for part, s in parts.items())} |")


def contender(name: str, precision: str, images: Tensor) -> dict[str, Callable[[], None]]:
    """What is timed of an engine, by its heading."""
    engine = choose_engine(name, precision, os.environ)
    network = prepare_model(build_model(ModelSection(name="resnet50"), CLASSES, SIDE), engine, precision)
    return {
        "training step": lambda: step(network, precision, images),
        "evaluation": lambda: evaluation(network, engine, precision, images),
    }


def step(network: nn.Module, precision: str, images: Tensor) -> None:
    with autocast(precision):
        outputs = network(images)
    cross_entropy(outputs.float(), torch.zeros(len(images), dtype=torch.long)).backward()
    for p in network.parameters():
        p.grad = None


def evaluation(network: nn.Module, engine: Engine, precision: str, images: Tensor) -> None:
    network.eval()
    with torch.inference_mode(), autocast(precision):
        evaluation_network(network, engine, precision)(images)
    network.train()


if __name__ == "__main__":
    main()
