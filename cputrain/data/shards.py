"""Shards: files that others' readers open too, and an index for random access.

A folder holds manifest.json, SPLIT.index.npy and the shards. Those are SPLIT-00000.tar, ... for webdataset readers, a
sample being two members, KEY.jpg (or the suffix of its format) and KEY.cls with the label in decimal; or
train-00000-of-01024, validation-..., test-... for TensorFlow's readers.
"""

import os
import resource
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
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


def shard_paths(folder: Path, split: str, count: int, form: str) -> list[Path]:
    """Where a split's shards lie; `form` is "tar" or "tfrecord", whose files have TensorFlow's names."""
    if form == "tfrecord":
        name = {"val": "validation"}.get(split, split)
        return [folder / f"{name}-{number:05d}-of-{count:05d}" for number in range(count)]
    return [folder / f"{split}-{number:05d}.tar" for number in range(count)]


def form_of(manifest: dict[str, Any]) -> str:
    """What a prepared folder's shards are: "tar" or "tfrecord"."""
    return str(manifest["made"].get("format", "tar"))


def index_path(folder: Path, split: str) -> Path:
    """Where a split's index lies: an array of RECORD, in the order of the samples."""
    return folder / f"{split}.index.npy"


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of the bytes, as the index and TFRecords have it."""
    return int(google_crc32c.value(data))


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
        self.paths = shard_paths(folder, split, counts["shards"], form_of(manifest))
        _allow_files(5 * len(self.paths))  # those of three splits, and copies of two
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
