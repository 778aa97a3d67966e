"""Which image is used when: pure functions of seed, epoch and step, the same whatever the number of workers."""

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]


def epoch_order(images: int, seed: int, epoch: int) -> Order:
    """The epoch's permutation of all images, shape (images,): a category-shuffled pass."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(images)


def rank_share(order: Order, step: int, steps: int, shares: Sequence[int], rank: int) -> Order:
    """The images of one rank in one of an epoch's steps: its slice of the step's part of the order.

    The order is cut into `steps` parts whose sizes differ by at most one, each of them in proportion to the ranks'
    shares.
    """
    first, last = (len(order) * number // steps for number in (step, step + 1))
    begin, end = ((last - first) * part // sum(shares) for part in (sum(shares[:rank]), sum(shares[: rank + 1])))
    return order[first + begin : first + end]


def evaluation_share(images: int, rank: int, world_size: int) -> Order:
    """Every world_size-th image from rank on: over all ranks each image exactly once, sizes differ by at most one."""
    return np.arange(rank, images, world_size)


def sample_generator(seed: int, epoch: int, image: int, stream: int = 0) -> Random:
    """A source of one image's augmentation in one epoch; streams are independent of one another.

    Python's: for a handful of numbers numpy's generators take three times as long.
    """
    return Random(seed << 72 | epoch << 48 | image << 8 | stream)
