"""Parquet and Arrow tables of images and labels.

The image column has structs with bytes, path or both, or bytes, or paths of image files. Labels are class numbers with
their names in the schema's metadata (ClassLabel), or texts or numbers whose sorted values are the classes. Parquet is
read by row group; Arrow files are mapped into memory.
"""

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import one_form
from cputrain.affinity.wording import first_named, join_or, plural
from cputrain.data.formats.dataset import Images, LabeledImages, PiecewiseImages, subset_of
from cputrain.data.formats.source import TRAIN, UNLABELED, Source, SplitRows, UnreadableError, labeled_source
from cputrain.data.pixels import DAMAGE, open_image
from cputrain.files import check_downloaded

IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "picture", "photo")
PATH_NAMES = (*IMAGE_NAMES, "path", "image_path", "img_path", "file", "filename", "file_name", "filepath", "file_path")
LABEL_NAMES = ("label", "labels", "class", "category", "target", "cls", "y")
URL = re.compile(r"[a-z][a-z0-9+]+://", re.IGNORECASE)  # https://, s3://
CONTENT = {
    "image": "images (bytes, structs with bytes, or paths of files)",
    "label": "labels (whole numbers or texts, one for each image)",
}

CACHE_BYTES = 64 << 20  # of a split's decompressed row groups in memory
PIECE_BYTES = 16 << 20  # of neighboring images in memory per image of a batch
FILE_MAGIC = b"ARROW1"
IN_BASE64 = ("/9j/", "iVBORw0KGg", "R0lGOD", "UklGR", "data:")  # starts of JPEG, PNG, GIF and WebP in base64

EXAMINED = 10  # first rows, of which one must have an image


def choose_columns(tables: Sequence["_Table"], label: str | None) -> tuple[str, str]:
    """Return the names of the image column and of the label column, which is `label` if given, of training tables.

    Columns that Hugging Face's metadata declares as Image and ClassLabel come first, then columns with a usual name,
    then any column of a fitting type; of several image columns, the first is used. Without a column of encoded images,
    a text column with a usual name has the paths of image files. Of several label columns, the only one with more than
    one value is used. Raises InputError if there is no image or label column, or if several have labels.
    """
    path, schema = tables[0].path, tables[0].schema
    image, labels, candidates = _candidates(schema)
    if image is None or not (labels or label):
        lacks = CONTENT["image" if image is None else "label"]
        only = ", ".join(f"{name} ({schema.field(name).type})" for name in schema.names) or "none"
        raise InputError(f"{path} has no column of {lacks}: its columns are {only}")
    if label is not None:
        if label not in candidates:
            listed = ", ".join(candidates) or "none"
            raise InputError(f"{path} has no column {label!r} of {CONTENT['label']}: it has {listed}")
        return image, label
    if len(labels) > 1 and len(varying := _with_several_values(tables, labels)) == 1:
        labels = varying
    if len(labels) > 1:
        raise InputError(f"{path} has several columns of labels: set data.label_column to one of {', '.join(labels)}")
    return image, labels[0]


def _with_several_values(tables: Sequence["_Table"], names: Sequence[str]) -> list[str]:
    """Return the columns that have more than one value, so that they can tell classes apart."""

    def values(name: str) -> set[Any]:
        columns = (_column(table, name) for table in tables if name in table.schema.names)
        return {value for column in columns for value in column.unique().to_pylist() if value is not None}

    return [name for name in names if len(values(name)) > 1]


def _candidates(schema: Any) -> tuple[str | None, list[str], list[str]]:
    """Return the image column or None, the preferred columns of labels, and all that labels could be in."""
    types = {name: _type_of(schema.field(name).type) for name in schema.names}
    features = {name: _feature(schema, name).get("_type") for name in schema.names}

    def preferred(fitting: list[str], feature: str, usual: Sequence[str]) -> list[str]:
        of_feature = [name for name in fitting if features[name] == feature]
        return of_feature or [name for name in fitting if name.lower() in usual] or fitting

    encoded = [name for name in types if types[name] == "image"]
    paths = [name for name in types if name.lower() in PATH_NAMES and _is_text(schema.field(name).type)]
    images = preferred(encoded or paths, "Image", PATH_NAMES)
    image = next(iter([name for name in images if name.lower() in PATH_NAMES] or images), None)
    candidates = [name for name in types if types[name] == "label" and name != image]
    return image, preferred(candidates, "ClassLabel", LABEL_NAMES), candidates


