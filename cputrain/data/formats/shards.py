"""Shards: images packed into large files, read by number or in blocks, copied to the local disks of a training's hosts.

A prepared folder contains manifest.json, SPLIT.index.npy and the shards. These are either SPLIT-00000.tar, ... for
webdataset readers, with two members for each sample, KEY.jpg (or the suffix of its format) and KEY.cls with the label
in decimal; or train-00000-of-01024, validation-..., test-... for TensorFlow's readers.
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

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import write_with
from cputrain.affinity.kernel.binding import bind_thread
from cputrain.affinity.ranks.rank import Rank
from cputrain.affinity.wording import MIB
from cputrain.data.formats.dataset import Dataset, Images, PiecewiseImages
from cputrain.data.formats.source import MANIFEST, read_manifest
from cputrain.data.order import Indices, block_length
from cputrain.files import check_fetched

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
"""Pieces of shards that are in memory: shard number -> offset of its piece, and the piece's bytes."""

OTHER_FILES = 512  # that a process has open beside shards


def shard_paths(folder: Path, split: str, count: int, shard_format: str) -> list[Path]:
    """The paths of a split's shards; `shard_format` is "tar" or "tfrecord", whose files have TensorFlow's names."""
    if shard_format == "tfrecord":
        name = {"val": "validation"}.get(split, split)
        return [folder / f"{name}-{number:05d}-of-{count:05d}" for number in range(count)]
    return [folder / f"{split}-{number:05d}.tar" for number in range(count)]


def shard_format_of(manifest: dict[str, Any]) -> str:
    """The format of a prepared folder's shards: "tar" or "tfrecord"."""
    return str(manifest["options"].get("format", "tar"))


def index_path(folder: Path, split: str) -> Path:
    """The path of a split's index: an array of RECORD, in the order of the samples."""
    return folder / f"{split}.index.npy"


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) checksum that the index and TFRecords use."""
    return int(google_crc32c.value(data))


def _allow_files(count: int) -> None:
    """Raise this process's limit of open files for `count` more, as far as permitted: the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _open_index(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}: prepare again") from None
    except Exception:  # noqa: BLE001  numpy evaluates the header as Python's literals: a damaged one may raise anything
        raise InputError(f"{path} is not an index of shards, or is damaged: prepare again") from None


class Shards(PiecewiseImages):
    """One split of a prepared folder: random access to samples, by several threads at once."""

    def __init__(self, folder: Path, split: str) -> None:
        """Open the index and all shards. Raises InputError when one is missing or has another size."""
        manifest = read_manifest(folder)
        counts = manifest["splits"][split]
        self.paths = shard_paths(folder, split, counts["shards"], shard_format_of(manifest))
        _allow_files(5 * len(self.paths))  # those of three splits, and copies of two
        self.index: NDArray[np.void] = _open_index(index_path(folder, split))
        try:
            self.files: list[BinaryIO] = [path.open("rb") for path in self.paths]
        except OSError as error:
            raise InputError(f"cannot read {folder}: {error}: prepare again") from None
        if self.index.dtype != RECORD or len(self.index) != counts["images"]:
            raise InputError(f"{index_path(folder, split)} does not belong to {folder / MANIFEST}: prepare again")
        self._copies: Path | None = None
        self._copied: dict[int, BinaryIO] = {}
        for path, size in zip(self.paths, counts["bytes"], strict=True):
            if path.stat().st_size != size:
                check_fetched(path)
                raise InputError(f"{path} has {path.stat().st_size:,} bytes, not {size:,}: prepare again")
        self._sizes: list[int] = counts["bytes"]

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each sample, shape (n,)."""
        return self.index["label"].astype(np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def use_copies(self, folder: Path) -> None:
        """Read each shard from its copy in this folder as soon as the copy exists."""
        self._copies = folder

    def read(self, i: int, pieces: ShardPieces | None = None) -> bytes:
        """Sample i's encoded image, from pieces in memory that contain it, or from disk.

        Raises OSError when its checksum is wrong. A wrong checksum in a copy or a piece is no error: the image is read
        again from the shard.
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
        raise OSError(f"checksum differs from the index: the shard is damaged at byte {offset:,}")

    def _place(self, record: np.void) -> tuple[int, int, int]:
        """The shard, offset and length of a record. Raises OSError where the index is damaged: not checked at opening,
        which reads nothing of an index of millions of images."""
        shard, offset, length = (int(record[key]) for key in ("shard", "offset", "length"))
        if shard >= len(self._sizes) or offset + length > self._sizes[shard]:
            raise OSError("the index is damaged: the image lies outside its shard")
        return shard, offset, length

    def read_pieces(self, first: int, last: int) -> ShardPieces:
        """The pieces of shards that contain the samples [first, last), each read in one go."""
        records, pieces = self.index[first:last], {}
        for shard in np.unique(records["shard"]).tolist():
            mine = records[records["shard"] == shard]
            (_, begin, _), (_, start, length) = self._place(mine[0]), self._place(mine[-1])
            file = self._copy_of(shard) or self.files[shard]
            pieces[shard] = begin, os.pread(file.fileno(), max(start + length - begin, 0), begin)
        return pieces

    @property
    def bytes_per_image(self) -> float:
        """The mean size of a sample's image in bytes."""
        return float(self.index["length"].mean())

    @property
    def usual_block(self) -> int:
        """0: an image of a shard can be read by itself."""
        return 0

    def _copy_of(self, shard: int) -> BinaryIO | None:
        if self._copies is not None and shard not in self._copied:
            try:
                self._copied[shard] = (self._copies / self.paths[shard].name).open("rb")
            except FileNotFoundError:
                return None
        return self._copied.get(shard)

    def size(self, i: int) -> int:
        """The bytes of sample i's image."""
        return int(self.index[i]["length"])

    def name(self, i: int) -> str:
        """The shard and key of sample i."""
        return f"{self.paths[int(self.index[i]['shard'])]}:{i:08d}"


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


