"""Reading shards in large pieces, as parallel file systems want it, and the order of images that allows it.

Neighbours on disk make a block. An epoch walks through all blocks in random order, each shuffled within. That walk is
cut into as many lanes as a step has images, and every step takes the next image of each lane: a batch comes from as
many places as it has images, while each lane reads its blocks one after the other.
"""

import threading
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from cputrain.data.order import Order
from cputrain.data.shards import Run, Shards


def block_length(bytes_per_image: float, block_bytes: float, steps: int) -> int:
    """How many images make a block: not more than an epoch has steps, or a batch would have several of one block."""
    return min(max(1, round(block_bytes / bytes_per_image)), steps)


def block_order(images: int, seed: int, epoch: int, *, length: int, used: int, steps: int) -> Order:
    """The order of the epoch's `used` of all images, shape (used,), to be cut into its steps by rank_share.

    The same whatever the number of workers: a worker that takes a part of every step takes neighbouring lanes.
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


class BlockReader:
    """Images of shards, of which `wanted` are going to be read, each once: a block is read at the first of them, and
    kept until the last. Safe to read from several threads."""

    def __init__(self, shards: Shards, length: int, wanted: Order) -> None:
        self._shards, self._length = shards, length
        self._left = np.bincount(wanted // length).tolist()
        self._held: dict[int, Future[Run]] = {}
        self._lock = threading.Lock()

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each image of the shards, shape (n,)."""
        return self._shards.labels

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, i: int) -> bytes:
        """Image i, from its block. Raises OSError when its checksum is wrong there and in its shard."""
        number = i // self._length
        with self._lock:
            held = self._held.get(number)
            first = held is None
            if held is None:
                held = self._held[number] = Future()
        if first:
            begin = number * self._length
            try:
                held.set_result(self._shards.read_run(begin, min(begin + self._length, len(self))))
            except OSError as error:
                held.set_exception(error)
        try:
            return self._shards.read(i, held.result())
        finally:
            with self._lock:
                self._left[number] -= 1
                if self._left[number] == 0:
                    del self._held[number]

    def size(self, i: int) -> int:
        """Bytes of image i."""
        return self._shards.size(i)

    def name(self, i: int) -> str:
        """Image i as people find it."""
        return self._shards.name(i)
