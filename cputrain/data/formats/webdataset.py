"""Tar files of images, webdataset's among them.

A sample's files have one key: the name up to the first dot of its last part. The label is the decimal number or the
text in KEY.cls, else what KEY.json has as "label". Nothing is unpacked.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_named
from cputrain.data.formats.dataset import FileParts
from cputrain.data.formats.source import Source, is_hidden, is_image, opened

GZIP = b"\x1f\x8b"


def members(archive: Path, start: int) -> Iterator[tuple[str, int, int]]:
    """Name, offset and length of the regular files in a tar that begins at byte `start` of a file.

    Nothing is unpacked, so names may be anything; links and hidden files are skipped. Raises InputError where the
    archive is compressed, ends early or has a name twice.
    """
    names: set[str] = set()
    try:
        with archive.open("rb") as file:
            if not start and file.read(2) == GZIP:
                raise InputError(f"{archive} is gzipped, where no image can be read by itself: unpack it with gunzip")
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
UNLABELED = -1  # as in the test splits of others
MOST_LABEL_BYTES = 1 << 20

Place = tuple[int, int]
"""Offset and length of a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    """The samples of one split: name, place (number of the file, offset, length) and label of each."""

    names: list[str]
    places: list[tuple[int, int, int]]
    labels: list[int | str]


def read_tars(root: Path, files: Mapping[str, Sequence[Path]]) -> Source:
    """Find the images and labels in the tar files of a folder, in one pass over all headers.

    Raises InputError that names what is wrong.
    """
    if "train" not in files:
        raise InputError(f"{root} has no tar file of the training split, only of {', '.join(files) or 'none'}")
    found = {split: _samples_of(paths) for split, paths in files.items()}
    notes = []
    for split, each in found.items():
        paths = files[split]
        with_images = {number for number, _, _ in each.places}
        if not with_images:
            raise InputError(f"{paths[0]} has no image, nor have others of its split: is the download complete?")
        if empty := [path.name for number, path in enumerate(paths) if number not in with_images]:
            notes.append(f"{root}: {first_named(empty)} of the {split} split: no image in it")
    for split in [split for split, each in found.items() if split != "train" and set(each.labels) == {UNLABELED}]:
        del found[split]
        notes.append(f"{root}: the {split} split has no labels, only {UNLABELED}: it is left out")
    labels = set(found["train"].labels)
    if negative := [label for label in labels if isinstance(label, int) and label < 0]:
        raise InputError(
            f"{files['train'][0]} has samples of label {min(negative)}; classes are numbers from 0, or texts: leave "
            "out what has no label"
        )
    names = sorted(labels, key=lambda label: (isinstance(label, str), label))
    number = {label: number for number, label in enumerate(names)}
    splits = {}
    for split, each in found.items():
        if extra := set(each.labels) - labels:
            raise InputError(f"{files[split][0]}: label {min(extra, key=str)!r} is not in the training files")
        splits[split] = opened(
            FileParts(files[split], each.places, [number[label] for label in each.labels], each.names)
        )
    return Source(place=str(root), classes=tuple(map(str, names)), splits=splits, notes=tuple(notes))


def _samples_of(paths: Sequence[Path]) -> _Samples:
    """The samples of tar files. Raises InputError where one lacks its image or label."""
    found = _Samples(names=[], places=[], labels=[])
    for number, path in enumerate(paths):
        with path.open("rb") as file:
            for name, place, label in _samples(path, file.fileno()):
                found.names.append(name)
                found.places.append((number, *place))
                found.labels.append(label)
    return found


def _samples(path: Path, file: int) -> Iterator[tuple[str, Place, int | str]]:
    """The image's name and place, and the label, of each sample, whose members follow one another."""
    if not path.stat().st_size:  # a writer that got no sample; tarfile takes it for no tar
        return
    key = ""
    sample: dict[str, tuple[str, Place]] = {}
    for name, offset, length in members(path, 0):
        folder, _, last = name.rpartition("/")
        stem, _, suffix = last.partition(".")
        if f"{folder}/{stem}" != key:
            if sample:
                yield _sample(path, file, sample)
            key, sample = f"{folder}/{stem}", {}
        sample[suffix.lower()] = name, (offset, length)
    if sample:
        yield _sample(path, file, sample)


def _sample(path: Path, file: int, sample: dict[str, tuple[str, Place]]) -> tuple[str, Place, int | str]:
    images = [entry for suffix, entry in sample.items() if "." not in suffix and is_image(f"x.{suffix}")]
    if len(images) != 1 or not {"cls", "json"} & sample.keys():
        has = ", ".join(name for name, _ in sample.values())
        raise InputError(
            f"{path} has {has}: a sample is KEY.jpg, or another image, and its class in KEY.cls or KEY.json: pack "
            "images in folders of their classes with cputrain prepare imagefolder"
        )
    name, place = images[0]
    label_name, (offset, length) = sample.get("cls") or sample["json"]
    text = os.pread(file, min(length, MOST_LABEL_BYTES), offset)
    try:
        label = text.decode().strip() if "cls" in sample else json.loads(text)[LABEL]
        if type(label) not in (int, str) or label == "":
            raise ValueError(f"{label!r} is neither a number nor a text")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: {label_name} has no {LABEL}: {type(error).__name__} {error}") from None
    text_of_label = str(label)
    return name, place, int(label) if text_of_label.removeprefix("-").isdecimal() else text_of_label
