"""The checksum of a split: equal on two hosts only where they have the same images in the same order."""

import google_crc32c
import numpy as np

from cputrain.data.formats.dataset import Images
from cputrain.data.formats.shards import Shards

CHUNK_BYTES = 1 << 20


def split_checksum(images: Images, root: str) -> int:
    """The CRC-32C of the index of shards, which has every image's own; else of the labels and of the images' names
    below `root`, without reading an image."""
    if isinstance(images, Shards):
        return _extend(0, np.ascontiguousarray(images.index).view(np.uint8))
    names = "\n".join(images.name(i).removeprefix(root) for i in range(len(images)))
    crc = _extend(0, np.ascontiguousarray(images.labels).view(np.uint8))
    return int(google_crc32c.extend(crc, names.encode(errors="surrogateescape")))


def _extend(crc: int, values: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    for begin in range(0, len(values), CHUNK_BYTES):
        crc = google_crc32c.extend(crc, values[begin : begin + CHUNK_BYTES].tobytes())
    return int(crc)
