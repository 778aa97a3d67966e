"""torchvision's data sets for classification: those with an image and a class for each item."""

import io
from collections.abc import Callable
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from cputrain.affinity.errors import InputError
from cputrain.data.formats.dataset import Dataset, LabeledImages
from cputrain.models.vision import import_torchvision


class TorchvisionImages(LabeledImages):
    """A torchvision data set, whose images are encoded as PNGs when they are read."""

    def __init__(self, items: Any, name: str) -> None:
        self._items, self._name = items, name
        targets = next((getattr(items, key) for key in ("targets", "labels", "_labels") if hasattr(items, key)), None)
        found = [items[i][1] for i in range(len(items))] if targets is None else targets
        self._labels = np.asarray(found, dtype=np.int64)
        self._typical = len(self.read(0))

    def read(self, i: int) -> bytes:
        """Image i as a PNG."""
        out = io.BytesIO()
        self._items[i][0].save(out, "PNG")
        return out.getvalue()

    def size(self, i: int) -> int:
        """The first image's size: the others' are known only when they are encoded."""
        return self._typical

    def name(self, i: int) -> str:
        """The data set and the image's number in it."""
        return f"{self._name}:{i}"


def open_torchvision(name: str, root: Path) -> Dataset:
    """Open torchvision.datasets.NAME, whose files are in `root`, or are downloaded to it.

    Raises InputError where there is no such data set for classification, or it cannot be opened.
    """
    datasets = import_torchvision("datasets")
    known = [key for key in datasets.__all__ if _splits(getattr(datasets, key))]
    if name not in known:
        near = ", ".join(get_close_matches(name, known, n=3, cutoff=0.4) or known[:5])
        raise InputError(f"torchvision has no data set {name!r} with a training split: nearest are {near}")
    kind = getattr(datasets, name)
    try:
        train, val = (TorchvisionImages(_open(kind, root, how), f"{name}/{how}") for how in _splits(kind))
    except (RuntimeError, OSError, ValueError) as error:
        raise InputError(f"torchvision's {name} in {root}: {error}") from None
    classes = getattr(train._items, "classes", None) or range(1 + int(train.labels.max()))
    return Dataset(classes=tuple(map(str, classes)), train=train, val=val)


def _open(kind: Callable[..., Any], root: Path, how: dict[str, Any]) -> Any:
    """The data set; downloaded where torchvision reports that it is missing."""
    try:
        return kind(root, **how)
    except RuntimeError:
        if "download" not in signature(kind).parameters:
            raise
        return kind(root, download=True, **how)


def _splits(kind: Callable[..., Any]) -> list[dict[str, Any]]:
    """The arguments that select training and validation images; empty where a data set has no such arguments."""
    parameters = signature(kind).parameters
    if "train" in parameters:
        return [{"train": True}, {"train": False}]
    if "split" in parameters and parameters["split"].default == "train":
        return [{"split": "train"}, {"split": "test"}]
    return []
