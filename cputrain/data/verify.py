"""Whether a prepared folder is what its index says, byte by byte."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cputrain.data.manifest import read_manifest
from cputrain.data.shards import Shards, crc32c


def problems(folder: Path, split: str) -> Iterator[str | None]:
    """What is wrong with each sample of a split, in order; None where nothing is.

    Raises InputError where the index or a shard is missing, or has not the length that it should have.
    """
    classes = len(read_manifest(folder)["classes"])
    shards = Shards(folder, split)
    for number, path in enumerate(shards.paths):
        mine = np.flatnonzero(shards.index["shard"] == number)
        yield from _in_shard(path, shards, mine.tolist(), classes)


def _in_shard(path: Path, shards: Shards, samples: list[int], classes: int) -> Iterator[str | None]:
    with path.open("rb") as file:
        for i in samples:
            record = shards.index[i]
            offset, length, label = (int(record[key]) for key in ("offset", "length", "label"))
            where = f"{shards.name(i)}, byte {offset:,}"
            file.seek(offset - tarfile.BLOCKSIZE)
            header, data = file.read(tarfile.BLOCKSIZE), file.read(length)
            wrong = None
            if crc32c(data) != int(record["crc32c"]):
                wrong = f"{where}: the image's checksum is not the index's"
            elif label >= classes:
                wrong = f"{where}: label {label}, but there are {classes} classes"
            else:
                try:
                    member = tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")
                    if member.size != length or not member.name.startswith(f"{i:08d}."):
                        wrong = f"{where}: the archive has {member.name}, {member.size:,} bytes, in its place"
                except tarfile.HeaderError as error:
                    wrong = f"{where}: the archive is damaged before it: {error}"
            yield wrong
