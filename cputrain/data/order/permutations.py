"""Which images are used when: pure functions of seed, epoch and step, the same for any number of workers."""

from collections.abc import Sequence
from random import Random

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