def _type_of(kind: Any) -> str:
    """Return "image" for bytes and structs with bytes or a path, "label" for texts and whole numbers, else ""."""
    from pyarrow import types

    if types.is_struct(kind):
        return "image" if any(kind.get_field_index(name) >= 0 for name in ("bytes", "path")) else ""
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "image"
    return "label" if _is_text(kind) or types.is_integer(kind) or types.is_boolean(kind) else ""


def _is_text(kind: Any) -> bool:
    """Return whether a column has texts, plain or dictionary-encoded."""
    from pyarrow import types

    plain = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return bool(plain or types.is_dictionary(kind))


def _feature(schema: Any, name: str) -> dict[str, Any]:
    """Return Hugging Face's metadata about a column of a schema; {} if there is none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features.get(name, {})
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}
    return feature if isinstance(feature, dict) else {}


def classes_of(schema: Any, label: str, columns: Sequence[Any]) -> dict[Any, str]:
    """Return the class names by label: a ClassLabel's names, or else the sorted values of the training files."""
    names = _feature(schema, label).get("names")
    if isinstance(names, list) and names:
        return {number: str(name) for number, name in enumerate(names)}
    values = {_value(value) for column in columns for value in column.unique().to_pylist() if value is not None}
    return {value: str(value) for value in sorted(values)}


def _value(label: Any) -> Any:
    """Return a label, texts in one Unicode form: both forms of a class name look the same."""
    return one_form(label) if isinstance(label, str) else label


