"""Tar files of images, webdataset's among them.

A sample's files have one key: the name up to the first dot of its last part. The label is the decimal number or the
text in KEY.cls, else what KEY.json has as "label". Nothing is unpacked.
"""

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_named
from cputrain.data.formats.dataset import LabeledImages, OwnSplits
from cputrain.data.formats.places import is_hidden, is_image, shard_files

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


LABEL = "label"  # in KEY.json
UNLABELED = -1  # as in the test splits of others
MOST_LABEL_BYTES = 1 << 20

Place = tuple[int, int]
"""Offset and length of a member."""


class TarImages(LabeledImages):
    """The images of one split's tar files."""

    def __init__(self, paths: list[Path]) -> None:
        """Find images and labels in one pass over all headers. Raises InputError where a sample lacks one of them."""
        self.paths = paths
        self._files = [path.open("rb") for path in paths]
        self._names: list[str] = []
        self.found: list[int | str] = []
        self.empty: list[Path] = []
        rows: list[tuple[int, int, int]] = []
        for number, path in enumerate(paths):
            before = len(rows)
            for name, (offset, length), label in _samples(path, self._files[number].fileno()):
                rows.append((number, offset, length))
                self._names.append(name)
                self.found.append(label)
            if len(rows) == before:
                self.empty.append(path)
        self._rows = np.array(rows, dtype=np.int64).reshape(len(rows), 3)

    def label_by(self, numbers: dict[int | str, int]) -> None:
        """Set the labels; `numbers` maps each label that was found to a class number from 0."""
        self._labels = np.array([numbers[label] for label in self.found], dtype=np.int64)

    def read(self, i: int) -> bytes:
        """The member's bytes. Raises OSError where the file ends before them."""
        file, offset, length = self._rows[i].tolist()
        data = os.pread(self._files[file].fileno(), length, offset)
        if len(data) < length:
            raise OSError(f"{self.paths[file]} ends within it")
        return data

    def size(self, i: int) -> int:
        """The member's length."""
        return int(self._rows[i, 2])

    def name(self, i: int) -> str:
        """The tar file's path and the member's name."""
        return f"{self.paths[int(self._rows[i, 0])]}:{self._names[i]}"


def open_webdataset(root: Path) -> OwnSplits:
    """Open the tar files of a folder, splits by the files' names. Raises InputError that names what is wrong."""
    found = shard_files(root)
    if "train" not in found:
        raise InputError(f"{root} has no tar file of the training split, only of {', '.join(found) or 'none'}")
    splits = {split: TarImages(paths) for split, paths in found.items()}
    notes = []
    for split, images in splits.items():
        if len(images.empty) == len(images.paths):
            raise InputError(f"{images.paths[0]} has no image, nor have others of its split: is the download complete?")
        if images.empty:
            named = first_named([path.name for path in images.empty])
            notes.append(f"{root}: {named} of the {split} split: no image in it")
    for split in [split for split, images in splits.items() if split != "train" and set(images.found) == {UNLABELED}]:
        del splits[split]
        notes.append(f"{root}: the {split} split has no labels, only {UNLABELED}: it is left out")
    labels = set(splits["train"].found)
    if negative := [label for label in labels if isinstance(label, int) and label < 0]:
        raise InputError(
            f"{found['train'][0]} has samples of label {min(negative)}; classes are numbers from 0, or texts: leave "
            "out what has no label"
        )
    names = sorted(labels, key=lambda label: (isinstance(label, str), label))
    for split, images in splits.items():
        if extra := set(images.found) - labels:
            raise InputError(f"{found[split][0]}: label {min(extra, key=str)!r} is not in the training files")
        images.label_by({label: number for number, label in enumerate(names)})
    if "val" not in splits and "test" in splits:
        splits["val"] = splits.pop("test")
    return OwnSplits(classes=tuple(map(str, names)), notes=tuple(notes), **splits)


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
