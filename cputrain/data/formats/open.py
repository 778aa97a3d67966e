"""Formats of data folders, and their detection. A new format is a module and an entry of FORMATS."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_named, join_or, plural
from cputrain.data.formats.folder import folders_in, has_image, has_train_folder, read_folder
from cputrain.data.formats.source import (
    MANIFEST,
    NO_SPLIT,
    SPLIT_OF,
    TEST,
    TRAIN,
    VAL,
    Source,
    Split,
    advice_for,
    files_by_split,
    read_manifest,
    split_of,
    visible,
    visible_in_splits,
)

if TYPE_CHECKING:  # counting needs numpy only if records must be read
    from cputrain.data.formats.dataset import Dataset, Images

Files = dict[str, list[Path]]
"""The files of each split."""

TABLE_NAME = re.compile(r"\.(parquet|arrow|feather)(-\d+-of-\d+)?$", re.IGNORECASE)  # numbered by tfds
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
RECORD_NAME = re.compile(r"-\d+-of-\d+(\.gz)?$|\.tfrec(ord)?s?(\.gz)?$", re.IGNORECASE)
SHARD = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})", re.DOTALL)
NUMBERED = re.compile(r"(.*?)(\d{4,9})(\.[^\d]+)")  # imagenet1k-train-0012.tar
ENDING = re.compile(r"(\.(parquet|arrow|feather|tar|tgz|tfrec(ord)?s?|gz))+$", re.IGNORECASE)
LEAST_IN_ROW = 10  # files; the numbers of fewer, without a leading zero, may be years
COPY = re.compile(r" \(\d+\)$| - copy$")  # as named by browsers, and by Windows
CACHE_OF_DATASETS = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow$")  # results of map and filter
ARCHIVES = {"ILSVRC2012_img_train.tar": "imagenet", "256_ObjectCategories.tar": "caltech256"}
MOST_FOLDERS = 100  # to search; an image folder may have thousands of classes


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A file format: its name in the plural, a function that finds the files of each split in a folder, and one that
    reads them; the label column is only for tables."""

    title: str
    find: Callable[[Path], Files]
    read: Callable[[Path, Files, str | None], Source]

    def source(self, root: Path, label_column: str | None = None) -> Source:
        """Return the data in a folder of these files; without validation images, the test images are used for
        validation. Raises InputError."""
        if not root.is_dir():
            raise InputError(f"{root} is not a folder: give the folder of the {self.title}")
        files = self.find(root)
        if TRAIN not in files:
            found = f", only of {', '.join(files)}" if files else " or any other"
            raise InputError(f"{root} has no {self.title} of the training split{found}: give the folder that has them")
        others = files.pop(NO_SPLIT, [])
        notes = [note for split, paths in files.items() for note in _check_shards(split, paths)]
        taken = {path for paths in files.values() for path in (*paths, *others)}
        if unread := [path.name for path in visible_in_splits(root) if advice_for(path.name) and path not in taken]:
            notes.append(f"{root}: ignored {first_named(unread)}, because only {self.title} are read")
        if others:
            names = first_named([path.name for path in others])
            has = "names have" if len(others) > 1 else "name has"
            notes.append(f"{root}: ignored {names}, because the {has} no split, unlike the others")
        source = self.read(root, files, label_column)
        source = replace(source, notes=(*notes, *source.notes))
        if VAL in source.splits or TEST not in source.splits:
            return source
        return replace(source, splits={TRAIN: source.splits[TRAIN], VAL: source.splits[TEST]})


def _check_shards(split: str, paths: Sequence[Path]) -> list[str]:
    """Return a line for each set of numbered files in which some are missing.

    Raises InputError if two files are the same shard: a copy in another folder, in another format or by a browser.
    """
    lines = []
    seen: dict[tuple[Path | None, str], Path] = {}
    numbers: dict[tuple[Path, str, str], dict[int, str]] = {}
    rows: dict[tuple[Path, str, str], list[str]] = {}
    shards = {path: SHARD.match(path.name) for path in paths}
    stems = {path: (shard[0] if shard else ENDING.sub("", path.name)).lower() for path, shard in shards.items()}
    originals = {*stems.values()}
    for path, shard in shards.items():
        original = COPY.sub("", stems[path])
        name = original if original in originals else stems[path]
        first = seen.setdefault((None if split_of((name,)) == split else path.parent, name), path)
        if first != path:
            raise InputError(f"{path} and {first} are the same shard of the {split} split: remove one of the two")
        if shard:
            numbers.setdefault((path.parent, shard[1], shard[3]), {})[int(shard[2])] = path.name
        elif counted_name := NUMBERED.fullmatch(path.name):
            rows.setdefault((path.parent, counted_name[1], counted_name[3]), []).append(counted_name[2])
    for (folder, prefix, suffix), texts in rows.items():
        if len(texts) < LEAST_IN_ROW and not any(text.startswith("0") for text in texts):
            continue
        row = [int(text) for text in texts]
        if 0 < (absent := max(row) - min(row) + 1 - len(row)) < len(row):  # else the numbers count something else
            lines.append(
                f"{folder}: {plural(absent, 'number')} missing in {plural(len(row), 'file')} {prefix}*{suffix} from "
                f"{min(row)} to {max(row)}; is the download complete?"
            )
    for (_, prefix, total), present in numbers.items():
        start = 1 if int(total) in present else 0
        if (absent := int(total) - len(present)) > 0:
            number = next(number for number in count(start) if number not in present)
            name = next(iter(present.values()))
            width = len(SHARD.match(name)[2])  # type: ignore[index]  # it has matched before
            lines.append(
                f"{absent:,} of {plural(int(total), 'file')} of the {split} split missing, first "
                f"{prefix}-{number:0{width}}-of-{total}: is the download complete?"
            )
    return lines


