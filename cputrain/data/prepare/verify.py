"""Comparing every byte of a prepared folder with its index."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cputrain.data.formats.manifest import read_manifest
from cputrain.data.formats.shards import Shards, crc32c, shard_format_of
from cputrain.data.formats.tfrecord import HEAD, TAIL, masked


def problems(folder: Path, split: str) -> Iterator[str | None]:
    """The problem of each sample of a split, in order, or None.

    Raises InputError where the index or a shard is missing or has another size.
    """
    manifest = read_manifest(folder)
    check_container = {"tar": _in_archive, "tfrecord": _in_records}[shard_format_of(manifest)]
    shards = Shards(folder, split)
    for number, path in enumerate(shards.paths):
        mine = np.flatnonzero(shards.index["shard"] == number)
        with path.open("rb") as file:
            end = 0
            for i in mine.tolist():
                yield _image_problem(file, shards, i, len(manifest["classes"])) or check_container(file, shards, i, end)
                end = int(shards.index[i]["offset"]) + int(shards.index[i]["length"])


def _image_problem(file: BinaryIO, shards: Shards, i: int, classes: int) -> str | None:
    """The problem of the image's bytes or its label."""
    offset, length, label = (int(shards.index[i][key]) for key in ("offset", "length", "label"))
    file.seek(offset)
    if crc32c(file.read(length)) != int(shards.index[i]["crc32c"]):
        return f"{_place(shards, i)}: the image's checksum differs from the index"
    return f"{_place(shards, i)}: label {label}, but there are {classes} classes" if label >= classes else None


def _in_archive(file: BinaryIO, shards: Shards, i: int, _end: int) -> str | None:
    """The problem of the tar header before the image."""
    file.seek(int(shards.index[i]["offset"]) - tarfile.BLOCKSIZE)
    try:
        member = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError as error:
        return f"{_place(shards, i)}: the archive is damaged before it: {error}"
    if member.size != int(shards.index[i]["length"]) or not member.name.startswith(f"{i:08d}."):
        return f"{_place(shards, i)}: the archive has {member.name}, {member.size:,} bytes, in its place"
    return None


def _in_records(file: BinaryIO, shards: Shards, i: int, end: int) -> str | None:
    """The problem of the record around the image, which is its last field; the image before ends at byte `end`."""
    start = end + TAIL if end else 0
    file.seek(start)
    head = file.read(HEAD)
    length = int(shards.index[i]["offset"]) + int(shards.index[i]["length"]) - start - HEAD
    data, tail = file.read(length), file.read(TAIL)
    if int.from_bytes(head[:8], "little") != length or masked(head[:8]) != int.from_bytes(head[8:], "little"):
        return f"{_place(shards, i)}: the record's length at byte {start:,} is damaged"
    if masked(data) != int.from_bytes(tail, "little"):
        return f"{_place(shards, i)}: the record at byte {start:,} is damaged outside the image"
    return None


def _place(shards: Shards, i: int) -> str:
    return f"{shards.name(i)}, byte {int(shards.index[i]['offset']):,}"
