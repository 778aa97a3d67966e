"""Shards: tar files that any webdataset reader opens, and an index for random access.

A folder holds manifest.json, SPLIT-00000.tar, ... and SPLIT.index.npy. A sample is two tar members, KEY.jpg (or the
suffix of its format) and KEY.cls with the label in decimal.
"""

import io
import os
import resource
import tarfile
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from cputrain.data.inspect import Encoded
from cputrain.data.manifest import MANIFEST, read_manifest

RECORD = np.dtype(
    [
        ("shard", "<u4"),
        ("length", "<u4"),
        ("offset", "<u8"),
        ("label", "<u4"),
        ("crc32c", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
    ]
)


Run = dict[int, tuple[int, bytes]]
"""Parts of shards: of each by its number, where the part begins, and its bytes."""

OTHER_FILES = 512


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Where a split's shard lies."""
    return folder / f"{split}-{number:05d}.tar"


def index_path(folder: Path, split: str) -> Path:
    """Where a split's index lies: an array of RECORD, in the order of the samples."""
    return folder / f"{split}.index.npy"


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of the bytes, as the index and TFRecords have it."""
    return int(google_crc32c.value(data))


class ShardWriter:
    """One shard on its way into a file: samples are added in order."""

    def __init__(self, file: BinaryIO, number: int) -> None:
        self._number = number
        self._tar = tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115  closed by close
        self.records: list[tuple[int, int, int, int, int, int, int]] = []

    def add(self, key: int, image: Encoded, label: int) -> None:
        """Append a sample; `key` is its number in the split."""
        name = f"{key:08d}"
        offset = self._tar.offset + tarfile.BLOCKSIZE  # behind the member's header
        self._member(f"{name}{image.suffix}", image.data)
        self._member(f"{name}.cls", str(label).encode())
        self.records.append(
            (self._number, len(image.data), offset, label, crc32c(image.data), image.width, image.height)
        )

    def close(self) -> None:
        """End the archive; the file stays open."""
        self._tar.close()

    def _member(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._tar.addfile(member, io.BytesIO(data))


def _allow_files(count: int) -> None:
    """Let this process have so many files open beside others, as far as it may: the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class Shards:
    """One split of a prepared folder: random access to samples; safe to read from several threads."""

    def __init__(self, folder: Path, split: str) -> None:
        """Raises InputError when the index or a shard is missing or shorter than the index says."""
        manifest = read_manifest(folder)
        counts = manifest["splits"][split]
        self.paths = [shard_path(folder, split, i) for i in range(counts["shards"])]
        _allow_files(4 * len(self.paths))  # those of two splits, and their copies
        try:
            self.index: NDArray[np.void] = np.load(index_path(folder, split), mmap_mode="r")
            self.files: list[BinaryIO] = [path.open("rb") for path in self.paths]
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {folder}: {error}: prepare again") from None
        if self.index.dtype != RECORD or len(self.index) != counts["images"]:
            raise InputError(f"{index_path(folder, split)} does not belong to {folder / MANIFEST}: prepare again")
        self._copies: Path | None = None
        self._copied: dict[int, BinaryIO] = {}
        for path, size in zip(self.paths, counts["bytes"], strict=True):
            if path.stat().st_size != size:
                raise InputError(f"{path} has {path.stat().st_size:,} bytes, not {size:,}: prepare again")

    @property
    def labels(self) -> NDArray[np.int64]:
        """Label of each sample, shape (n,)."""
        return self.index["label"].astype(np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def use_copies(self, folder: Path) -> None:
        """Read each shard from its copy in this folder, from when that is there on."""
        self._copies = folder

    def read(self, i: int, run: Run | None = None) -> bytes:
        """Sample i's encoded image, from a run that holds it or from disk.

        Raises OSError when its checksum is wrong; errors of a copy or a run are mended silently.
        """
        record = self.index[i]
        shard, offset, length = (int(record[key]) for key in ("shard", "offset", "length"))
        if run is not None:
            begin, held = run[shard]
            data = held[offset - begin : offset - begin + length]
            if crc32c(data) == record["crc32c"]:
                return data
        copied = self._copy_of(shard)
        for file in (copied, self.files[shard]):
            if file is not None:
                data = os.pread(file.fileno(), length, offset)
                if crc32c(data) == record["crc32c"]:
                    return data
        raise OSError(f"checksum differs from the index: the shard is damaged at byte {offset:,}")

    def read_run(self, first: int, last: int) -> Run:
        """Samples [first, last) as they lie on disk, in one read of each shard that holds some of them."""
        records, run = self.index[first:last], {}
        for shard in np.unique(records["shard"]).tolist():
            held = records[records["shard"] == shard]
            begin, end = int(held[0]["offset"]), int(held[-1]["offset"]) + int(held[-1]["length"])
            file = self._copy_of(shard) or self.files[shard]
            run[shard] = begin, os.pread(file.fileno(), end - begin, begin)
        return run

    @property
    def bytes_per_image(self) -> float:
        """Mean bytes of a sample's image."""
        return float(self.index["length"].mean())

    def _copy_of(self, shard: int) -> BinaryIO | None:
        if self._copies is not None and shard not in self._copied:
            try:
                self._copied[shard] = (self._copies / self.paths[shard].name).open("rb")
            except FileNotFoundError:
                return None
        return self._copied.get(shard)

    def size(self, i: int) -> int:
        """Bytes of sample i's image."""
        return int(self.index[i]["length"])

    def name(self, i: int) -> str:
        """Sample i as people find it: shard and key."""
        return f"{self.paths[int(self.index[i]['shard'])]}:{i:08d}"
