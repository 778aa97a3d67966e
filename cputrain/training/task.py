"""What is trained: network, inputs and loss; the losses of recipes, MixUp and CutMix, and a user's task."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cputrain.affinity.errors import InputError
from cputrain.data.formats.dataset import Dataset, UserSamples
from cputrain.data.loader import Batch, own_batch
from cputrain.models.vision import import_torchvision
from cputrain.training.engine import DTYPES
from cputrain.training.state import loss_module_of

Mix = Callable[[Tensor, Tensor, tuple[int, ...]], tuple[Tensor, Tensor]]
Loss = Callable[[Any, Any], Tensor]
"""Function of a network's outputs and the targets that returns the losses, shape (N,), or their mean, shape ()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Network, inputs and loss of a training.

    `build` returns the network, which takes `inputs(batch)`; `losses(outputs, targets, smoothing)` returns each
    sample's loss, shape (N,). `mix(inputs, targets, key)` returns mixed inputs and soft targets for a training step;
    `key` differs for every batch. `example(n)` returns inputs and targets of n samples. `classifies`: targets are class
    indices, so top-1 and top-5 are computed. `traceable`: the network has no data-dependent control flow, so a traced
    copy may be evaluated instead. `loss_module` is the module behind `losses` if it has parameters or buffers;
    `label_smoothing` is the `smoothing` of training steps.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[Batch], Any]
    losses: Callable[[Any, Any, float], Tensor]
    example: Callable[[int], tuple[Any, Any]]
    classifies: bool
    traceable: bool
    mix: Callable[[Tensor, Tensor, tuple[int, ...]], tuple[Tensor, Tensor]] | None = None
    loss_module: nn.Module | None = None
    label_smoothing: float = 0.0


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


def build_mixup(mixup: float, cutmix: float, outputs: int, seed: int) -> Mix | None:
    """Return a function that applies MixUp or CutMix with these parameters, or None if both are 0. It takes images
    (N, 3, side, side), labels (N,) and a key, and returns mixed images and class probabilities (N, outputs).

    With both, one is chosen at random for each batch. Random numbers depend only on seed and key, and torch's global
    generator is unchanged, so a resumed training mixes like an uninterrupted one.
    """
    if not (mixup or cutmix) or outputs < 2:
        return None
    v2: Any = import_torchvision("transforms.v2")
    kinds = [
        kind(alpha=alpha, num_classes=outputs) for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix)) if alpha
    ]

    def mix(images: Tensor, labels: Tensor, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed(seed, *key))
            chosen = kinds[int(torch.randint(len(kinds), ()))]
            mixed, shares = chosen(images, labels)
        return mixed.contiguous(memory_format=torch.channels_last), shares

    return mix


def _seed(*numbers: int) -> int:
    """Return a 63-bit seed derived from these numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTask:
    """A user's network, loss and samples; `classifies` is True if targets are class indices."""

    network: nn.Module
    loss: Loss
    dataset: Dataset
    classifies: bool

    def task(self, precision: str) -> Task:
        """Return the task in a precision."""
        samples = self.dataset.train
        assert isinstance(samples, UserSamples)

        def inputs(batch: Batch) -> Any:
            return _in_double(batch.images) if DTYPES[precision] == torch.float64 else batch.images

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
        losses = self.loss(outputs, targets)
        if not isinstance(losses, Tensor) or losses.ndim > 1:
            shape = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise InputError(f"the loss function returns {shape}: return one value per sample, or their mean")
        if self.classifies and not (isinstance(outputs, Tensor) and outputs.ndim == 2):
            shape = (
                f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            )
            raise InputError(
                f"with classes, the network must return logits (N, {len(self.dataset.classes)}), and it returns "
                f"{shape}: leave classes out to train without top-1"
            )
        return losses if losses.dtype == torch.float64 else losses.float()


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
