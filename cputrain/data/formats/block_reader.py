"""Reading images in blocks of neighboring images, in the order of cputrain.data.order.block_order."""

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from affinity.units import MIB
from cputrain.data.formats.dataset import Images, PiecewiseImages
from cputrain.data.order.block_order import block_length
from cputrain.data.order.permutations import Indices


def images_per_block(images: Images, block_mib: float, steps: int) -> int:
    """How many images a block of `block_mib` MiB has in epochs of so many steps; with 0, what is usual for the images'
    format, 0 for most: each is read by itself.

    Raises InputError where blocks are requested of images that can only be read one by one.
    """
    if not isinstance(images, PiecewiseImages):
        if block_mib == 0:
            return 0
        raise InputError(
            f"block_mib={block_mib:g} is for shards, but the images are not in shards: make shards with cputrain "
            "prepare, or set data.block_mib=0"
        )
    if block_mib == 0:
        return min(images.usual_block, steps)
    return block_length(images.bytes_per_image, block_mib * MIB, steps)


class BlockReader:
    """Images of which `wanted` will be read, each once, from several threads.

    A block is read with the first of its images, and kept in memory until the last.
    """

    def __init__(self, images: PiecewiseImages, length: int, wanted: Indices) -> None:
        self._images, self._length = images, length
        self._unread = np.bincount(wanted // length).tolist()
        self._blocks: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""
        return self._images.labels

    def __len__(self) -> int:
        return len(self._images)

    def read(self, i: int) -> bytes:
        """Image i, from its block. Raises OSError when its checksum is wrong there and where it is stored."""
        number = i // self._length
        with self._lock:
            block = self._blocks.get(number)
            first = block is None
            if block is None:
                block = self._blocks[number] = Future()
        if first:
            begin = number * self._length
            try:
                block.set_result(self._images.read_pieces(begin, min(begin + self._length, len(self))))
            except OSError as error:
                block.set_exception(error)
        try:
            return self._images.read(i, block.result())
        finally:
            with self._lock:
                self._unread[number] -= 1
                if self._unread[number] == 0:
                    del self._blocks[number]

    def size(self, i: int) -> int:
        """The bytes of image i."""
        return self._images.size(i)

    def name(self, i: int) -> str:
        """Where image i is stored."""
        return self._images.name(i)
