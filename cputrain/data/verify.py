"""Whether a prepared folder is what its index says, byte by byte."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cputrain.data.manifest import read_manifest
from cputrain.data.shards import Shards, crc32c, form_of
from cputrain.data.tfrecord import HEAD, TAIL, masked


def problems(folder: Path, split: str) -> Iterator[str | None]:
    """What is wrong with each sample of a split, in order; None where nothing is.

    Raises InputError where the index or a shard is missing, or has not the length that it should have.
    """
    manifest = read_manifest(folder)
    contained = {"tar": _in_archive, "tfrecord": _in_records}[form_of(manifest)]
    shards = Shards(folder, split)
    for number, path in enumerate(shards.paths):
        mine = np.flatnonzero(shards.index["shard"] == number)
        with path.open("rb") as file:
            end = 0
            for i in mine.tolist():
                yield _wrong(file, shards, i, len(manifest["classes"])) or contained(file, shards, i, end)
                end = int(shards.index[i]["offset"]) + int(shards.index[i]["length"])


def _wrong(file: BinaryIO, shards: Shards, i: int, classes: int) -> str | None:
    """What is wrong with the image's bytes and its label."""
    offset, length, label = (int(shards.index[i][key]) for key in ("offset", "length", "label"))
    file.seek(offset)
    if crc32c(file.read(length)) != int(shards.index[i]["crc32c"]):
        return f"{_place(shards, i)}: the image's checksum is not the index's"
    return f"{_place(shards, i)}: label {label}, but there are {classes} classes" if label >= classes else None


def _in_archive(file: BinaryIO, shards: Shards, i: int, _end: int) -> str | None:
    """What is wrong with the tar member before the image."""
    file.seek(int(shards.index[i]["offset"]) - tarfile.BLOCKSIZE)
    try:
        member = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError as error:
        return f"{_place(shards, i)}: the archive is damaged before it: {error}"
    if member.size != int(shards.index[i]["length"]) or not member.name.startswith(f"{i:08d}."):
        return f"{_place(shards, i)}: the archive has {member.name}, {member.size:,} bytes, in its place"
    return None


def _in_records(file: BinaryIO, shards: Shards, i: int, end: int) -> str | None:
    """What is wrong with the record that the image ends; the image before it has ended at byte `end`."""
    start = end + TAIL if end else 0
    file.seek(start)
    head = file.read(HEAD)
    length = int(shards.index[i]["offset"]) + int(shards.index[i]["length"]) - start - HEAD
    data, tail = file.read(length), file.read(TAIL)
    if int.from_bytes(head[:8], "little") != length or masked(head[:8]) != int.from_bytes(head[8:], "little"):
        return f"{_place(shards, i)}: the record's length at byte {start:,} is damaged"
    if masked(data) != int.from_bytes(tail, "little"):
        return f"{_place(shards, i)}: the record at byte {start:,} is damaged beside the image"
    return None


def _place(shards: Shards, i: int) -> str:
    return f"{shards.name(i)}, byte {int(shards.index[i]['offset']):,}"
