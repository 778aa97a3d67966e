"""What a training computes with: a network, its inputs and its loss, of a recipe or of a user's own code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from affinity.errors import InputError
from cputrain.data.batches import Batch, own_batch
from cputrain.data.formats.dataset import Dataset
from cputrain.data.formats.own_samples import OwnSamples
from cputrain.models.build import build_model
from cputrain.recipe.schema import Recipe
from cputrain.training.engine import DTYPES, network_input
from cputrain.training.losses import sample_losses
from cputrain.training.mixing import mix_of

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
