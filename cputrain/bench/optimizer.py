"""An optimizer's step on ResNet-50's weights, in bytes/s that it moves, beside those of a triad on as many threads."""

import time
from collections.abc import Callable

import torch
from torch import nn

from affinity.topology.machine import Machine
from affinity.wording import counted
from cputrain.bench.figures import Figure, Report, figure_of, interleaved, number, spread_of
from cputrain.bench.memory import GB, LEAST_BYTES, STREAMS, TEST_BYTES
from cputrain.models.build import build_model
from cputrain.optim.build import build_optimizer, set_lr_and_decay
from cputrain.recipe.schema import ModelSection, OptimSection
from cputrain.simulate.setup import optimizer_passes

OPTIMIZERS = ("momentum", "lars", "adam")
NETWORK, TEST_NETWORK = "resnet50", "lenet"
BYTES = 4


def bench_optimizer(machine: Machine, *, repeats: int, quick: bool) -> Report:
    """Steps of each optimizer, on one thread and on one for each core."""
    name = TEST_NETWORK if quick else NETWORK
    model = build_model(ModelSection(name=name), 1000, 64).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    size = BYTES * sum(parameter.numel() for parameter in model.parameters())
    before, figures = torch.get_num_threads(), []
    for threads in sorted({1, len(machine.allowed_cores)}):
        torch.set_num_threads(threads)
        figures += _figures(model, size, threads, repeats, quick=quick)
    torch.set_num_threads(before)
    title = f"optimizer steps on {name}'s {size / 1e6:.0f} MB of weights, {counted(repeats, 'repeat')}"
    return Report(title=title, figures=tuple(figures))


def _figures(model: nn.Module, size: int, threads: int, repeats: int, *, quick: bool) -> list[Figure]:
    runs: dict[str, Callable[[], float]] = {name: _step(model, name) for name in OPTIMIZERS}
    array = TEST_BYTES if quick else LEAST_BYTES
    found = interleaved({**runs, "triad": _triad(array)}, repeats)
    limit = STREAMS["triad"] * array / spread_of(found["triad"])[0] / GB
    return [
        figure_of(
            f"{name}, {counted(threads, 'thread')}",
            [optimizer_passes(name) * size / seconds / GB for seconds in found[name]],
            "GB/s",
            limit=limit,
            limited_by=f"triad, {counted(threads, 'thread')}",
            note=f"{number(1e3 * spread_of(found[name])[0])} ms",
        )
        for name in OPTIMIZERS
    ]


def _step(model: nn.Module, name: str) -> Callable[[], float]:
    optimizer = build_optimizer(model, OptimSection(name=name))  # type: ignore[arg-type]
    set_lr_and_decay(optimizer, 1e-4, 5e-5)
    return lambda: _seconds(optimizer.step)


def _triad(size: int) -> Callable[[], float]:
    a, b, c = (torch.full((size // BYTES,), value) for value in (1.0, 2.0, 3.0))
    return lambda: _seconds(lambda: torch.add(b, c, alpha=3.0, out=a))


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
