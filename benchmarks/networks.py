"""Steps of any network: torch's operators, torch.compile, our kernels, `cputrain.optimize`, split weights, IPEX.

python -m benchmarks.networks [NETWORK...] [--dtype bfloat16] [--way kernels ...] [--batch 8] [--size 224] [--threads 2]
    [--rounds 5]

Each network (of torchvision, or bert: BERT-base's size) trains on random samples as an expert's script does
(channels-last), by the optimizer that its users choose, in float32 and in bfloat16 (autocast), each way from the same
weights. A round makes two steps each way, in turns, so that the machine's neighbors disturb all alike; the second one
counts, as the first finds other processes' memory in the caches; the ratios are of medians. IPEX 2.8, if `.ipex` has it
(`make test-ipex`), trains in a process of its own; its mean is of the networks that it trains. Run it with tcmalloc or
jemalloc preloaded, as `cputrain launch` does, and without other programs.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import isnan, nan
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch

import cputrain
from benchmarks.ipex import SENTENCE, TORCH_S, Process, step, task
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import processor_text
from cputrain.studies.bench.figures import interleaved

NETWORKS = (
    *("resnet50", "resnet18", "vgg16_bn", "densenet121", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0"),
    *("convnext_tiny", "resnext50_32x4d", "regnet_y_1_6gf", "vit_b_16", "swin_t"),
)
EXPERT, COMPILE, KERNELS, OPTIMIZE, SPLIT, IPEX = "expert", "compile", "kernels", "optimize", "split", "ipex"
"""Ways: by torch's operators; by torch.compile; by the kernels below torch's operators, no changed line; by these
and `cputrain.optimize`; by these and split master weights, in bfloat16; by IPEX's `optimize`."""
WAYS = (EXPERT, COMPILE, KERNELS, OPTIMIZE, SPLIT, IPEX)


def with_kernels(run: Callable[[], float], *, kernels: bool) -> float:
    """Call the function twice, with kernels below torch's operators or without; return its second value."""
    (cputrain.kernels.enable if kernels else cputrain.kernels.disable)()
    run()
    return run()


def training(name: str, way: str, dtype: torch.dtype, options: argparse.Namespace) -> Callable[[], float]:
    """Return what makes a step of a network that is trained in this process, in one of the ways."""
    network, optimizer, *samples = task(name, options.batch, options.size)
    if way in (OPTIMIZE, SPLIT):
        more: dict[str, Any] = {"master_weights": "split"} if way == SPLIT else {}
        network, optimizer = cputrain.optimize(network, optimizer, dtype=dtype, sample_input=samples[0], **more)
    elif way == COMPILE:
        network = torch.compile(network)  # type: ignore[assignment]
    a_step = partial(step, network, optimizer, *samples, bf16=dtype == torch.bfloat16)
    return partial(with_kernels, a_step, kernels=way in (KERNELS, OPTIMIZE, SPLIT))


def original_step(original: Process, case: str) -> float:
    """Return the seconds of the second of two steps with IPEX, nan if it has failed."""
    try:
        original.step(case)
        return original.step(case)
    except (SystemExit, BrokenPipeError):
        return nan


def row(name: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of a step in each way, nan if IPEX fails."""
    ways = [way for way in options.way if way != SPLIT or dtype == torch.bfloat16]
    runs = {way: training(name, way, dtype, options) for way in ways if way != IPEX}
    with ExitStack() as stack:
        if IPEX in ways:
            original = stack.enter_context(Process(options.original, options, **TORCH_S))
            runs[IPEX] = partial(original_step, original, f"{name}:{word_of(dtype)}")
        return {way: median(seconds) for way, seconds in interleaved(runs, options.rounds).items()}


def word_of(dtype: torch.dtype) -> str:
    """Return the name of a type."""
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Print a row for each type and network, and the geometric mean of each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, metavar="NETWORK")
    for option, default in (("--batch", 8), ("--size", 224), ("--threads", 2), ("--rounds", 5)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--way", choices=WAYS, action="append", help="beside the expert's; all, if none is named")
    parser.add_argument("--original", default=".ipex/bin/python", metavar="PYTHON", help="a Python that has IPEX 2.8")
    options = parser.parse_args()
    options.way = [way for way in WAYS if way == EXPERT or way in (options.way or WAYS)]
    if not Path(options.original).exists() and IPEX in options.way:
        options.way.remove(IPEX)
    torch.set_num_threads(options.threads)
    images = f"{options.batch} images of {options.size} x {options.size}, or sentences of {SENTENCE} words"
    print(f"{processor_text(this_machine())}\n")
    print(f"{images}, {options.threads} threads\n")
    print(f"| network | type | expert, s a step | {' | '.join(options.way[1:])}, times as fast |")
    print("|---" * (len(options.way) + 2) + "|")
    for dtype in map(partial(getattr, torch), options.dtype or ["float32", "bfloat16"]):
        gains: dict[str, list[float]] = defaultdict(list)
        for name in options.networks:
            found = row(name, dtype, options)
            texts = []
            for way in options.way[1:]:
                gain = found[EXPERT] / found[way] if way in found else nan
                texts.append("" if way not in found else "fails" if isnan(gain) else f"{gain:.2f}")
                if not isnan(gain):
                    gains[way].append(gain)
            print(f"| {name} | {word_of(dtype)} | {found[EXPERT]:.3f} | {' | '.join(texts)} |", flush=True)
        means = (f"{geometric_mean(gains[way]):.2f}" if gains[way] else "" for way in options.way[1:])
        print(f"| geometric mean | {word_of(dtype)} | | {' | '.join(means)} |", flush=True)


if __name__ == "__main__":
    main()
