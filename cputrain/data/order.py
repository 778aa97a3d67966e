"""Which image is used when: permutations of an epoch, the share of each rank, the order that allows large reads, and a
measure of mixing.

Neighbors on disk form a block. An epoch walks through all blocks in random order, shuffling the images of each. This
walk is cut into as many lanes as a step has images, and every step takes the next image of each lane. So a batch comes
from as many places as it has images, while each lane reads its blocks one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
"""Image numbers within a split, in the order in which they are used."""


def epoch_order(images: int, seed: int, epoch: int) -> Indices:
    """The epoch's random permutation of all images, shape (images,)."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(images)


def rank_share(order: Indices, step: int, steps: int, shares: Sequence[int], rank: int) -> Indices:
    """The images of one rank in one of an epoch's steps.

    The order is cut into `steps` parts whose sizes differ by at most one; each part is cut in proportion to the ranks'
    shares.
    """
    first, last = (len(order) * number // steps for number in (step, step + 1))
    begin, end = ((last - first) * part // sum(shares) for part in (sum(shares[:rank]), sum(shares[: rank + 1])))
    return order[first + begin : first + end]


def evaluation_share(images: int, rank: int, world_size: int) -> Indices:
    """Every world_size-th image from `rank` on: each image on exactly one rank; sizes differ by at most 1."""
    return np.arange(rank, images, world_size)


def image_rng(seed: int, epoch: int, image: int, stream: int = 0) -> Random:
    """The random number generator of one image in one epoch; streams are independent of one another.

    Python's own: numpy's generators take three times as long for the few values that an image needs.
    """
    return Random(seed << 72 | epoch << 48 | image << 8 | stream)


def block_length(bytes_per_image: float, block_bytes: float, steps: int) -> int:
    """How many images a block has: at most the epoch's steps, or a batch would have several images of one block."""
    return min(max(1, round(block_bytes / bytes_per_image)), steps)


def block_order(images: int, seed: int, epoch: int, *, length: int, used: int, steps: int) -> Indices:
    """The order of the epoch's `used` of all images, shape (used,), to be cut into its steps by rank_share.

    It is the same for any number of workers: a worker, which takes a part of every step, takes neighboring lanes.
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
    """Says which images are in a rank's batches."""

    @property
    def block_length(self) -> int:
        """How many neighboring images are read at once; 0 where each is read by itself."""

    def __len__(self) -> int:
        """How many batches an epoch has on this rank."""

    def batches(self, epoch: int, first: int = 0, stop: int | None = None) -> list[Indices]:
        """The batches of the steps from `first` to before `stop` (None: to the end) of an epoch, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffledSampler:
    """Training: a new permutation each epoch, of which `used` of all `images` are cut into `steps` steps.

    Every step is cut over the ranks in proportion to `shares`, and a rank's share into `passes` batches (gradient
    accumulation). With a `block_length` the permutation is one that reads shards in blocks.
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
        """How many batches an epoch has on this rank."""
        return self.steps * self.passes

    def batches(self, epoch: int, first: int = 0, stop: int | None = None) -> list[Indices]:
        """The batches of the steps from `first` to before `stop` (None: to the end) of an epoch, in order."""
        if self.block_length:
            order = block_order(
                self.images, self.seed, epoch, length=self.block_length, used=self.used, steps=self.steps
            )
        else:
            order = epoch_order(self.images, self.seed, epoch)[: self.used]
        steps = range(first, self.steps if stop is None else stop)
        shares = [rank_share(order, step, self.steps, self.shares, self.rank) for step in steps]
        return [batch for share in shares for batch in np.array_split(share, self.passes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSampler:
    """Evaluation: each image exactly once on one of the ranks, nothing padded; ranks differ by at most one image."""

    images: int
    batch_size: int
    rank: int
    world_size: int

    @property
    def block_length(self) -> int:
        """0: each image is read by itself."""
        return 0

    def __len__(self) -> int:
        """How many batches this rank has; no other rank has more than rank 0."""
        return ceil(len(self._share()) / self.batch_size)

    def batches(self, epoch: int = 0, first: int = 0, stop: int | None = None) -> list[Indices]:
        """The rank's batches from `first` to before `stop`, the same in every epoch; the last may be smaller."""
        share = self._share()
        return [share[i : i + self.batch_size] for i in range(0, len(share), self.batch_size)][first:stop]

    def _share(self) -> Indices:
        return evaluation_share(self.images, self.rank, self.world_size)


WINDOW = 32  # samples in a row, as many as a worker's batch


def mean_classes_in_window(labels: NDArray[np.int64]) -> float:
    """The mean number of different classes among WINDOW samples in a row."""
    whole = len(labels) // WINDOW * WINDOW
    if whole == 0:
        return float(len(np.unique(labels)))
    rows = np.sort(labels[:whole].reshape(-1, WINDOW), axis=1)
    return float(1 + (np.diff(rows, axis=1) != 0).sum(axis=1).mean())


def expected_classes_in_window(labels: NDArray[np.int64]) -> float:
    """The same for samples in random order: a class is present unless all samples of the window miss it."""
    shares = np.bincount(labels) / len(labels)
    return float((1 - (1 - shares) ** min(WINDOW, len(labels))).sum())
