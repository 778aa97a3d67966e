"""CPU time and memory bandwidth of an optimizer step of bfloat16 weights with split master weights, beside torch's
float32 optimizers (fused, foreach).

python -m benchmarks.split_weights [--network vit_b_16] [--threads 1] [--rounds 9]

The bandwidth counts each value that a step must read or write once in a pass; that of a.add_(b) on float32 tensors of
the weights' size, in place as well, is what the cores can do. LARS and LAMB need norms before the update: LARS reads
weights and gradients twice; LAMB reads gradients twice (their size decides whether float32 holds the squares), and
weights and averages twice.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from cputrain import Lamb, Lars, optimize
from cputrain.models.vision import import_torchvision
from cputrain.studies.bench.figures import interleaved

Make = Callable[[list[nn.Parameter]], Optimizer]
# Name -> optimizer, bytes of its passes over a weight: 4 of it, 2 of its gradient, 4 of each float32 value of state.
OPTIMIZERS: dict[str, tuple[Make, int]] = {
    "SGD, momentum": (lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=5e-5), 4 + 2 + 4 + 8),
    "SGD, Nesterov": (lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=5e-5, nesterov=True), 4 + 2 + 4 + 8),
    "Adam": (lambda p: Adam(p, lr=1e-3), 4 + 2 + 4 + 16),
    "AdamW": (lambda p: AdamW(p, lr=1e-3, weight_decay=0.05), 4 + 2 + 4 + 16),
    "LARS": (lambda p: Lars(p, lr=1.0, weight_decay=5e-5), 6 + (4 + 2 + 4 + 8)),
    "LAMB": (lambda p: Lamb(p, lr=1e-3, weight_decay=0.01), 2 + (4 + 2 + 16) + (4 + 8 + 4)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="vit_b_16", help="of torchvision")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    build = partial(getattr(import_torchvision("models"), options.network), weights=None)
    count = sum(p.numel() for p in build().parameters())
    a, b = torch.ones(count), torch.ones(count)
    peak = 12 * count / median(interleaved({"add": lambda: cpu_seconds(lambda: a.add_(b))}, 5)["add"])
    print(f"{options.network}, {count / 1e6:.1f} million weights, a.add_(b): {peak / 1e9:.1f} GB/s of a core\n")
    print("| optimizer | split, ms | GB/s, of a.add_(b)'s | float32 fused / split | float32 foreach / split |")
    print("|---|---|---|---|---|")
    for name, (make, count_bytes) in OPTIMIZERS.items():
        steps = {"split": split_step(build(), make)}
        for kind in ("fused", "foreach") if name[0] != "L" else ("float32",):
            steps[kind] = float32_step(build(), make, kind)
        taken = {
            each: median(seconds)
            for each, seconds in interleaved(
                {each: partial(cpu_seconds, step) for each, step in steps.items()}, options.rounds
            ).items()
        }
        rate = count * count_bytes / taken["split"]
        ratios = [f"{taken[kind] / taken['split']:.2f}" if kind in taken else "" for kind in ("fused", "foreach")]
        if "float32" in taken:
            ratios[0] = f"{taken['float32'] / taken['split']:.2f} (ours, float32)"
        print(f"| {name} | {1e3 * taken['split']:.1f} | {rate / 1e9:.1f}, {rate / peak:.2f} | {' | '.join(ratios)} |")


def cpu_seconds(step: Callable[[], object]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def split_step(network: nn.Module, make: Make) -> Callable[[], object]:
    _, optimizer = optimize(network, make(list(network.parameters())), dtype=torch.bfloat16, master_weights="split")
    return with_gradients(network, optimizer)


def float32_step(network: nn.Module, make: Make, kind: str) -> Callable[[], object]:
    optimizer = make(list(network.parameters()))
    for group in optimizer.param_groups:
        group.update({"fused": kind == "fused", "foreach": kind == "foreach"} if kind != "float32" else {})
    return with_gradients(network, optimizer)


def with_gradients(network: nn.Module, optimizer: Optimizer) -> Callable[[], object]:
    for weight in network.parameters():
        weight.grad = 1e-3 * torch.randn_like(weight)
    optimizer.step()  # creates the state
    return optimizer.step


if __name__ == "__main__":
    main()
