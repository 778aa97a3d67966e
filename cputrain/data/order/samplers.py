"""One rank's batches of image numbers, epoch by epoch: what torch calls a distributed batch sampler."""

from dataclasses import dataclass
from math import ceil
from typing import Protocol

import numpy as np

from cputrain.data.order.block_order import block_order
from cputrain.data.order.permutations import Indices, epoch_order, evaluation_share, rank_share


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
