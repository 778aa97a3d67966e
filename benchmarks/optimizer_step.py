"""Milliseconds of an optimizer step on ResNet-50's parameters: cputrain, torch's SGD, and timm's Lars if installed.

python -m benchmarks.optimizer_step [--rounds 15]
"""

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.optim import Optimizer

from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.models.vision import import_torchvision
from cputrain.optim import build_optimizer, set_lr_and_decay
from cputrain.optim_settings import OptimSettings
from cputrain.studies.bench.figures import interleaved, seconds_of
from cputrain.training.engine import choose_engine, prepare_model

Make = Callable[[torch.nn.Module], Optimizer]

EAGER = choose_engine("eager", "float32", {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    contenders: dict[str, Make] = {
        "torch SGD, fused": lambda model: build_optimizer(model, OptimSettings()),
        "torch SGD, foreach": lambda model: torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, foreach=True
        ),
        "ours, caffe": lambda model: build_optimizer(model, OptimSettings(name="lars", lars_variant="caffe")),
        "ours, timm": lambda model: build_optimizer(model, OptimSettings(name="lars", lars_variant="timm")),
        "ours, nus": lambda model: build_optimizer(model, OptimSettings(name="lars", lars_variant="nus")),
        "ours, caffe, Nesterov": lambda model: build_optimizer(model, OptimSettings(name="lars", nesterov=True)),
        **by_timm(),
    }
    runs = {name: partial(seconds_of, step_of(make)) for name, make in contenders.items()}
    taken = interleaved(runs, options.rounds)
    fused = median(taken["torch SGD, fused"])
    print("| one thread | ms | to fused SGD |")
    print("|---|---|---|")
    for name, seconds in taken.items():
        print(f"| {name} | {1000 * median(seconds):.1f} | {median(seconds) / fused:.2f} |")


def step_of(make: Make) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = prepare_model(build_model(ModelSettings(name="resnet50"), 1000, 224), EAGER, "float32")
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    optimizer = make(model)
    for group in optimizer.param_groups:
        group.setdefault("decays", True)  # missing in torch's and timm's optimizers
    set_lr_and_decay(optimizer, 0.1, 5e-5)
    optimizer.step()  # creates the state
    return optimizer.step


def by_timm() -> dict[str, Make]:
    import_torchvision("models")  # required by timm; it does not import by itself beside a CPU build of torch
    try:
        lars: Any = importlib.import_module("timm.optim").Lars
    except ImportError:
        return {}
    return {"timm's Lars": lambda model: lars(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)}


if __name__ == "__main__":
    main()
