"""Checksums: CRC-32C of arrays, files and JSON values, and a faster one of tensors, to compare them between ranks.

numpy and torch are only imported by who calls with arrays and tensors.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

CHUNK_BYTES = 1 << 20  # per checksum or write; other threads run in between
MODULUS = 1 << 64
FACTOR = 0x9E3779B97F4A7C15  # odd, so that the order of the tensors matters


def crc32c_of(array: "NDArray[np.uint8]") -> int:
    """Return the CRC-32C of an array of bytes, shape (N,)."""
    import google_crc32c  # only needed by those who read or write files with checksums

    crc = 0
    for begin in range(0, len(array), CHUNK_BYTES):
        crc = google_crc32c.extend(crc, array[begin : begin + CHUNK_BYTES].tobytes())
    return crc


def crc32c_of_file(path: Path) -> tuple[int, int]:
    """Return a file's current size and CRC-32C."""
    import google_crc32c

    crc = size = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            crc, size = google_crc32c.extend(crc, piece), size + len(piece)
    return size, crc


def crc32c_of_json(content: Any) -> int:
    """Return the CRC-32C of a JSON value, independent of its layout."""
    import google_crc32c

    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return int(google_crc32c.value(text.encode()))


def in_memory_order(tensor: "Tensor") -> "Tensor":
    """Return a 1-D view of a tensor in memory order, for any memory format; a copy if its memory has gaps or overlaps,
    as in a slice or an expanded view."""
    import torch

    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.reshape(-1).clone()
    return tensor.as_strided((tensor.numel(),), (1,))


def bit_sum(tensors: "Iterable[Tensor]") -> int:
    """Return a checksum of the tensors: each tensor's bits summed as 64-bit integers, combined as a polynomial modulo
    2^64, as a signed integer. Any changed bit changes it; the order in which threads add does not."""
    import torch

    sums = []
    for tensor in tensors:
        data = in_memory_order(tensor).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        words = len(data) // 8 * 8
        sums.append(data[:words].view(torch.int64).sum() + data[words:].sum())
    total = 0
    for one in torch.stack(sums).tolist() if sums else ():
        total = (total * FACTOR + one) % MODULUS
    return total - MODULUS if total >= MODULUS >> 1 else total
