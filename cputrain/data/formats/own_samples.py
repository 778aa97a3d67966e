"""The samples of a user's own data set: an object with a length whose items are pairs of input and target."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError

Collate = Callable[[list[Any]], tuple[Any, Any]]
"""Pairs of input and target -> the inputs and the targets of a batch."""


class OwnSamples:
    """A split of a user's data set; `collate` makes batches of its samples."""

    def __init__(self, samples: Any, collate: Collate, split: str) -> None:
        """Raises InputError where the samples cannot be read by number."""
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise InputError(
                f"the {split} data is a {type(samples).__name__}, whose samples cannot be read by number: give an "
                "object with __len__ and __getitem__, such as a map-style torch.utils.data.Dataset"
            )
        self._samples, self._collate, self._split = samples, collate, split

    @property
    def labels(self) -> NDArray[np.int64]:
        """Zeros: only the loss knows what a target is."""
        return np.zeros(len(self), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._samples)

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch begins, from 0, if it wants to know."""
        if hasattr(self._samples, "set_epoch"):
            self._samples.set_epoch(epoch)

    def collated(self, numbers: Sequence[int]) -> tuple[Any, Any]:
        """The inputs and targets of a batch. Raises InputError where they are no pair."""
        made = self._collate([self._samples[i] for i in numbers])
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise InputError(
                f"a batch of the {self._split} data is a {type(made).__name__}, not a pair of inputs and targets: let "
                "each sample be a pair, or give collate"
            )
        return made[0], made[1]

    def read(self, i: int) -> bytes:
        """Raises OSError: a sample is no file."""
        raise OSError(f"{self.name(i)} is not an image")

    def size(self, _i: int) -> int:
        """0: it is not known."""
        return 0

    def name(self, i: int) -> str:
        """The split and the sample's number."""
        return f"{self._split} sample {i}"
