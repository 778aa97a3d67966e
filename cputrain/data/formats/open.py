"""Formats of data folders, and their detection. A new format is a module and an entry of FORMATS."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import first_named, join_or, plural
from cputrain.data.formats.folder import FILES as LABEL_FILES
from cputrain.data.formats.folder import (
    class_folders_with_images,
    folders_in,
    folders_of_images,
    has_image,
    has_train_folder,
    read_folder,
)
from cputrain.data.formats.source import (
    MANIFEST,
    NO_SPLIT,
    TEST,
    TRAIN,
    VAL,
    Source,
    Split,
    UnreadableError,
    advice_for,
    files_by_split,
    read_data_manifest,
    split_of,
    visible_in_splits,
)

if TYPE_CHECKING:  # counting needs numpy only if records must be read
    from cputrain.data.formats.dataset import Dataset, Images

Files = dict[str, list[Path]]
"""The files of each split."""

TABLE_NAME = re.compile(r"\.(parquet|arrow|feather)(-\d+-of-\d+)?$", re.IGNORECASE)  # numbered by tfds
LISTS = (".csv", ".tsv", ".json", ".jsonl")  # may have labels of images
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
RECORD_NAME = re.compile(r"-\d+-of-\d+(\.gz)?$|\.tfrec(ord)?s?(\.gz)?$", re.IGNORECASE)
SHARD = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})", re.DOTALL)
NUMBERED = re.compile(r"(.*?)(\d{4,9})(\.[^\d]+)")  # imagenet1k-train-0012.tar
ENDING = re.compile(r"(\.(parquet|arrow|feather|tar|tgz|tfrec(ord)?s?|gz))+$", re.IGNORECASE)
MIN_IN_ROW = 10  # files; the numbers of fewer, without a leading zero, may be years
COPY = re.compile(r" \(\d+\)$| - copy$")  # as named by browsers, and by Windows
CACHE_OF_DATASETS = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow$")  # results of map and filter
ARCHIVES = {"ILSVRC2012_img_train.tar": "imagenet", "256_ObjectCategories.tar": "caltech256"}
MAX_FOLDERS = 100  # to search; an image folder may have thousands of classes


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFormat:
    """A file format: its name in the plural, its kind for `cputrain prepare`, and functions that find the files of each
    split in a folder, describe the first image with a label (an InputError if there is none), and read the files; the
    label column is only for tables. `names_files`: whether the images are files that these files name."""

    title: str
    kind: str
    find: Callable[[Path], Files]
    examine: Callable[[Path, Files], str]
    read: Callable[[Path, Files, str | None], Source]
    names_files: Callable[[Files], bool] = lambda _files: False

    def source(self, root: Path, label_column: str | None = None) -> Source:
        """Return the data in a folder of these files; without validation images, the test images are used for
        validation. Raises InputError."""
        if not root.is_dir():
            raise InputError(f"{root} is not a folder: give the folder of the {self.title}")
        files = self.find(root)
        if TRAIN not in files:
            other_suffixes = f", only of {', '.join(files)}" if files else " or any other"
            raise InputError(
                f"{root} has no {self.title} of the training split{other_suffixes}: give the folder that has them"
            )
        unsplit = files.pop(NO_SPLIT, [])
        notes = [note for split, paths in files.items() for note in _check_shards(split, paths)]
        used = {path for paths in files.values() for path in (*paths, *unsplit)}
        notes += _notes_of_others(root, self.title, lambda path: _is_data(path.name) and path not in used)
        if unsplit:
            names = first_named([path.name for path in unsplit])
            has = "names have" if len(unsplit) > 1 else "name has"
            notes.append(f"{root}: ignored {names}, because the {has} no split, unlike the others")
        source = self.read(root, files, label_column)
        if (unread := folders_of_images(root)) and not self.names_files(files):
            notes.append(f"{root}: ignored the images in {first_named(unread)}, because only {self.title} are read")
        source = replace(source, notes=(*notes, *source.notes))
        if VAL in source.splits or TEST not in source.splits:
            return source
        return replace(source, splits={TRAIN: source.splits[TRAIN], VAL: source.splits[TEST]})


def _is_data(name: str) -> bool:
    """Return whether a file's name is of one of FORMATS or of a known unsupported format."""
    is_read = TABLE_NAME.search(name) or RECORD_NAME.search(name) or name.lower().endswith(TAR_SUFFIXES)
    return bool(is_read or advice_for(name))


