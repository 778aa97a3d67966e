"""Shards: images packed into large files, read individually or in blocks, and copied to the local disks of the hosts.

A prepared folder contains manifest.json, SPLIT.index.npy and the shards. These are either SPLIT-00000.tar, ... for
webdataset readers, with two members per sample, KEY.jpg (or the suffix of its format) and KEY.cls with the label in
decimal; or train-00000-of-01024, validation-..., test-... for TensorFlow's readers.
"""

import hashlib
import logging
import os
import resource
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from cputrain.affinity.binding import bind_thread
from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import write_with
from cputrain.affinity.rank import Rank
from cputrain.affinity.wording import MIB
from cputrain.checksums import crc32c_of
from cputrain.data.formats.dataset import Dataset, Images, PiecewiseImages
from cputrain.data.formats.source import MANIFEST, read_data_manifest
from cputrain.data.order import Indices, block_length
from cputrain.files import check_downloaded

logger = logging.getLogger(__name__)

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


ShardPieces = dict[int, tuple[int, bytes]]
"""Pieces of shards in memory: shard number -> offset of its piece, and the piece's bytes."""

OTHER_FILES = 512  # open files of the process besides shards
COPY_BYTES = 16 << 20  # per read; parallel file systems are fast only with large reads


def shard_paths(folder: Path, split: str, count: int, shard_format: str) -> list[Path]:
    """Return the paths of a split's shards; `shard_format` is "tar", or "tfrecord" with TensorFlow's file names."""
    if shard_format == "tfrecord":
        name = {"val": "validation"}.get(split, split)
        return [folder / f"{name}-{number:05d}-of-{count:05d}" for number in range(count)]
    return [folder / f"{split}-{number:05d}.tar" for number in range(count)]


def shard_format_of(manifest: dict[str, Any]) -> str:
    """Return the format of a prepared folder's shards: "tar" or "tfrecord"."""
    return str(manifest["options"].get("format", "tar"))


def index_path(folder: Path, split: str) -> Path:
    """Return the path of a split's index: an array of RECORD, in the order of the samples."""
    return folder / f"{split}.index.npy"


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) checksum, which the index and TFRecords use."""
    return int(google_crc32c.value(data))


def _allow_files(count: int) -> None:
    """Raise this process's limit of open files to allow `count` more, up to the hard limit; it is usually 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def _open_index(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; prepare again") from None
    except Exception:  # noqa: BLE001  numpy evaluates the header as a Python literal: a damaged one may raise anything
        raise InputError(f"{path} is not an index of shards, or is damaged: prepare again") from None


class Shards(PiecewiseImages):
    """One split of a prepared folder: random access to samples, from several threads at the same time."""

    def __init__(self, folder: Path, split: str) -> None:
        """Open the index and all shards. Raises InputError if one is missing or has the wrong size."""
        manifest = read_data_manifest(folder)
        counts = manifest["splits"][split]
        self.paths = shard_paths(folder, split, counts["shards"], shard_format_of(manifest))
        _allow_files(5 * len(self.paths))  # shards of three splits, and copies of two
        self.index: NDArray[np.void] = _open_index(index_path(folder, split))
        try:
            self.files: list[BinaryIO] = [path.open("rb") for path in self.paths]
        except OSError as error:
            raise InputError(f"cannot read {folder}: {error}; prepare again") from None
        if self.index.dtype != RECORD or len(self.index) != counts["images"]:
            raise InputError(f"{index_path(folder, split)} does not belong to {folder / MANIFEST}: prepare again")
        self._copies: Path | None = None
        self._copied: dict[int, BinaryIO] = {}
        for path, size in zip(self.paths, counts["bytes"], strict=True):
            if path.stat().st_size != size:
                check_downloaded(path)
                raise InputError(f"{path} has {path.stat().st_size:,} bytes, not {size:,}: prepare again")
        self._sizes: list[int] = counts["bytes"]

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each sample, shape (n,)."""
        return self.index["label"].astype(np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def use_copies(self, folder: Path) -> None:
        """Read each shard from its copy in this folder once the copy exists."""
        self._copies = folder

    def read(self, i: int, pieces: ShardPieces | None = None) -> bytes:
        """Return sample i's encoded image, from pieces in memory that contain it, or from disk.

        Raises OSError if its checksum is wrong. If only a copy or a piece is damaged, the image is read again from the
        shard.
        """
        record = self.index[i]
        shard, offset, length = self._place(record)
        if pieces is not None:
            begin, piece = pieces[shard]
            data = piece[offset - begin : offset - begin + length]
            if crc32c(data) == record["crc32c"]:
                return data
        copied = self._copy_of(shard)
        for file in (copied, self.files[shard]):
            if file is not None:
                data = os.pread(file.fileno(), length, offset)
                if crc32c(data) == record["crc32c"]:
                    return data
        raise OSError(f"checksum differs from the index, the shard is damaged at byte {offset:,}")

    def _place(self, record: np.void) -> tuple[int, int, int]:
        """Return the shard, offset and length of a record. Raises OSError if the index is damaged. This is not checked
        on opening, which would read the entries of millions of images."""
        shard, offset, length = (int(record[key]) for key in ("shard", "offset", "length"))
        if shard >= len(self._sizes) or offset + length > self._sizes[shard]:
            raise OSError("the index is damaged, it places the image outside its shard")
        return shard, offset, length

    def read_pieces(self, first: int, last: int) -> ShardPieces:
        """Read the pieces of shards that contain the samples [first, last), one read per shard."""
        records, pieces = self.index[first:last], {}
        for shard in np.unique(records["shard"]).tolist():
            of_shard = records[records["shard"] == shard]
            (_, begin, _), (_, start, length) = self._place(of_shard[0]), self._place(of_shard[-1])
            file = self._copy_of(shard) or self.files[shard]
            pieces[shard] = begin, os.pread(file.fileno(), max(start + length - begin, 0), begin)
        return pieces

    @property
    def bytes_per_image(self) -> float:
        """The mean size of a sample's image in bytes."""
        return float(self.index["length"].mean())

    @property
    def usual_block(self) -> int:
        """0: images of a shard are read individually."""
        return 0

    def _copy_of(self, shard: int) -> BinaryIO | None:
        if self._copies is not None and shard not in self._copied:
            try:
                self._copied[shard] = (self._copies / self.paths[shard].name).open("rb")
            except FileNotFoundError:
                return None
        return self._copied.get(shard)

    def size(self, i: int) -> int:
        """Return the size of sample i's image in bytes."""
        return int(self.index[i]["length"])

    def name(self, i: int) -> str:
        """Return the shard and key of sample i."""
        return f"{self.paths[int(self.index[i]['shard'])]}:{i:08d}"


