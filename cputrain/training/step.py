"""One training step: forward and backward passes, all-reduce of the gradients, update of the weights."""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.data.batches import Batch
from cputrain.optim.build import set_lr_and_decay
from cputrain.optim.ratios import layer_ratios
from cputrain.recipe.schema import Recipe
from cputrain.training.engine import autocast
from cputrain.training.metrics import EpochMetrics, StepResult, count_correct
from cputrain.training.state import TrainState
from cputrain.training.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The settings of one step: images of all ranks, backward passes of each rank, and the optimizer's rates.

    `measure_layers` requests each layer's norms; `key`, the same for no other step of any rank, is what random numbers
    of the step depend on.
    """

    images: int
    passes: int
    lr: float
    weight_decay: float
    measure_layers: bool = False
    key: tuple[int, ...] = ()


@dataclass(slots=True)
class AccumulatedGradients:
    """Totals over a step's backward passes, whose gradients are added up over ranks; `inputs` are the last pass's.

    `images` counts damaged images, too.
    """

    data_wait_s: float = 0.0
    comm_wait_s: float = 0.0
    images: int = 0
    metrics: EpochMetrics = field(default_factory=EpochMetrics)
    inputs: Any = None

    @property
    def loss(self) -> float:
        """The mean loss over this rank's images."""
        return self.metrics.loss / self.images


def train_step(
    state: TrainState,
    batches: Iterator[Batch],
    settings: StepSettings,
    recipe: Recipe,
    task: Task,
) -> StepResult:
    """Update the weights once with the next `settings.passes` batches, unless the gradients contain NaN or Inf."""
    network, optimizer = state.network, state.optimizer
    buffers = [buffer.clone() for buffer in network.buffers()] if recipe.on_nan == "skip" else []
    accumulated = _accumulate_gradients(state, batches, settings, recipe, task)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in trained if p.grad is not None]
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)), dtype=torch.float64))
    finite, non_finite, ratios = math.isfinite(norm), "", []
    metrics = accumulated.metrics if finite else EpochMetrics(damaged=accumulated.metrics.damaged)
    set_lr_and_decay(optimizer, settings.lr, settings.weight_decay)
    if finite:
        if recipe.optim.clip_norm is not None and norm > recipe.optim.clip_norm:
            torch._foreach_mul_(gradients, recipe.optim.clip_norm / norm)
        if settings.measure_layers:
            ratios = layer_ratios(network, optimizer)
        optimizer.step()
        state.update_ema(recipe.ema_decay)
    else:
        with autocast(recipe.precision):
            non_finite = _find_non_finite(network, accumulated.inputs, accumulated.loss)
        state.all_reduce.reset()
        for saved, current in zip(buffers, network.buffers(), strict=False):  # saved with on_nan=skip only
            current.copy_(saved)
    for p in trained:  # as optimizer.zero_grad() does, without its profiling and its loops over groups
        p.grad = None
    return StepResult(
        loss=accumulated.loss,
        data_wait_s=accumulated.data_wait_s,
        comm_wait_s=accumulated.comm_wait_s,
        metrics=metrics,
        finite=finite,
        non_finite=non_finite,
        layer_ratios=tuple(ratios),
    )


def _accumulate_gradients(
    state: TrainState,
    batches: Iterator[Batch],
    settings: StepSettings,
    recipe: Recipe,
    task: Task,
) -> AccumulatedGradients:
    """Add up the gradients of the next batches over the ranks; a loss of NaN or Inf makes all of them NaN."""
    total = AccumulatedGradients()
    for number in range(settings.passes):
        requested = time.perf_counter()
        batch = next(batches)
        total.data_wait_s += time.perf_counter() - requested
        total.inputs, targets = task.inputs(batch), batch.labels
        if task.mix is not None:
            total.inputs, targets = task.mix(total.inputs, targets, (*settings.key, number))
        with nullcontext() if number == settings.passes - 1 else state.ddp.no_sync():
            with autocast(recipe.precision):
                outputs = state.ddp(total.inputs)
            losses = task.losses(outputs, targets, recipe.label_smoothing) * batch.weights
            summed = losses.sum()
            loss = float(summed.detach())
            # Divided by the images of all ranks: in the sum over the ranks, every image has the same weight, whatever
            # its rank's batch; a damaged image adds 0.
            share = summed / settings.images
            (share if math.isfinite(loss) else share * math.nan).backward()  # type: ignore[no-untyped-call]
        total.comm_wait_s = time.perf_counter() - state.all_reduce.last_ready_s
        total.images += len(batch.weights)
        correct = count_correct(outputs.detach(), targets, batch.weights, 1) if task.classifies else 0.0
        total.metrics.add(EpochMetrics(loss, correct, float(batch.weights.sum()), list(batch.damaged)))
    return total


@torch.no_grad()
def _find_non_finite(network: nn.Module, inputs: Any, loss: float) -> str:
    """Describe the first layer whose output contains NaN or Inf; "" if only the gradients do."""
    layers: list[str] = []

    def check(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                layers.append(name)

        return hook

    leaves = [(name, module) for name, module in network.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(check(name)) for name, module in leaves]
    try:
        network(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if layers:
        return f"first NaN or Inf in the output of {layers[0]}"
    return "" if math.isfinite(loss) else "the outputs of all layers are finite"