def _notes_of_others(root: Path, title: str, is_other: Callable[[Path], bool]) -> list[str]:
    """Return a line about files in a folder, its data/ and its splits that are not read; or no line."""
    ignored = [str(path.relative_to(root)) for path in visible_in_splits(root) if is_other(path) and path.is_file()]
    return [f"{root}: ignored {first_named(ignored)}, because only {title} are read"] if ignored else []


def read_class_folders(root: Path) -> Source:
    """Return the images of an image folder, as `read_folder` does; notes name files of other formats beside them."""
    source = read_folder(root)

    def is_other(path: Path) -> bool:
        return _is_data(path.name) or (path.suffix.lower() in LISTS and path.name not in LABEL_FILES)

    return replace(source, notes=(*source.notes, *_notes_of_others(root, "class folders", is_other)))


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
        if len(texts) < MIN_IN_ROW and not any(text.startswith("0") for text in texts):
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
    """Return the tar files of each split."""
    return files_by_split(root, lambda name: name.lower().endswith(TAR_SUFFIXES))


def _examine_tables(root: Path, files: Files) -> str:
    from cputrain.data.formats.tables import examine_tables

    return examine_tables(root, files)


def _examine_records(root: Path, files: Files) -> str:
    from cputrain.data.formats.records import examine_tfrecords

    return examine_tfrecords(root, files)


def _examine_tars(root: Path, files: Files) -> str:
    from cputrain.data.formats.records import examine_tars

    return examine_tars(root, files)


def _read_tables(root: Path, files: Files, label_column: str | None) -> Source:
    from cputrain.data.formats.tables import read_tables

    return read_tables(root, files, label_column)


def _names_files(files: Files) -> bool:
    from cputrain.data.formats.tables import names_files

    return names_files(files)


def _read_records(root: Path, files: Files, _label_column: str | None) -> Source:
    from cputrain.data.formats.records import read_tfrecords

    return read_tfrecords(root, files)


def _read_tars(root: Path, files: Files, _label_column: str | None) -> Source:
    from cputrain.data.formats.records import read_tars

    return read_tars(root, files)


TABLES = DataFormat(
    title="Parquet or Arrow files",
    kind="parquet",
    find=table_files,
    examine=_examine_tables,
    read=_read_tables,
    names_files=_names_files,
)
RECORDS = DataFormat(
    title="TFRecords", kind="tfrecord", find=record_files, examine=_examine_records, read=_read_records
)
TARS = DataFormat(title="tar files", kind="webdataset", find=tar_files, examine=_examine_tars, read=_read_tars)
FORMATS = (TABLES, RECORDS, TARS)


def detect_source(path: str | Path | None, label_column: str | None = None) -> Source:
    """Detect a data folder's format: shards of cputrain prepare, files of one of FORMATS, or an image folder.

    All that is in the folder decides: it is read as the only format in which it has images with labels, and notes name
    the files of other formats. `label_column` is the column of tables that has the labels, and chooses tables. Raises
    InputError if data is missing or invalid or has several formats, if the folder has archives to prepare, or if only
    folders below it have data.
    """
    if path is None:
        raise InputError("the recipe has no data.path: set data.path=DIR to a folder of images")
    root = Path(path)
    has_manifest = (root / MANIFEST).is_file()
    readable = {data_format: files for data_format in FORMATS if (files := data_format.find(root))}
    if has_manifest and _is_prepared(root, readable):
        return _prepared(root)
    for archive, kind in ARCHIVES.items():
        if (root / archive).is_file() and not (root / TRAIN).is_dir():
            raise InputError(f"{root} has {archive}: pack it with cputrain prepare {kind} {root} OUT, and give OUT")
    if label_column is not None:
        return TABLES.source(root, label_column)
    if readable:
        return _only_reading(root, readable)
    below = [] if class_folders_with_images(root) else _folders_below(root)
    for data_format in FORMATS:
        if folders := [str(path) for path in below if data_format.find(path)]:
            raise InputError(f"{root} has {data_format.title} only in folders below it: give {join_or(folders)}")
    return read_class_folders(root)