COPY_BYTES = 16 << 20  # bytes that are read at once: parallel file systems want large reads


@contextmanager
def staged(dataset: Dataset, where: str | None, rank: Rank, cpus: tuple[int, ...]) -> Iterator[None]:
    """Copy the shards into a folder of `where`, and read each from its copy as soon as it exists.

    The first worker of each host copies, on these CPUs; the copies are removed at the end, and those that a killed job
    has left are used. Raises InputError on all ranks where the data has no shards, or a host's disk is too small.
    `where` None: nothing is copied.
    """
    from cputrain.comm.group import all_gather  # torch: not needed to read shards

    if where is None:
        yield
        return
    splits = (dataset.train, dataset.val)
    if not all(isinstance(split, Shards) for split in splits):
        raise InputError("data.stage_dir copies shards, but data.path has none: make them with cputrain prepare")
    shards = [split for split in splits if isinstance(split, Shards)]
    paths = [path for split in shards for path in split.paths]
    folder = Path(where) / copies_folder_name(paths)
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
    """The name of the folder of copies: a hash of the shards' paths, sizes and times of modification."""
    identity = "\n".join(f"{path.absolute()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)
    return f"cputrain-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _make_folder(paths: Sequence[Path], folder: Path) -> str:
    """Make the folder and check the free space; returns the problem, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        needed = sum(path.stat().st_size for path in paths if not (folder / path.name).is_file())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"data.stage_dir: {os.uname().nodename}: {error}"
    if needed > free:
        return (
            f"data.stage_dir={folder.parent}: {os.uname().nodename} has {free / 1e9:.1f} GB free there, the shards "
            f"need {needed / 1e9:.1f}: free some space, or set data.stage_dir=null"
        )
    return ""


def _copy_all(paths: Sequence[Path], folder: Path, cpus: tuple[int, ...], stop: threading.Event) -> None:
    """Copy shard by shard; a copy gets its name when it is complete. A shard that cannot be copied is read in place."""
    bind_thread(cpus)
    for path in paths:
        if stop.is_set():
            return
        if (folder / path.name).is_file():
            continue
        try:
            copy(path, folder / path.name, stop)
        except OSError as error:
            logger.warning("warning: data.stage_dir: %s is not copied, but read in place: %s", path.name, error)


def copy(source: Path, target: Path, stop: threading.Event) -> None:
    """Copy a file in large blocks. Raises OSError where that fails, or `stop` is set before the end."""

    def write(file: BinaryIO) -> None:
        with source.open("rb", buffering=0) as original:
            while block := original.read(COPY_BYTES):
                if stop.is_set():
                    raise InterruptedError("the training has ended")
                file.write(block)

    write_with(target, write)
