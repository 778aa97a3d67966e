"""Mixing of a batch's images and labels, mixup and CutMix, by torchvision.transforms.v2."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cputrain.models.vision import import_torchvision
from cputrain.recipe.schema import Recipe

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