def _only_reading(root: Path, readable: Mapping[DataFormat, Files]) -> Source:
    """Return the data of a folder with files of these formats and perhaps class folders.

    Raises InputError if several of them have images with labels, or none.
    """
    folders = class_folders_with_images(root)
    if len(readable) == 1 and not folders:
        return next(iter(readable)).source(root)
    readings: dict[DataFormat, str] = {}
    errors: dict[DataFormat, InputError] = {}
    for data_format, files in readable.items():
        try:
            if TRAIN not in files:
                raise InputError(f"{root} has no {data_format.title} of the training split")
            readings[data_format] = data_format.examine(root, files)
        except InputError as error:
            errors[data_format] = error
    if folders and TABLES in readings and _lists_the_folders(root, readable[TABLES]):
        del readings[TABLES]
    unread = tuple(
        f"{root}: it is unknown whether the {data_format.title} are another data set: {error}"
        for data_format, error in errors.items()
        if isinstance(error, UnreadableError)
    )
    if folders and not readings:
        source = read_class_folders(root)
        return replace(source, notes=(*source.notes, *unread))
    if not readings:
        sizes = {
            data_format: sum(path.stat().st_size for paths in readable[data_format].values() for path in paths)
            for data_format in errors
        }
        raise errors[max(sizes, key=sizes.__getitem__)]
    if len(readings) == 1 and not folders:
        source = next(iter(readings)).source(root)
        return replace(source, notes=(*source.notes, *unread))
    ways = {data_format.kind: f"{data_format.title} ({where})" for data_format, where in readings.items()}
    if folders:
        ways = {"imagefolder": f"class folders ({first_named(folders)})", **ways}
    raise InputError(
        f"{root} has images with labels as {' and as '.join(ways.values())}: move one of them to another folder, or "
        f"pack the right one with cputrain prepare {join_or(tuple(ways))} {root} OUT"
        + (", or set data.label_column to use the tables" if TABLES in readings else "")
    )


def _lists_the_folders(root: Path, files: Files) -> bool:
    """Return whether tables only repeat or describe class folders: their paths are the training images and perhaps the
    others, with the folders' names as classes, or are of these images, with texts of which most differ (captions)."""
    from cputrain.data.formats.tables import rows_by_path

    if len(files) > 1:
        return False  # they may have other splits
    rows = rows_by_path(root, files)
    if rows is None:
        return False
    source = read_folder(root)
    folders: dict[str, str] = {}  # resolved once, not for each image

    def resolved(path: str) -> str:
        folder, name = os.path.split(path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        return f"{folders[folder]}/{name}"

    listed = {
        split: {(resolved(images.name(i)), source.classes[k]) for i, k in enumerate(images.labels.tolist())}
        for split, images in ((split, part.load()) for split, part in source.splits.items())
    }
    images = set().union(*listed.values())
    pairs = {(resolved(path), name) for path, name in rows}
    names = {name for _, name in pairs}
    if {path for path, _ in pairs} <= {path for path, _ in images} and 2 * len(names) > len(pairs):
        return len(names) > len(source.classes)  # captions; a class has several images
    return listed[TRAIN] <= pairs <= images


def open_dataset(path: str | None, *, val_fraction: float | None = None, label_column: str | None = None) -> "Dataset":
    """Open a data folder of any format that `detect_source` knows, with validation images as in `Source.open`.

    Raises InputError if data is missing or invalid.
    """
    return detect_source(path, label_column).open(val_fraction)


def _is_prepared(root: Path, readable: Mapping[DataFormat, Files]) -> bool:
    """Return whether a folder with a manifest has an index, too, or else nothing that another program's manifest could
    be of."""
    return any(root.glob("*.index.npy")) or not (readable or class_folders_with_images(root))


def _prepared(root: Path) -> Source:
    """Return the splits of a prepared folder, as counted in its manifest."""
    manifest = read_data_manifest(root)

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
    folders: list[Path] = []
    waiting = [root] if root.is_dir() and not has_train_folder(root) else []
    for path in waiting:  # the loop appends to it
        if has_image(path):
            continue  # a class folder
        if path != root and any(data_format.find(path) for data_format in FORMATS):
            folders.append(path)
        else:
            waiting += [path / name for name in folders_in(path)][: MAX_FOLDERS - len(waiting)]
    return folders
