"""Shards: tar files that any webdataset reader opens, and an index for random access.

A folder holds manifest.json, SPLIT-00000.tar, ... and SPLIT.index.npy. A sample is two tar members, KEY.jpg (or the
suffix of its file) and KEY.cls with the label in decimal.
"""

import io
import os
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from cputrain.data.manifest import MANIFEST, read_manifest

RECORD = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("label", "<u4"), ("crc32", "<u4")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An encoded image on its way into a shard."""

    image: bytes
    suffix: str
    label: int


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Where a split's shard lies."""
    return folder / f"{split}-{number:05d}.tar"


def index_path(folder: Path, split: str) -> Path:
    """Where a split's index lies: an array of RECORD, in the order of the samples."""
    return folder / f"{split}.index.npy"


def write_split(folder: Path, split: str, samples: Iterable[Sample], shard_bytes: int) -> dict[str, int]:
    """Write samples in the given order, a new shard whenever shard_bytes is exceeded; returns the manifest's counts."""
    records: list[tuple[int, int, int, int, int]] = []
    shards = 0
    stream = iter(samples)
    sample = next(stream, None)
    while sample is not None:
        with tarfile.open(shard_path(folder, split, shards), "w", format=tarfile.USTAR_FORMAT) as tar:
            while sample is not None and (tar.offset < shard_bytes or tar.offset == 0):
                key = f"{len(records):08d}"
                offset = tar.offset + tarfile.BLOCKSIZE  # behind the member's header
                _add(tar, f"{key}{sample.suffix}", sample.image)
                _add(tar, f"{key}.cls", str(sample.label).encode())
                records.append((shards, offset, len(sample.image), sample.label, zlib.crc32(sample.image)))
                sample = next(stream, None)
        shards += 1
    np.save(index_path(folder, split), np.array(records, dtype=RECORD))
    return {"images": len(records), "shards": shards}


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


class Shards:
    """One split of a prepared folder: random access to samples; safe to read from several threads."""

    def __init__(self, folder: Path, split: str) -> None:
        """Raises InputError when the index or a shard is missing or shorter than the index says."""
        counts = read_manifest(folder)["splits"][split]
        self.paths = [shard_path(folder, split, i) for i in range(counts["shards"])]
        try:
            self.index: NDArray[np.void] = np.load(index_path(folder, split), mmap_mode="r")
            self.files: list[BinaryIO] = [path.open("rb") for path in self.paths]
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {folder}: {error}: prepare again") from None
        if self.index.dtype != RECORD or len(self.index) != counts["images"]:
            raise InputError(f"{index_path(folder, split)} does not belong to {folder / MANIFEST}: prepare again")
        for number, path in enumerate(self.paths):
            mine = self.index[self.index["shard"] == number]
            needed = int((mine["offset"] + mine["length"]).max())
            if path.stat().st_size < needed:
                raise InputError(f"{path} has {path.stat().st_size:,} bytes; its index needs {needed:,}: prepare again")

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each sample, shape (n,)."""
        return self.index["label"].astype(np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def read(self, i: int) -> bytes:
        """Sample i's encoded image. Raises OSError when its checksum is wrong."""
        record = self.index[i]
        file = self.files[int(record["shard"])]
        data = os.pread(file.fileno(), int(record["length"]), int(record["offset"]))
        if zlib.crc32(data) != record["crc32"]:
            raise OSError("checksum differs from the index: the shard is damaged")
        return data

    def name(self, i: int) -> str:
        """Sample i as people find it: shard and key."""
        return f"{self.paths[int(self.index[i]['shard'])]}:{i:08d}"