def split_checksum(images: Images, root: str) -> int:
    """Return the CRC-32C of the shards' index, which includes the checksum of each image; without shards, of the labels
    and of the images' names below `root`. No image is read."""
    if isinstance(images, Shards):
        return crc32c_of(np.ascontiguousarray(images.index).view(np.uint8))
    names = "\n".join(images.name(i).removeprefix(root) for i in range(len(images)))
    crc = crc32c_of(np.ascontiguousarray(images.labels).view(np.uint8))
    return int(google_crc32c.extend(crc, names.encode(errors="surrogateescape")))


def images_per_block(images: Images, block_mib: float, steps: int) -> int:
    """Return the images per block of `block_mib` MiB in epochs of `steps` steps. With 0, return the default of the
    images' format, for most of them 0, which reads images individually.

    Raises InputError if blocks are requested for images that can only be read one by one.
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
    """Images read in blocks of `length`; each image of `numbers` is read once, from any thread.

    A block is loaded when its first image is read, and stays in memory until its last image is read.
    """

    def __init__(self, images: PiecewiseImages, length: int, numbers: Indices) -> None:
        self._images, self._length = images, length
        self._unread = np.bincount(numbers // length).tolist()
        self._blocks: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image, shape (n,)."""
        return self._images.labels

    def __len__(self) -> int:
        return len(self._images)

    def read(self, i: int) -> bytes:
        """Return image i, from its block. Raises OSError if its checksum is wrong both there and in the file."""
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
        """Return the size of image i in bytes."""
        return self._images.size(i)

    def name(self, i: int) -> str:
        """Return where image i is stored."""
        return self._images.name(i)


@contextmanager
def staged_shards(dataset: Dataset, disk: str | None, rank: Rank, cpus: tuple[int, ...]) -> Iterator[None]:
    """Copy the shards into a folder below `disk`, and read each from its copy once that exists.

    The first worker of each host copies, on these CPUs. The copies are removed at the end; copies left by a killed job
    are used. Raises InputError on all ranks if the data has no shards, or a host's disk is too small.
    `disk` None: nothing is copied.
    """
    from cputrain.comm.group import all_gather  # imports torch, which reading shards does not need

    if disk is None:
        yield
        return
    splits = (dataset.train, dataset.val)
    if not all(isinstance(split, Shards) for split in splits):
        raise InputError("data.stage_dir copies shards, but data.path has none: make them with cputrain prepare")
    shards = [split for split in splits if isinstance(split, Shards)]
    paths = [path for split in shards for path in split.paths]
    folder = Path(disk) / copies_folder_name(paths)
    copies = rank.local_rank == 0
    problem = next((text for text in all_gather(_make_folder(paths, folder) if copies else "") if text), "")
    if problem:
        raise InputError(problem)
    for split in shards:
        split.use_copies(folder)
    stop = threading.Event()
    thread = threading.Thread(target=_copy_all, args=(paths, folder, cpus, stop), name="stage", daemon=True)
    if copies:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if copies:
            thread.join()
            shutil.rmtree(folder, ignore_errors=True)


def copies_folder_name(paths: Sequence[Path]) -> str:
    """Return the name of the folder of copies: a hash of the shards' paths, sizes and modification times."""
    identity = "\n".join(f"{path.absolute()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)
    return f"cputrain-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _make_folder(paths: Sequence[Path], folder: Path) -> str:
    """Create the folder and check the free space; return the problem, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        needed = sum(path.stat().st_size for path in paths if not (folder / path.name).is_file())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot use data.stage_dir={folder.parent} on {os.uname().nodename}: {error}"
    if needed > free:
        return (
            f"data.stage_dir={folder.parent} on {os.uname().nodename} has {free / 1e9:.1f} GB free, but the shards "
            f"need {needed / 1e9:.1f} GB: free some space, or set data.stage_dir=null"
        )
    return ""


def _copy_all(paths: Sequence[Path], folder: Path, cpus: tuple[int, ...], stop: threading.Event) -> None:
    """Copy shard by shard; a copy gets its name once it is complete. A shard that cannot be copied is read in place."""
    bind_thread(cpus)
    for path in paths:
        if stop.is_set():
            return
        if (folder / path.name).is_file():
            continue
        try:
            copy(path, folder / path.name, stop)
        except OSError as error:
            logger.warning("warning: data.stage_dir has no copy of %s, which is read in place: %s", path.name, error)


def copy(source: Path, target: Path, stop: threading.Event) -> None:
    """Copy a file in large blocks. Raises OSError if that fails, or `stop` is set before the end."""

    def write(file: BinaryIO) -> None:
        with source.open("rb", buffering=0) as original:
            while block := original.read(COPY_BYTES):
                if stop.is_set():
                    raise InterruptedError("the training has ended")
                file.write(block)

    write_with(target, write)
