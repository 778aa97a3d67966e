"""What is trained: loss, labels, mixup and cutmix, a recipe's images or one's own samples."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cputrain.affinity.errors import InputError
from cputrain.data.formats.dataset import Dataset, OwnSamples
from cputrain.data.loader import Batch, own_batch
from cputrain.models.networks import build_model
from cputrain.models.vision import import_torchvision
from cputrain.recipe.schema import Recipe
from cputrain.training.engine import DTYPES, network_input


def sample_losses(loss: str, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cross_entropy or mse of each sample, shape (N,), in float32 or wider.

    `outputs` are (N, classes) with labels (N,) int64 or shares of the classes (N, classes), or (N, 1) with targets
    (N, 1). mse is the mean over a row of the
    squared differences to the label's one-hot vector, or to the target. `smoothing` is the share of a label that is
    spread over all classes (label smoothing, Szegedy et al. 2016, section 7).
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
    """A function of images (N, 3, side, side), labels (N,) and a key: the mixed images, and the share of each class in
    them, (N, outputs). None where the recipe mixes nothing.

    With both kinds each batch is mixed by one of them, chosen at random. Random numbers depend on seed and key alone,
    and torch's own generator stays as it was: a resumed training mixes as the unbroken one.
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
    """A seed of 63 bits for these numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


Loss = Callable[[Any, Any], Tensor]
"""A network's outputs and the targets -> the loss of each sample, shape (N,), or their mean, shape ()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The computation of a training.

    `build` makes the network, which takes `inputs(batch)`; `losses(outputs, targets, smoothing)` are those of each
    sample, shape (N,). `mix(inputs, targets, key)` makes the inputs and soft targets of a training step where images
    are mixed; `key` is the same for no two batches. `example(n)` are inputs of n samples. `classifies`: targets are
    numbers of classes, so that top-1 and top-5 are counted. `traceable`: the network computes the same for every batch,
    so that one tracing of it may be evaluated instead.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[Batch], Any]
    losses: Callable[[Any, Any, float], Tensor]
    example: Callable[[int], Any]
    classifies: bool
    traceable: bool
    mix: Callable[[Tensor, Tensor, tuple[int, ...]], tuple[Tensor, Tensor]] | None = None


def recipe_task(recipe: Recipe, classes: int, features: int | None, normalize: Callable[[Tensor], Tensor]) -> Task:
    """The task of a recipe: its network for images, or for rows of `features` values."""
    shape = (3, recipe.data.crop, recipe.data.crop) if features is None else (features,)

    def losses(outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return sample_losses(recipe.loss, outputs, targets, smoothing)

    return Task(
        build=lambda: build_model(recipe.model, classes, recipe.data.crop, features),
        inputs=lambda batch: network_input(normalize(batch.images), recipe.precision),
        losses=losses,
        example=lambda count: network_input(torch.zeros(count, *shape), recipe.precision),
        classifies=features is None,
        traceable=True,
        mix=mix_of(recipe, classes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTask:
    """A user's network, loss and samples; without `classifies` targets are no numbers of classes."""

    network: nn.Module
    loss: Loss
    dataset: Dataset
    classifies: bool

    def task(self, recipe: Recipe) -> Task:
        """The task in a recipe's precision."""
        samples = self.dataset.train
        assert isinstance(samples, OwnSamples)

        def inputs(batch: Batch) -> Any:
            return _in_double(batch.images) if DTYPES[recipe.precision] == torch.float64 else batch.images

        return Task(
            build=lambda: self.network,
            inputs=inputs,
            losses=self._losses,
            example=lambda count: inputs(own_batch(samples, [i % len(samples) for i in range(count)])),
            classifies=self.classifies,
            traceable=False,
        )

    def _losses(self, outputs: Any, targets: Any, _smoothing: float) -> Tensor:
        found = self.loss(outputs, targets)
        if not isinstance(found, Tensor) or found.ndim > 1:
            shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise InputError(f"the loss returns {shape}: return one value for each sample, or their mean")
        return found if found.dtype == torch.float64 else found.float()


def sum_of(outputs: Any) -> Tensor:
    """The sum of all values that a network returns, in tuples, lists and dicts as well."""
    if isinstance(outputs, Tensor):
        return outputs.float().sum()
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return torch.stack([sum_of(each) for each in values]).sum()


def _in_double(value: Any) -> Any:
    """Tensors of floating-point numbers as float64, in tuples, lists and dicts as well."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _in_double(each) for key, each in value.items()}
    return type(value)(map(_in_double, value)) if isinstance(value, tuple | list) else value
