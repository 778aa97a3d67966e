"""An order of images that is random, and yet lets shards be read in large pieces, as parallel file systems want it.

Neighbors on disk form a block. An epoch walks through all blocks in random order, shuffling the images of each. This
walk is cut into as many lanes as a step has images, and every step takes the next image of each lane. So a batch comes
from as many places as it has images, while each lane reads its blocks one after the other.
"""

import numpy as np

from cputrain.data.order.permutations import Indices


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
