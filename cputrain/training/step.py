"""Training step: forward, backward and update, and the results of steps, evaluations and trainings."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.data.loader import Batch
from cputrain.kernels.evidence import random_numbers_kept
from cputrain.optim import layer_ratios, set_lr_and_decay
from cputrain.training.engine import autocast
from cputrain.training.state import TrainState, copies_of_buffers, restore_buffers, share_buffers
from cputrain.training.task import Task


@dataclass(slots=True)
class EpochMetrics:
    """One rank's sums over the images of an epoch or a step: losses, correct predictions, readable images.

    `damaged` has the names of images that could not be read.
    """

    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0
    damaged: list[str] = field(default_factory=list)

    def add(self, other: "EpochMetrics") -> None:
        """Add another rank's or step's sums and names."""
        self.loss += other.loss
        self.correct += other.correct
        self.images += other.images
        self.damaged += other.damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step on one rank: mean loss, seconds spent waiting for images and for gradients, sums over images.

    `loss` is of this rank's images only. `finite` is the same on all ranks. If it is False, nothing was updated,
    `metrics` counts no images, and `non_finite` describes where NaN or Inf arose on this rank ("" if not in its
    outputs). `layer_ratios` has the layers' norms, if requested.
    """

    loss: float
    data_wait_s: float
    comm_wait_s: float
    metrics: EpochMetrics
    finite: bool
    non_finite: str
    layer_ratios: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Mean loss, top-1 and top-5 in percent and number of images over all ranks; `damaged` has only this rank's images.

    top1 and top5 are None if the data has no classes; without images they are None and the loss is NaN.
    """

    loss: float
    top1: float | None
    top5: float | None
    images: int
    damaged: tuple[str, ...]

    @property
    def score(self) -> float:
        """Score that selects the best checkpoint, higher is better: top-1, or -loss if the data has no classes."""
        return -self.loss if self.top1 is None else self.top1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of a training: completed steps, and accuracies on validation and test images.

    `accuracy` is None after a preemption, `test` also without test images. `trained_s` is the time of all steps since
    this start, in seconds; `ended` is the time before the test images were evaluated. `ends_by`: see Preemption.
    """

    accuracy: Accuracy | None
    test: Accuracy | None
    step: int
    trained_s: float
    ended: dict[str, float]
    ends_by: int = 0


def count_correct(outputs: Tensor, labels: Tensor, weights: Tensor, k: int) -> float:
    """Count the images whose label is among the k largest outputs, each with weight 1 or 0.

    Labels are class indices (N,), or for mixed images class probabilities (N, outputs); a mixed image counts as the sum
    of the probabilities of the k classes.
    """
    if labels.ndim == 2:
        shares = labels.gather(1, outputs.topk(min(k, outputs.shape[1]), dim=1).indices).sum(dim=1)
        return float((shares * weights).sum())
    return float((topk_hits(outputs, labels, k) * weights).sum())


def topk_hits(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return 1.0 for each label that is among the k largest of its row of logits (N, classes), else 0.0; shape (N,)."""
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels[:, None]).any(dim=1).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of one step: images of all ranks, backward passes of each rank, learning rate and weight decay.

    `clip_norm` is the largest norm of the gradient. `skips_non_finite`: the training goes on after a step without an
    update, which then must not have changed buffers either. `measure_layers` requests each layer's norms; `key`, unique
    to this step and rank, seeds the step's random numbers.
    """

    images: int
    passes: int
    lr: float
    weight_decay: float
    clip_norm: float | None = None
    skips_non_finite: bool = False
    measure_layers: bool = False
    key: tuple[int, ...] = ()


@dataclass(slots=True)
class AccumulatedGradients:
    """Totals over a step's backward passes; `inputs` are the last pass's, and `images` includes damaged ones."""

    data_wait_s: float = 0.0
    comm_wait_s: float = 0.0
    images: int = 0
    metrics: EpochMetrics = field(default_factory=EpochMetrics)
    inputs: Any = None

    @property
    def loss(self) -> float:
        """Mean loss over this rank's images."""
        return self.metrics.loss / self.images


def train_step(
    state: TrainState,
    batches: Iterator[Batch],
    settings: StepSettings,
    task: Task,
) -> StepResult:
    """Update the weights once with the next `settings.passes` batches, unless the gradients contain NaN or Inf."""
    network, optimizer = state.network, state.optimizer
    buffers = copies_of_buffers(state.learner) if settings.skips_non_finite else None
    accumulated = _accumulate_gradients(state, batches, settings, task)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in trained if p.grad is not None]
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)), dtype=torch.float64))
    finite, non_finite, ratios = math.isfinite(norm), "", []
    metrics = accumulated.metrics if finite else EpochMetrics(damaged=accumulated.metrics.damaged)
    set_lr_and_decay(optimizer, settings.lr, settings.weight_decay)
    if finite:
        if settings.clip_norm is not None and norm > settings.clip_norm:
            torch._foreach_mul_(gradients, settings.clip_norm / norm)
        if settings.measure_layers:
            ratios = layer_ratios(network, optimizer)
        optimizer.step()
        state.update_ema()
    else:
        with autocast(state.learner.precision):
            non_finite = _find_non_finite(network, accumulated.inputs, accumulated.loss)
        state.all_reduce.reset()
        if buffers is not None:
            restore_buffers(state.learner, buffers)
    for p in trained:  # as optimizer.zero_grad() does, without its profiling and its loops over groups
        p.grad = None
    if state.shares_buffers:
        share_buffers(state.learner)
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
    task: Task,
) -> AccumulatedGradients:
    """Sum the gradients of the next batches over the ranks; if any loss is NaN or Inf, all gradients become NaN."""
    total = AccumulatedGradients()
    for number in range(settings.passes):
        requested = time.perf_counter()
        batch = next(batches)
        total.data_wait_s += time.perf_counter() - requested
        total.inputs, targets = task.inputs(batch), batch.labels
        if task.mix is not None:
            total.inputs, targets = task.mix(total.inputs, targets, (*settings.key, number))
        last = number == settings.passes - 1
        with ExitStack() as stack:
            outputs, found = state.forward(total.inputs, targets, task.label_smoothing, stack, reduces=last)
            losses = found * batch.weights
            summed = losses.sum()
            loss = float(summed.detach())
            # Dividing by the images of all ranks gives every image the same weight in the sum over ranks, also with
            # unequal local batches; a damaged image adds 0.
            share = summed / settings.images
            (share if math.isfinite(loss) else share * math.nan).backward()  # type: ignore[no-untyped-call]
        if last:
            state.check_reduced(summed)
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
        with random_numbers_kept():
            network(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if layers:
        return f"first NaN or Inf in the output of {layers[0]}"
    return "" if math.isfinite(loss) else "the outputs of all layers are finite"
