"""Copying shards to the local disk of each host, by one of its workers, while all of them already train."""

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cputrain.affinity.errors import InputError
from cputrain.affinity.kernel.binding import bind_thread
from cputrain.affinity.ranks.rank import Rank
from cputrain.comm.group import all_gather
from cputrain.data.formats.dataset import Dataset
from cputrain.data.formats.shards import Shards
from cputrain.files import write_with

logger = logging.getLogger(__name__)

BLOCK = 16 << 20  # bytes that are read at once: parallel file systems want large reads


@contextmanager
def staged(dataset: Dataset, where: str | None, rank: Rank, cpus: tuple[int, ...]) -> Iterator[None]:
    """Copy the shards into a folder of `where`, and read each from its copy as soon as it exists.

    The first worker of each host copies, on these CPUs; the copies are removed at the end, and those that a killed job
    has left are used. Raises InputError on all ranks where the data has no shards, or a host's disk is too small.
    `where` None: nothing is copied.
    """
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
            while block := original.read(BLOCK):
                if stop.is_set():
                    raise InterruptedError("the training has ended")
                file.write(block)

    write_with(target, write)
