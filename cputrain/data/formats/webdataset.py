"""Tar files of images, webdataset's among them.

A sample's files have one key: the name up to the first dot of its last part. The label is the decimal number or the
text in KEY.cls, else what KEY.json has as "label". Nothing is unpacked.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_named
from cputrain.data.formats.dataset import FileParts
from cputrain.data.formats.source import UNLABELED, Rows, Source, is_hidden, is_image, labeled_source
from cputrain.files import check_fetched

GZIP = b"\x1f\x8b"


Member = tuple[str, int, int]
"""Name, offset and length of a file in a tar."""


def members(archive: Path, start: int) -> Iterator[Member]:
    """Name, offset and length of the regular files in a tar that begins at byte `start` of a file.

    Nothing is unpacked, so names may be anything; links and hidden files are skipped. Raises InputError where the
    archive is compressed, ends early or has a name twice.
    """
    names: set[str] = set()
    try:
        with archive.open("rb") as file:
            if not start and file.read(2) == GZIP:
                raise InputError(
                    f"{archive} is gzipped, where no image can be read by itself: unpack it with gunzip, or with "
                    "tar -xzf where it has folders of classes"
                )
            if not start:
                check_fetched(archive)
            file.seek(start)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    if member.isfile() and not any(is_hidden(part) for part in Path(member.name).parts if part != ".."):
                        if member.name in names:
                            raise InputError(f"{archive} contains {member.name} twice: was something appended to it?")
                        names.add(member.name)
                        yield member.name, member.offset_data, member.size
                    tar.members.clear()  # type: ignore[attr-defined]  # it would keep all 1.3 million
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"cannot read {archive}: {error}: is the download complete?") from None


def tar_member(name: str, data: bytes) -> bytes:
    """A member of a tar: a header, the data, and zeros up to whole blocks."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def tar_end(size: int) -> bytes:
    """What ends a tar after members of `size` bytes: two blocks of zeros, and more up to whole records."""
    end = 2 * tarfile.BLOCKSIZE
    return bytes(end + -(size + end) % tarfile.RECORDSIZE)


def member_problem(file: BinaryIO, key: int, offset: int, length: int, _end: int) -> str | None:
    """What is wrong with the header before the image KEY.* at `offset`."""
    file.seek(offset - tarfile.BLOCKSIZE)
    try:
        member = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError as error:
        return f"the archive is damaged before it: {error}"
    if member.size != length or not member.name.startswith(f"{key:08d}."):
        return f"the archive has {member.name}, {member.size:,} bytes, in its place"
    return None


LABEL = "label"  # in KEY.json
MOST_LABEL_BYTES = 1 << 20


def read_tars(root: Path, files: Mapping[str, Sequence[Path]]) -> Source:
    """Find the images and labels in the tar files of a folder, in one pass over all headers.

    Raises InputError that names what is wrong.
    """
    found = {split: _rows(paths) for split, paths in files.items()}
    notes = [
        f"{root}: {first_named(empty)} of the {split} split: no image in it"
        for split, (rows, empty) in found.items()
        if empty and rows.labels
    ]
    labels = {label for label in found["train"][0].labels if label is not None}
    if negative := [label for label in labels if isinstance(label, int) and label < 0]:
        raise InputError(
            f"{files['train'][0]} has samples of label {min(negative)}; classes are numbers from 0, or texts: leave "
            "out what has no label"
        )
    classes = {label: str(label) for label in sorted(labels, key=lambda label: (isinstance(label, str), label))}
    each = {split: rows for split, (rows, _) in found.items()}
    return labeled_source(root, each, classes, labels_are_in="KEY.cls or KEY.json", notes=notes)


def _rows(paths: Sequence[Path]) -> tuple[Rows, list[str]]:
    """The samples of tar files, and the names of those that have none. Raises InputError where a sample lacks its image
    or label."""
    names: list[str] = []
    places: list[tuple[int, int, int]] = []
    labels: list[int | str | None] = []
    empty = []
    for number, path in enumerate(paths):
        before = len(names)
        for name, offset, length, label in _samples(path):
            names.append(name)
            places.append((number, offset, length))
            labels.append(None if label == UNLABELED else label)
        if len(names) == before:
            empty.append(path.name)

    def images(rows: list[int], numbers: list[int]) -> FileParts:
        return FileParts(paths, [places[row] for row in rows], numbers, [names[row] for row in rows])

    return Rows(labels=labels, where=paths[0], images=images), empty


def _samples(path: Path) -> Iterator[tuple[str, int, int, int | str]]:
    """The image's name, offset and length, and the label, of each sample, whose members follow one another."""
    if not path.stat().st_size:  # a writer that got no sample; tarfile takes it for no tar
        return
    with path.open("rb") as file:
        for _, sample in groupby(members(path, 0), key=lambda member: _key_and_suffix(member[0])[0]):
            yield _sample(path, file.fileno(), {_key_and_suffix(member[0])[1].lower(): member for member in sample})


def _key_and_suffix(name: str) -> tuple[str, str]:
    folder, _, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return f"{folder}/{stem}", suffix


def _sample(path: Path, file: int, sample: dict[str, Member]) -> tuple[str, int, int, int | str]:
    images = [entry for suffix, entry in sample.items() if "." not in suffix and is_image(f"x.{suffix}")]
    if len(images) != 1 or not {"cls", "json"} & sample.keys():
        names = [name for name, _, _ in sample.values()]
        in_folders = len(images) == len(sample) and "/" in names[0].removeprefix("./")
        cure = (
            "unpack the archive with tar -xf, and name the folder that has the folders of the classes"
            if in_folders
            else "pack images in folders of their classes with cputrain prepare imagefolder"
        )
        raise InputError(
            f"{path} has {', '.join(names)}: a sample is one image, KEY.jpg or another one, next to its class in "
            f"KEY.cls or KEY.json: {cure}"
        )
    label_name, offset, length = sample.get("cls") or sample["json"]
    text = os.pread(file, min(length, MOST_LABEL_BYTES), offset)
    try:
        label = text.decode().strip() if "cls" in sample else _label_in(json.loads(text))
        if type(label) not in (int, str) or label == "":
            raise ValueError(f"{label!r} is neither a number nor a text")
    except ValueError as error:
        raise InputError(f"{path}: {label_name} has no {LABEL}: {error}") from None
    text_of_label = str(label)
    return *images[0], int(text_of_label) if text_of_label.removeprefix("-").isdecimal() else text_of_label


def _label_in(values: object) -> object:
    if not isinstance(values, dict):
        raise ValueError("it is no object of names and values")
    if LABEL not in values:
        raise ValueError(f"it has {first_named(list(values)) or 'nothing'}")
    return values[LABEL]