def table_files(root: Path) -> Files:
    """Return the Parquet and Arrow files of each split, as on the Hugging Face Hub or as written by `save_to_disk`;
    not the caches that `datasets` keeps next to them, which have the same images."""
    return files_by_split(root, lambda name: _is_table(name) and not CACHE_OF_DATASETS.match(name))


def _is_table(name: str) -> bool:
    return TABLE_NAME.search(name) is not None


def record_files(root: Path) -> Files:
    """Return the TFRecords of each split: train-00000-of-01024, imagenet2012-train.tfrecord-00000-of-00001, x.tfrec."""
    return files_by_split(
        root, lambda name: RECORD_NAME.search(name) is not None and not _is_table(name) and advice_for(name) is None
    )


def tar_files(root: Path) -> Files:
    """Return the tar files of each split; none if the split folders have class folders."""
    files = files_by_split(root, lambda name: name.lower().endswith(TAR_SUFFIXES))
    has_classes = any(path.is_dir() for name in SPLIT_OF for path in visible(root / name))
    return {} if has_classes else files


def _read_tables(root: Path, files: Files, label_column: str | None) -> Source:
    from cputrain.data.formats.tables import read_tables

    return read_tables(root, files, label_column)


def _read_records(root: Path, files: Files, _label_column: str | None) -> Source:
    from cputrain.data.formats.records import read_tfrecords

    return read_tfrecords(root, files)


def _read_tars(root: Path, files: Files, _label_column: str | None) -> Source:
    from cputrain.data.formats.records import read_tars

    return read_tars(root, files)


TABLES = Format(title="Parquet or Arrow files", find=table_files, read=_read_tables)
RECORDS = Format(title="TFRecords", find=record_files, read=_read_records)
TARS = Format(title="tar files", find=tar_files, read=_read_tars)
FORMATS = (TABLES, RECORDS, TARS)


def detect(path: str | Path | None, label_column: str | None = None) -> Source:
    """Detect a data folder's format: shards of cputrain prepare, files of one of FORMATS, or an image folder.

    `label_column` is the column of tables that has the labels. Raises InputError if data is missing or invalid, if the
    folder has archives to prepare, or if only folders below it have data.
    """
    if path is None:
        raise InputError("the recipe has no data.path: set data.path=DIR to a folder of images")
    root = Path(path)
    if (root / MANIFEST).is_file():
        return _prepared(root)
    for archive, kind in ARCHIVES.items():
        if (root / archive).is_file() and not (root / TRAIN).is_dir():
            raise InputError(f"{root} has {archive}: pack it with cputrain prepare {kind} {root} OUT, and give OUT")
    for each in FORMATS:
        if each.find(root):
            return each.source(root, label_column)
    below = _folders_below(root)
    for each in FORMATS:
        if folders := [str(path) for path in below if each.find(path)]:
            raise InputError(f"{root} has {each.title} only in folders below it: give {join_or(folders)}")
    return read_folder(root)


def open_dataset(path: str | None, *, val_fraction: float | None = None, label_column: str | None = None) -> "Dataset":
    """Open a data folder of any format that `detect` knows, with validation images as in `Source.open`.

    Raises InputError if data is missing or invalid.
    """
    return detect(path, label_column).open(val_fraction)


def _prepared(root: Path) -> Source:
    """Return the splits of a prepared folder, as counted in its manifest."""
    manifest = read_manifest(root)

    def shards(split: str) -> "Images":
        from cputrain.data.formats.shards import Shards

        return Shards(root, split)

    splits = {
        split: Split(images=entry["images"], load=partial(shards, split)) for split, entry in manifest["splits"].items()
    }
    return Source(place=str(root), classes=tuple(manifest["classes"]), splits=splits, prepared=True)


def _folders_below(root: Path) -> list[Path]:
    """Return the nearest folders below `root` that have files of one of FORMATS, such as configurations of a data set
    on the Hub, or the folders of tensorflow_datasets and `datasets`; [] if `root` is an image folder."""
    found: list[Path] = []
    waiting = [root] if root.is_dir() and not has_train_folder(root) else []
    for path in waiting:  # the loop appends to it
        if has_image(path):
            continue  # a class folder
        if path != root and any(each.find(path) for each in FORMATS):
            found.append(path)
        else:
            waiting += [path / name for name in folders_in(path)][: MOST_FOLDERS - len(waiting)]
    return found
