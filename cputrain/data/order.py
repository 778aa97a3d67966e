"""Sampling order: permutations of an epoch, each rank's share, a block order that allows large reads, and a measure of
shuffling.

Neighboring images on disk form a block. An epoch visits all blocks in random order and shuffles the images within each.
This sequence is cut into as many lanes as a step has images, and every step takes the next image of each lane. So a
batch samples as many places as it has images, while each lane reads its blocks one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
"""Image numbers within a split, in order of use."""

WINDOW = 32  # consecutive samples: a typical local batch


def epoch_order(images: int, seed: int, epoch: int) -> Indices:
    """Return the epoch's random permutation of all images, shape (images,)."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(images)


def rank_share(order: Indices, step: int, steps: int, batch_sizes: Sequence[int], rank: int) -> Indices:
    """Return the images of one rank in one step of an epoch.

    The order is split into `steps` parts whose sizes differ by at most one; each part is divided among the ranks in
    proportion to `batch_sizes`.
    """
    first, last = (len(order) * number // steps for number in (step, step + 1))
    begin, end = (
        (last - first) * part // sum(batch_sizes) for part in (sum(batch_sizes[:rank]), sum(batch_sizes[: rank + 1]))
    )
    return order[first + begin : first + end]


def evaluation_share(images: int, rank: int, world_size: int) -> Indices:
    """Return every world_size-th image, starting at `rank`: each image is on exactly one rank, sizes differ by at most
    one."""
    return np.arange(rank, images, world_size)


def image_rng(seed: int, epoch: int, image: int, stream: int = 0) -> Random:
    """Return the random number generator of one image in one epoch; streams are independent of one another.

    It is Python's, because numpy's generators take three times as long for the few values that an image needs.
    """
    return Random(seed << 72 | epoch << 48 | image << 8 | stream)


def block_length(bytes_per_image: float, block_bytes: float, steps: int) -> int:
    """Return the images per block: at most the epoch's steps, so that a batch has one image per block."""
    return min(max(1, round(block_bytes / bytes_per_image)), steps)


def block_order(images: int, seed: int, epoch: int, *, length: int, used: int, steps: int) -> Indices:
    """Return the epoch's order of `used` of all images, shape (used,), which rank_share splits into steps.

    It does not depend on the number of workers: a worker's part of each step is a range of neighboring lanes.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    turn = rng.permutation(-(-images // length))
    walk = np.argsort(turn[np.arange(images) // length] + rng.random(images))[:used]
    lanes, begin = used // steps, used * np.arange(steps) // steps
    order = np.empty(used, dtype=np.int64)
    order[begin[:, None] + np.arange(lanes)] = walk[: lanes * steps].reshape(lanes, steps).T
    longer = np.diff(begin, append=used) > lanes
    order[begin[longer] + lanes] = walk[lanes * steps :]
    return order


class BatchSampler(Protocol):
    """Selects the images of a rank's batches."""

    @property
    def block_length(self) -> int:
        """Number of neighboring images to read at once; 0 reads images individually."""

    def __len__(self) -> int:
        """Return the number of batches per epoch on this rank."""

    def batches(self, epoch: int, first: int = 0, stop: int | None = None) -> list[Indices]:
        """Return the batches of an epoch's steps [first, stop), in order; stop=None: to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffledSampler:
    """Training sampler: each epoch a new permutation, of which `used` of all `images` are split into `steps` steps.

    Every step is divided among the ranks in proportion to `shares`, and a rank's share into `passes` batches (gradient
    accumulation). With `block_length`, the permutation reads shards in blocks.
    """

    images: int
    used: int
    steps: int
    seed: int
    shares: tuple[int, ...]
    rank: int
    passes: int = 1
    block_length: int = 0

    def __len__(self) -> int:
        """Return the number of batches per epoch on this rank."""
        return self.steps * self.passes

    def batches(self, epoch: int, first: int = 0, stop: int | None = None) -> list[Indices]:
        """Return the batches of an epoch's steps [first, stop), in order; stop=None: to the end."""
        if self.block_length:
            order = block_order(
                self.images, self.seed, epoch, length=self.block_length, used=self.used, steps=self.steps
            )
        else:
            order = epoch_order(self.images, self.seed, epoch)[: self.used]
        steps = range(first, self.steps if stop is None else stop)
        rank_batches = [rank_share(order, step, self.steps, self.shares, self.rank) for step in steps]
        return [batch for indices in rank_batches for batch in np.array_split(indices, self.passes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSampler:
    """Evaluation sampler: each image exactly once, on one of the ranks, without padding; ranks differ by at most one
    image."""

    images: int
    batch_size: int
    rank: int
    world_size: int

    @property
    def block_length(self) -> int:
        """0: images are read individually."""
        return 0

    def __len__(self) -> int:
        """Return the number of batches on this rank; no rank has more than rank 0."""
        return ceil(len(self._share()) / self.batch_size)

    def batches(self, epoch: int = 0, first: int = 0, stop: int | None = None) -> list[Indices]:
        """Return the rank's batches [first, stop), the same in every epoch; the last one may be smaller."""
        indices = self._share()
        return [indices[i : i + self.batch_size] for i in range(0, len(indices), self.batch_size)][first:stop]

    def _share(self) -> Indices:
        return evaluation_share(self.images, self.rank, self.world_size)


def mean_classes_in_window(labels: NDArray[np.int64]) -> float:
    """Return the mean number of distinct classes among WINDOW consecutive samples."""
    whole = len(labels) // WINDOW * WINDOW
    if whole == 0:
        return float(len(np.unique(labels)))
    rows = np.sort(labels[:whole].reshape(-1, WINDOW), axis=1)
    return float(1 + (np.diff(rows, axis=1) != 0).sum(axis=1).mean())


def expected_classes_in_window(labels: NDArray[np.int64]) -> float:
    """Return its expected value in random order: a class is present unless all samples of the window miss it."""
    frequencies = np.bincount(labels) / len(labels)
    return float((1 - (1 - frequencies) ** min(WINDOW, len(labels))).sum())
