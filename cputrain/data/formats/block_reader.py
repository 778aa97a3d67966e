"""Reading shards in blocks of neighboring images, in the order of cputrain.data.order.block_order."""

import threading
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from affinity.units import MIB
from cputrain.data.formats.dataset import Images
from cputrain.data.formats.shards import ShardPieces, Shards
from cputrain.data.order.block_order import block_length
from cputrain.data.order.permutations import Indices


def images_per_block(images: Images, block_mib: float, steps: int) -> int:
    """How many images a block of `block_mib` MiB has in epochs of so many steps; 0 where block_mib is 0.

    Raises InputError where blocks are requested of anything but shards.
    """
    if block_mib == 0:
        return 0
    if not isinstance(images, Shards):
        raise InputError(
            f"block_mib={block_mib:g} is for shards, but the images are not in shards: make shards with cputrain "
            "prepare, or set data.block_mib=0"
        )
    return block_length(images.bytes_per_image, block_mib * MIB, steps)


class BlockReader:
    """Images of shards, of which `wanted` will be read, each once, from several threads.

    A block is read with the first of its images, and kept in memory until the last.
    """

    def __init__(self, shards: Shards, length: int, wanted: Indices) -> None:
        self._shards, self._length = shards, length
        self._unread = np.bincount(wanted // length).tolist()
        self._blocks: dict[int, Future[ShardPieces]] = {}
        self._lock = threading.Lock()

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image of the shards, shape (n,)."""
        return self._shards.labels

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, i: int) -> bytes:
        """Image i, from its block. Raises OSError when its checksum is wrong there and in its shard."""
        number = i // self._length
        with self._lock:
            block = self._blocks.get(number)
            first = block is None
            if block is None:
                block = self._blocks[number] = Future()
        if first:
            begin = number * self._length
            try:
                block.set_result(self._shards.read_pieces(begin, min(begin + self._length, len(self))))
            except OSError as error:
                block.set_exception(error)
        try:
            return self._shards.read(i, block.result())
        finally:
            with self._lock:
                self._unread[number] -= 1
                if self._unread[number] == 0:
                    del self._blocks[number]

    def size(self, i: int) -> int:
        """The bytes of image i."""
        return self._shards.size(i)

    def name(self, i: int) -> str:
        """The shard and key of image i."""
        return self._shards.name(i)