def labels_of(columns: Sequence[Any], classes: Mapping[Any, str]) -> list[Any]:
    """Return the label of each row; None if it has none (null, or -1 if that is not a class)."""
    missing = {None} | ({UNLABELED} - classes.keys())
    values = [_value(value) for column in columns for value in column.to_pylist()]
    return [None if value in missing else value for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of a file that are read together: the first one, their number, and a function that reads their images.

    `mapped`: they are mapped into memory, so that reading them costs nothing.
    """

    path: Path
    first: int
    rows: int
    load: Callable[[], Any]
    mapped: bool


class TableImages(LabeledImages, PiecewiseImages):
    """Images in the files of one split."""

    def __init__(self, folder: Path, groups: Sequence[RowGroup], labels: NDArray[np.int64]) -> None:
        self._folder, self._groups, self._labels = folder, groups, labels
        self._starts = np.cumsum([0, *(group.rows for group in groups)])
        self._bytes = sum(path.stat().st_size for path in {group.path for group in groups})
        self._loaded: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def bytes_per_image(self) -> float:
        """The mean size of an image in the files, in bytes."""
        return self._bytes / max(1, len(self))

    @property
    def usual_block(self) -> int:
        """The images of a row group, or as many of them as fit into PIECE_BYTES; 0 if all stay in memory."""
        if self._bytes <= CACHE_BYTES or all(group.mapped for group in self._groups):
            return 0
        largest = max((group.rows for group in self._groups), default=1)
        return max(1, min(largest, int(PIECE_BYTES / max(1.0, self.bytes_per_image))))

    def read(self, i: int, pieces: Any = None) -> bytes:
        """Return image i, from pieces that contain it, or from its row group. Raises OSError if the row has none."""
        if pieces is not None:
            first, images = pieces
            data = images[i - first]
            if isinstance(data, Exception):
                raise data
            return bytes(data)
        group, row = self._place(i)
        return self._bytes_of(self._images_of(group)[row], self._groups[group].path.parent)

    def read_pieces(self, first: int, last: int) -> Any:
        """Read the images [first, last); return them, or an error for each unreadable one, in a form for `read`."""
        images: list[bytes | OSError] = []
        for i in range(first, last):
            try:
                images.append(self.read(i))
            except OSError as error:
                images.append(error)
        return first, images

    def size(self, _i: int) -> int:
        """Return the mean size: an image's size is known only after reading it."""
        return round(self.bytes_per_image)

    def name(self, i: int) -> str:
        """Return the file and the row."""
        group, row = self._place(i)
        return f"{self._groups[group].path}:{self._groups[group].first + row}"

    def _place(self, i: int) -> tuple[int, int]:
        group = int(np.searchsorted(self._starts, i, side="right")) - 1
        return group, i - int(self._starts[group])

    def _images_of(self, number: int) -> Any:
        from pyarrow import ArrowException

        with self._lock:
            if number not in self._loaded:
                try:
                    self._loaded[number] = self._groups[number].load()
                except ArrowException as error:
                    raise OSError(f"the row group is damaged: {str(error).splitlines()[0][:200]}") from None
                while len(self._loaded) > 1 and sum(batch.nbytes for batch in self._loaded.values()) > CACHE_BYTES:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(number)
            return self._loaded[number]

    def _bytes_of(self, cell: Any, beside: Path) -> bytes:
        value = cell.as_py()
        if isinstance(value, str):
            value = {"path": value}
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if data is None and path and URL.match(path):
            raise OSError("the image is a URL; download the images, and store the paths of the files")
        if data is None and path:
            if path.startswith(IN_BASE64):
                raise OSError(f"the image is a text in base64, {path[:30]!r}, not its bytes or the path of a file")
            file = _file_named(path, beside, self._folder).resolve()
            if not file.is_relative_to(self._folder.resolve()):
                raise OSError(f"the image is a file outside {self._folder}: {path}")
            return bytes(file.read_bytes())
        if data is None:
            raise OSError("the row has no image")
        return bytes(data)


def _file_named(path: str, beside: Path, root: Path) -> Path:
    """Return the file that a table names by its path relative to the table's folder, or else to the root."""
    return beside / path if (beside / path).exists() else root / path


def _check_a_file_exists(root: Path, tables: Sequence["_Table"], image: str) -> None:
    """Raise InputError if these tables name image files, and none of them exists, or name none."""
    first, rows = None, 0
    for table in tables:
        if not _is_text(table.schema.field(image).type):
            return
        rows += len(_column(table, image))
        for path in filter(None, _column(table, image).to_pylist()):
            if URL.match(path) or path.startswith(IN_BASE64) or _file_named(path, table.path.parent, root).exists():
                return
            first = first or (table, path)
    if first is not None:
        table, path = first
        raise InputError(
            f"{table.path}: none of the image files in column {image} exists, first {root / path}: "
            "give the folder to which these paths are relative"
        )
    if rows:
        raise InputError(
            f"{tables[0].path}: column {image} has no path in {plural(rows, 'row')}: write the images' paths there"
        )


def examine_tables(root: Path, files: Mapping[str, Sequence[Path]]) -> str:
    """Describe the images and labels of the training files. Raises InputError if they have none: a table of paths needs
    the files that it names."""
    tables = [_open(path) for path in files[TRAIN]]
    table = next((table for table in tables if _has_images(table)), tables[0])
    image, labels, _ = _candidates(table.schema)
    if image is None or not labels or (len(labels) > 1 and _is_text(table.schema.field(image).type)):
        image, label = choose_columns([table, *filter(_has_images, tables)], None)  # raises the error
        labels = [label]
    if not _with_several_values([each for each in tables if _has_images(each)], labels):
        raise InputError(f"{table.path} has only one value in column {join_or(labels)}: a training needs two classes")
    groups = table.groups(image)
    rows = min(EXAMINED, sum(group.rows for group in groups))
    images = TableImages(root, groups, np.zeros(rows, dtype=np.int64))
    if not any(_is_image(images, row) for row in range(rows)):
        raise InputError(f"{table.path} has no image in the first rows of column {image}")
    return f"{table.path.relative_to(root)}, images in column {image}, labels in column {join_or(labels)}"


def _is_image(images: TableImages, row: int) -> bool:
    """Return whether an image can be read from a row and Pillow knows its format."""
    try:
        open_image(images.read(row), load=False)
    except DAMAGE:
        return False
    return True


def names_files(files: Mapping[str, Sequence[Path]]) -> bool:
    """Return whether the images of the training tables are files that they name."""
    columns = ((table, image) for table in map(_open, files[TRAIN]) if (image := _candidates(table.schema)[0]))
    groups = (group for table, image in columns for group in table.groups(image) if group.rows)
    cells = (cell.as_py() for group in groups for cell in group.load()[:1])
    first = next(cells, None)
    return isinstance(first, str) or (isinstance(first, dict) and first.get("bytes") is None)


def _has_images(table: "_Table") -> bool:
    return _candidates(table.schema)[0] is not None


def rows_by_path(root: Path, files: Mapping[str, Sequence[Path]]) -> set[tuple[str, str]] | None:
    """Return the path and the class name of each image of all tables of images; None if one lacks paths or classes."""
    rows = set()
    for table in filter(_has_images, (_open(path) for paths in files.values() for path in paths)):
        image, labels, _ = _candidates(table.schema)
        if image is None or len(labels) != 1:
            return None
        paths = _paths_in(_column(table, image))
        if paths is None:
            return None
        columns = [_column(table, labels[0])]
        classes = classes_of(table.schema, labels[0], columns)
        for path, label in zip(paths, labels_of(columns, classes), strict=True):
            places = (place for place in (table.path.parent, root) if path and (place / path).is_file())
            rows.add((str(next(places, root) / (path or "")), classes.get(label, "")))
    return rows


def _paths_in(column: Any) -> list[str | None] | None:
    """Return the paths of a column of texts or of structs; None if a row has an image's bytes."""
    from pyarrow import types

    if _is_text(column.type):
        return column.to_pylist()  # type: ignore[no-any-return]
    if not types.is_struct(column.type) or column.type.get_field_index("path") < 0:
        return None
    cells = [cell or {} for cell in column.to_pylist()]
    return None if any(cell.get("bytes") is not None for cell in cells) else [cell.get("path") for cell in cells]


def read_tables(root: Path, files: Mapping[str, Sequence[Path]], label: str | None = None) -> Source:
    """Open the Parquet or Arrow files of a folder; rows and splits without labels are left out.

    `label` is the column with the labels; None: the only one. Raises InputError if something is missing or invalid.
    """
    opened = {split: [_open(path) for path in paths] for split, paths in files.items()}
    tables = {split: [*filter(_has_images, split_tables)] or split_tables for split, split_tables in opened.items()}
    first = tables["train"][0]
    given = label
    image, label = choose_columns(tables["train"], given)
    for table in (table for each in tables.values() for table in each):
        if missing := [name for name in (image, label) if name not in table.schema.names]:
            raise InputError(f"{table.path} has no column {missing[0]}, which {first.path} has")
    for each in tables.values():
        _check_a_file_exists(root, each, image)
    columns = {split: [_column(table, label) for table in each] for split, each in tables.items()}
    classes = classes_of(first.schema, label, columns["train"])
    _check_class_names(first, [table for split_tables in tables.values() for table in split_tables], label)

    def rows_of(split: str) -> SplitRows:
        labels, groups = labels_of(columns[split], classes), [g for table in tables[split] for g in table.groups(image)]

        def images(rows: list[int], numbers: list[int]) -> Images:
            every = np.full(len(labels), UNLABELED)
            every[rows] = numbers
            split_images = TableImages(root, groups, every)
            return split_images if len(rows) == len(labels) else subset_of(split_images, np.array(rows))

        return SplitRows(labels=labels, file=tables[split][0].path, images=images)

    notes: list[str] = []
    if without := [
        table.path.name
        for split, split_tables in opened.items()
        for table in split_tables
        if table not in tables[split]
    ]:
        notes.append(f"{root}: ignored tables without a column of images, {first_named(without)}")
    if given is None and (constant := [name for name in _candidates(first.schema)[1] if name != label]):
        notes.append(f"{root}: labels are in column {label}, because {first_named(constant)} has only one value")
    alike = [name for name in first.schema.names if _type_of(first.schema.field(name).type) == "image"]
    if len(alike) > 1:
        notes.append(f"{root}: using the images in column {image}, one of {first_named(alike)}")
    if UNLABELED in classes:
        notes.append(f"{root}: label {UNLABELED} in column {label} is used as a class; remove its rows if it is none")
    rows = {split: rows_of(split) for split in tables}
    source = labeled_source(root, rows, classes, labels_are_in=f"column {label}")
    return replace(source, notes=(*notes, *source.notes))


def _check_class_names(first: "_Table", tables: Sequence["_Table"], label: str) -> None:
    """Raise InputError if a file names a class number differently than the first file does."""
    expected = _feature(first.schema, label).get("names")
    for table in tables:
        names = _feature(table.schema, label).get("names")
        if names and expected and names != expected:
            number = next(
                n for n, (actual, wanted_name) in enumerate(zip_longest(names, expected)) if actual != wanted_name
            )
            actual, expected_name = (listed[number] if number < len(listed) else None for listed in (names, expected))
            raise InputError(
                f"label {number} in column {label} is {actual!r} in {table.path}, but {expected_name!r} in "
                f"{first.path}: write both files with the same list of classes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """An open file: its schema, a function that reads a whole column, and one that lists its row groups."""

    path: Path
    schema: Any
    column: Callable[[str], Any]
    groups: Callable[[str], list[RowGroup]]


def _open(path: Path) -> _Table:
    with _readable(path):
        check_downloaded(path)
        return _open_parquet(path) if path.suffix.lower().startswith(".parquet") else _open_arrow(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of the block into an UnreadableError about this file."""
    try:
        import pyarrow
    except ImportError:
        raise UnreadableError(f"{path} needs pyarrow: pip install 'cputrain[parquet]'") from None
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        why = str(error).splitlines()[0][:200]
        raise UnreadableError(f"cannot read {path}: {why}; is the download complete?") from None


def _column(table: _Table, name: str) -> Any:
    with _readable(table.path):
        return table.column(name)


def _open_parquet(path: Path) -> _Table:
    from pyarrow import parquet

    file = parquet.ParquetFile(_mapped(path))
    counts = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    starts = [sum(counts[:number]) for number in range(len(counts))]

    def group(number: int, image: str) -> RowGroup:
        def load() -> Any:
            return file.read_row_group(number, columns=[image], use_threads=False).column(image)

        return RowGroup(path=path, first=starts[number], rows=counts[number], load=load, mapped=False)

    return _Table(
        path=path,
        schema=file.schema_arrow,
        column=lambda name: file.read(columns=[name], use_threads=False).column(name),
        groups=lambda image: [group(number, image) for number in range(len(counts))],
    )


def _mapped(path: Path) -> Any:
    """Map a file into memory, which loads nothing. pyarrow takes only bytes for a name that is not UTF-8."""
    import pyarrow

    return pyarrow.memory_map(os.fsencode(path))


def _open_arrow(path: Path) -> _Table:
    import pyarrow

    data = _mapped(path)
    is_file = data.read(len(FILE_MAGIC)) == FILE_MAGIC  # IPC file format (polars, Feather), or else the stream format
    data.seek(0)
    table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(data).read_all()
    return _Table(
        path=path,
        schema=table.schema,
        column=table.column,
        groups=lambda image: [
            RowGroup(path=path, first=0, rows=len(table), load=lambda: table.column(image), mapped=True)
        ],
    )
