"""Training step: the task (network, inputs and loss of a recipe or of a user's code), forward, backward and update, and
the results."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cputrain.affinity.errors import InputError
from cputrain.data.formats.dataset import Dataset, UserSamples
from cputrain.data.loader import Batch, own_batch
from cputrain.kernels.evidence import random_numbers_kept
from cputrain.models.networks import build_model
from cputrain.models.vision import import_torchvision
from cputrain.optim import layer_ratios, set_lr_and_decay
from cputrain.recipe.schema import Recipe
from cputrain.training.engine import DTYPES, autocast, network_input
from cputrain.training.state import (
    TrainState,
    copies_of_buffers,
    loss_module_of,
    restore_buffers,
    share_buffers,
)


def sample_losses(loss: str, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return each sample's cross_entropy or mse, shape (N,), in float32 or wider.

    `outputs` are (N, classes) with labels (N,) int64 or class probabilities (N, classes), or (N, 1) with targets
    (N, 1). mse is the mean over a row of the squared differences to the label's one-hot vector, or to the target.
    `smoothing` is the label smoothing factor (Szegedy et al. 2016, section 7).
    """
    wide = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
    if labels.is_floating_point():
        labels = labels.to(wide.dtype)
    if loss == "cross_entropy":
        return functional.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
    targets, classes = labels.to(wide.dtype), wide.shape[1]
    if labels.dtype == torch.int64:
        targets = functional.one_hot(labels, classes).to(wide.dtype)
    if classes > 1:
        targets = targets * (1 - smoothing) + smoothing / classes
    return (wide - targets).square().mean(dim=1)


Mix = Callable[[Tensor, Tensor, tuple[int, ...]], tuple[Tensor, Tensor]]


def mix_of(recipe: Recipe, classes: int) -> Mix | None:
    """Return a function that applies MixUp or CutMix, or None if the recipe uses neither. It takes images
    (N, 3, side, side), labels (N,) and a key, and returns mixed images and class probabilities (N, outputs).

    If the recipe uses both, one is chosen at random for each batch. Random numbers depend only on seed and key, and
    torch's global generator is unchanged, so a resumed training mixes like an uninterrupted one.
    """
    augment, outputs = recipe.data.augment, recipe.model.classes or classes
    if not (augment.mixup or augment.cutmix) or outputs < 2:
        return None
    v2: Any = import_torchvision("transforms.v2")
    kinds = [
        kind(alpha=alpha, num_classes=outputs)
        for kind, alpha in ((v2.MixUp, augment.mixup), (v2.CutMix, augment.cutmix))
        if alpha
    ]

    def mix(images: Tensor, labels: Tensor, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(recipe.seed, *key))
            chosen = kinds[int(torch.randint(len(kinds), ()))]
            mixed, shares = chosen(images, labels)
        return mixed.contiguous(memory_format=torch.channels_last), shares

    return mix


def _seed(*numbers: int) -> int:
    """Return a 63-bit seed derived from these numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


Loss = Callable[[Any, Any], Tensor]
"""Function of a network's outputs and the targets that returns the losses, shape (N,), or their mean, shape ()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Network, inputs and loss of a training.

    `build` returns the network, which takes `inputs(batch)`; `losses(outputs, targets, smoothing)` returns each
    sample's loss, shape (N,). `mix(inputs, targets, key)` returns mixed inputs and soft targets for a training step;
    `key` differs for every batch. `example(n)` returns inputs and targets of n samples. `classifies`: targets are class
    indices, so top-1 and top-5 are computed. `traceable`: the network has no data-dependent control flow, so a traced
    copy may be evaluated instead. `loss_module` is the module behind `losses` if it has parameters or buffers.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[Batch], Any]
    losses: Callable[[Any, Any, float], Tensor]
    example: Callable[[int], tuple[Any, Any]]
    classifies: bool
    traceable: bool
    mix: Callable[[Tensor, Tensor, tuple[int, ...]], tuple[Tensor, Tensor]] | None = None
    loss_module: nn.Module | None = None


