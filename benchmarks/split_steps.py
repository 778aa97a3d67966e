"""Whole steps with split master weights, beside the same steps under autocast, in bfloat16.

python -m benchmarks.split_steps [NETWORK...] [--batch 8] [--size 224] [--threads 2] [--rounds 7]

Each network (of torchvision, or bert: BERT-base's size) trains from the same weights, in turns in one process: by
torch's operators; with `cputrain.optimize` and the kernels below torch's operators; the same with split master weights.
The ratios are of medians. Run it with tcmalloc or jemalloc preloaded, and without other programs.
"""

import argparse
from functools import partial
from statistics import median
from typing import Any

import torch

import cputrain
from benchmarks.ipex import SENTENCE, step, task
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import processor_text
from cputrain.studies.bench.figures import interleaved

NETWORKS = ("vit_b_16", "swin_t", "bert")
WAYS: dict[str, dict[str, Any] | None] = {
    "torch": None,
    "optimized": {"dtype": torch.bfloat16},
    "split": {"dtype": torch.bfloat16, "master_weights": "split"},
}
"""How `cputrain.optimize` is called; None: it is not."""


def step_of(trained: tuple[Any, ...], *, kernels: bool) -> float:
    """Return the seconds of a step, with kernels below torch's operators or without."""
    (cputrain.kernels.enable if kernels else cputrain.kernels.disable)()
    return step(*trained, bf16=True)


def main() -> None:
    """Print a row for each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, metavar="NETWORK")
    for option, default in (("--batch", 8), ("--size", 224), ("--threads", 2), ("--rounds", 7)):
        parser.add_argument(option, type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{processor_text(this_machine())}\n")
    images = f"{options.batch} images of {options.size} x {options.size}, or sentences of {SENTENCE} words"
    print(f"{images}, {options.threads} threads, seconds a step\n")
    print(f"| network | {' | '.join(WAYS)} | torch / split | optimized / split |")
    print("|---" * (len(WAYS) + 3) + "|")
    for name in options.networks:
        runs = {}
        for way, arguments in WAYS.items():
            network, optimizer, *samples = task(name, options.batch, options.size)
            if arguments is not None:
                network, optimizer = cputrain.optimize(network, optimizer, **arguments)
            runs[way] = partial(step_of, (network, optimizer, *samples), kernels=arguments is not None)
        taken = {way: median(values) for way, values in interleaved(runs, options.rounds).items()}
        ratios = (taken["torch"] / taken["split"], taken["optimized"] / taken["split"])
        figures = " | ".join([*(f"{value:.3f}" for value in taken.values()), *(f"{ratio:.2f}" for ratio in ratios)])
        print(f"| {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
