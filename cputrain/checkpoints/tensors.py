"""Files of tensors: safetensors, with the CRC-32C of every tensor in the header."""

import json
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cputrain.checkpoints.folder import DamagedError, FileRecord, Manifest

SUFFIX = ".safetensors"
CHECKSUMS = "crc32c"  # the header's entry with a JSON object of tensor name -> CRC-32C
CHUNK_BYTES = 1 << 20  # of one checksum or write: between two of them other threads run
ALIGNMENT = 8
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write tensors and synchronize the file with its disk; `metadata` is text by key. Raises OSError naming the file.

    Layouts other than row-major (channels-last) become row-major. To be called in a thread of its own: copies run in
    that thread alone and without the interpreter's lock.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    arrays = {name: _row_major(tensors[name]) for name in order}
    checksums = {name: checksum(array) for name, array in arrays.items()}
    header: dict[str, object] = {"__metadata__": {**metadata, CHECKSUMS: json.dumps(checksums)}}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(array)],
        }
        offset += len(array)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    crc, size = google_crc32c.value(head), len(head) + offset
    try:
        with path.open("wb") as file:
            file.write(head)
            for array in arrays.values():
                for begin in range(0, len(array), CHUNK_BYTES):
                    piece = array[begin : begin + CHUNK_BYTES].tobytes()
                    crc = google_crc32c.extend(crc, piece)
                    file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return FileRecord(bytes=size, crc32c=crc)


def read_tensors(path: Path, expected: FileRecord | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its metadata, both verified: the whole file where `expected` is given, every tensor
    that has a checksum otherwise. Raises DamagedError."""
    try:
        if stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):  # it might be read for ever
            raise DamagedError(f"{path} is a pipe or a device: put a file in its place")
        if expected is not None and file_sum(path) != expected:
            raise DamagedError(f"{path} is damaged: {_damage(path, expected)}")
        tensors, metadata = _load(path)
        wrong = _wrong_tensor(tensors, metadata) if expected is None else None
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} is not a safetensors file, or its header is damaged: {error}") from None
    if wrong:
        raise DamagedError(f"{path} is damaged: the checksum of {wrong} is wrong")
    return tensors, metadata


def read_file(folder: Path, manifest: Manifest, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of one of a checkpoint's files. Raises DamagedError."""
    record = manifest.files.get(name)
    if record is None:
        raise DamagedError(f"{folder} is damaged: it has no {name}")
    return read_tensors(folder / name, record)


def file_sum(path: Path) -> FileRecord:
    """The size and checksum of a file as it is."""
    crc = size = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            crc, size = google_crc32c.extend(crc, piece), size + len(piece)
    return FileRecord(bytes=size, crc32c=crc)


def checksum(array: NDArray[np.uint8]) -> int:
    """The CRC-32C of bytes."""
    crc = 0
    for begin in range(0, len(array), CHUNK_BYTES):
        crc = google_crc32c.extend(crc, array[begin : begin + CHUNK_BYTES].tobytes())
    return crc


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    # by its number: safetensors opens no path that is not UTF-8
    with path.open("rb") as opened, safe_open(f"/proc/self/fd/{opened.fileno()}", framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118  no mapping


def _row_major(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's values in row-major order, as bytes."""
    plain = tensor.detach()
    plain = plain.view(torch.int16) if plain.dtype in (torch.bfloat16, torch.float16) else plain
    return np.ascontiguousarray(plain.numpy()).reshape(-1).view(np.uint8)


def _wrong_tensor(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str | None:
    """The name of a tensor that has another checksum than the header."""
    known = json.loads(metadata.get(CHECKSUMS, "{}"))
    if not isinstance(known, dict):
        raise ValueError("its checksums are not a JSON object")
    return next((name for name, value in tensors.items() if name in known and known[name] != _sum(value)), None)


def _sum(tensor: Tensor) -> int:
    return checksum(_row_major(tensor))


def _damage(path: Path, expected: FileRecord) -> str:
    """What differs in a file with another checksum: its size, a tensor, or its header."""
    size = path.stat().st_size
    if size != expected.bytes:
        return f"it has {size:,} of {expected.bytes:,} bytes"
    try:
        wrong = _wrong_tensor(*_load(path))
    except (SafetensorError, ValueError):
        wrong = None
    return f"the checksum of {wrong} is wrong" if wrong else "the checksum of its header is wrong"
