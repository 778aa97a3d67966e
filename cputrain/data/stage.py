"""Shards copied to a host's own disk by one of its workers, while all of them already train."""

import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from affinity.errors import InputError
from affinity.ranks.rank import Rank
from cputrain.comm.group import gather
from cputrain.data.images import Dataset
from cputrain.data.shards import Shards
from cputrain.files import write_with

BLOCK = 16 << 20  # bytes: what a parallel file system reads well at once


@contextmanager
def staged(dataset: Dataset, where: str | None, rank: Rank, pus: tuple[int, ...]) -> Iterator[None]:
    """Let the data's shards be read from copies in a folder of `where`, once these are there; removed at the end.

    The first worker of each host copies, on these PUs; what a killed job has left is used. Raises InputError on all
    ranks where the data has no shards, or a host's disk is too small. `where` None: nothing is copied.
    """
    if where is None:
        yield
        return
    splits = (dataset.train, dataset.val)
    if not all(isinstance(split, Shards) for split in splits):
        raise InputError("data.stage_dir copies shards, which data.path does not hold: cputrain prepare makes them")
    shards = [split for split in splits if isinstance(split, Shards)]
    paths = [path for split in shards for path in split.paths]
    folder = Path(where) / copies_name(paths)
    copies = rank.local_rank == 0
    problem = next((said for said in gather(_make_room(paths, folder) if copies else "") if said), "")
    if problem:
        raise InputError(problem)
    for split in shards:
        split.use_copies(folder)
    over = threading.Event()
    thread = threading.Thread(target=_copy_all, args=(paths, folder, pus, over), name="stage", daemon=True)
    if copies:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if copies:
            thread.join()
            shutil.rmtree(folder, ignore_errors=True)


def copies_name(paths: Sequence[Path]) -> str:
    """A folder's name that tells these shards, as they are now, from others."""
    told = "\n".join(f"{path.absolute()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)
    return f"cputrain-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _make_room(paths: Sequence[Path], folder: Path) -> str:
    """Make the folder; what is wrong with that, if anything."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        needed = sum(path.stat().st_size for path in paths if not (folder / path.name).is_file())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"data.stage_dir: {os.uname().nodename}: {error}"
    if needed > free:
        return (
            f"data.stage_dir={folder.parent}: {os.uname().nodename} has {free / 1e9:.1f} GB free there, the shards "
            f"need {needed / 1e9:.1f}: make room, or train without"
        )
    return ""


def _copy_all(paths: Sequence[Path], folder: Path, pus: tuple[int, ...], over: threading.Event) -> None:
    """Copy shard by shard; a copy has its name once it is whole. One that cannot be made is read where it lies."""
    os.sched_setaffinity(0, pus)
    for path in paths:
        if over.is_set():
            return
        if (folder / path.name).is_file():
            continue
        try:
            copy(path, folder / path.name, over)
        except OSError as error:
            print(f"warning: data.stage_dir: {path.name} is read where it lies: {error}")


def copy(source: Path, target: Path, over: threading.Event) -> None:
    """Copy a file in large blocks. Raises OSError where it cannot, or must end before its end."""

    def write(file: BinaryIO) -> None:
        with source.open("rb", buffering=0) as original:
            while block := original.read(BLOCK):
                if over.is_set():
                    raise InterruptedError("the training has ended before")
                file.write(block)

    write_with(target, write)