def recipe_task(recipe: Recipe, classes: int, features: int | None, normalize: Callable[[Tensor], Tensor]) -> Task:
    """Return the task of a recipe, for images or, with `features`, for rows of that many values."""
    shape = (3, recipe.data.crop, recipe.data.crop) if features is None else (features,)

    def losses(outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return sample_losses(recipe.loss, outputs, targets, smoothing)

    def example(count: int) -> tuple[Tensor, Tensor]:
        return network_input(torch.zeros(count, *shape), recipe.precision), torch.zeros(count, dtype=torch.int64)

    return Task(
        build=lambda: build_model(recipe.model, classes, recipe.data.crop, features),
        inputs=lambda batch: network_input(normalize(batch.images), recipe.precision),
        losses=losses,
        example=example,
        classifies=features is None,
        traceable=True,
        mix=mix_of(recipe, classes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTask:
    """A user's network, loss and samples; `classifies` is True if targets are class indices."""

    network: nn.Module
    loss: Loss
    dataset: Dataset
    classifies: bool

    def task(self, recipe: Recipe) -> Task:
        """Return the task in a recipe's precision."""
        samples = self.dataset.train
        assert isinstance(samples, UserSamples)

        def inputs(batch: Batch) -> Any:
            return _in_double(batch.images) if DTYPES[recipe.precision] == torch.float64 else batch.images

        def example(count: int) -> tuple[Any, Any]:
            batch = own_batch(samples, [i % len(samples) for i in range(count)])
            return inputs(batch), batch.labels

        def build() -> nn.Module:
            self.network.train()  # it may come from an evaluation; its method may return nothing
            return self.network

        return Task(
            build=build,
            inputs=inputs,
            losses=self._losses,
            example=example,
            classifies=self.classifies,
            traceable=False,
            loss_module=loss_module_of(self.loss, self.network),
        )

    def _losses(self, outputs: Any, targets: Any, _smoothing: float) -> Tensor:
        found = self.loss(outputs, targets)
        if not isinstance(found, Tensor) or found.ndim > 1:
            shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise InputError(f"the loss function returns {shape}: return one value per sample, or their mean")
        if self.classifies and not (isinstance(outputs, Tensor) and outputs.ndim == 2):
            shape = (
                f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            )
            raise InputError(
                f"with classes, the network must return logits (N, {len(self.dataset.classes)}), and it returns "
                f"{shape}: leave classes out to train without top-1"
            )
        return found if found.dtype == torch.float64 else found.float()


def _in_double(value: Any) -> Any:
    """Convert floating-point tensors to float64, also in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _in_double(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _in_double(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_in_double, value))
    return type(value)(map(_in_double, value)) if isinstance(value, tuple | list) else value


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
    return float((in_top(outputs, labels, k) * weights).sum())


def in_top(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return 1.0 for each label that is among the k largest of its row of logits (N, classes), else 0.0; shape (N,)."""
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels[:, None]).any(dim=1).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of one step: images of all ranks, backward passes of each rank, learning rate and weight decay.

    `measure_layers` requests each layer's norms; `key`, unique to this step and rank, seeds the step's random numbers.
    """

    images: int
    passes: int
    lr: float
    weight_decay: float
    measure_layers: bool = False
    key: tuple[int, ...] = ()


class Watcher:
    """Base class of the training loop's callbacks; subclasses override the methods they need and are listed in loop.py.
    Every rank calls each method after the same steps, so methods may use collectives."""

    __slots__ = ()

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Called after each step, with its result and duration on this rank; `step` counts completed steps."""

    def before_save(self, step: int) -> None:
        """Called before the state after this step is saved."""

    def after_last_step(self, step: int) -> None:
        """Called once, after the last step."""


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
    recipe: Recipe,
    task: Task,
) -> StepResult:
    """Update the weights once with the next `settings.passes` batches, unless the gradients contain NaN or Inf."""
    network, optimizer = state.network, state.optimizer
    buffers = copies_of_buffers(state.learner) if recipe.on_nan == "skip" else None
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
    recipe: Recipe,
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
            outputs, found = state.forward(total.inputs, targets, recipe.label_smoothing, stack, reduces=last)
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
