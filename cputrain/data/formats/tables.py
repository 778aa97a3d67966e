"""Images in Parquet or Arrow files: a column of encoded images and one of labels, as Hugging Face `datasets` has them.

The image column is of structs {bytes, path} or of bytes. Labels are class numbers with their names in the schema's
metadata (ClassLabel), or texts or numbers, whose sorted values are the classes. Parquet is read a row group at a time;
Arrow files are mapped into memory.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from cputrain.data.formats.dataset import LabeledImages, OwnSplits, PiecewiseImages
from cputrain.data.formats.label_columns import choose_columns, class_names_of, labels_of
from cputrain.data.formats.table_files import tables_by_split

CACHE_BYTES = 64 << 20  # of decompressed row groups of a split
PIECE_BYTES = 16 << 20  # of neighboring images that are kept for one place in a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of a file that are read at once: the first, how many, and a function that reads their images.

    `mapped`: they are mapped into memory, so that reading them costs nothing.
    """

    path: Path
    first: int
    rows: int
    load: Callable[[], Any]
    mapped: bool


class TableImages(LabeledImages, PiecewiseImages):
    """The images of one split's files."""

    def __init__(self, folder: Path, groups: Sequence[RowGroup], labels: NDArray[np.int64]) -> None:
        self._folder, self._groups, self._labels = folder, groups, labels
        self._starts = np.cumsum([0, *(group.rows for group in groups)])
        self._bytes = sum(path.stat().st_size for path in {group.path for group in groups})
        self._loaded: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def bytes_per_image(self) -> float:
        """The mean size of an image in the files."""
        return self._bytes / max(1, len(self))

    @property
    def usual_block(self) -> int:
        """The images of a row group, or as many of them as PIECE_BYTES hold; 0 where all stay in memory."""
        if self._bytes <= CACHE_BYTES or all(group.mapped for group in self._groups):
            return 0
        largest = max((group.rows for group in self._groups), default=1)
        return max(1, min(largest, int(PIECE_BYTES / max(1.0, self.bytes_per_image))))

    def read(self, i: int, pieces: Any = None) -> bytes:
        """Image i, from pieces in memory that contain it, or from its row group. Raises OSError where it has none."""
        if pieces is not None:
            first, images = pieces
            data = images[i - first]
            if isinstance(data, Exception):
                raise data
            return bytes(data)
        group, row = self._place(i)
        return self._bytes_of(self._images_of(group)[row])

    def read_pieces(self, first: int, last: int) -> Any:
        """The images [first, last), or the error of each that cannot be read, for `read`."""
        images: list[bytes | OSError] = []
        for i in range(first, last):
            try:
                images.append(self.read(i))
            except OSError as error:
                images.append(error)
        return first, images

    def size(self, _i: int) -> int:
        """The mean size: that of one image is known only when it is read."""
        return round(self.bytes_per_image)

    def name(self, i: int) -> str:
        """The file and the row."""
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
                while len(self._loaded) > 1 and sum(each.nbytes for each in self._loaded.values()) > CACHE_BYTES:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(number)
            return self._loaded[number]

    def _bytes_of(self, cell: Any) -> bytes:
        value = cell.as_py()
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if data is None and path:
            file = (self._folder / path).resolve()
            if not file.is_relative_to(self._folder.resolve()):
                raise OSError(f"the image is {path}, which is outside {self._folder}")
            return bytes(file.read_bytes())
        if data is None:
            raise OSError("the row has no image")
        return bytes(data)


def open_tables(root: Path, label: str | None = None) -> OwnSplits:
    """Open the Parquet or Arrow files of a folder, splits by the files' names; a split without labels is left out.

    `label` names the column with the labels; None: the only one. Raises InputError that names what is missing or wrong.
    """
    if not root.is_dir():
        raise InputError(f"{root} is not a folder: give the folder of the Parquet or Arrow files")
    tables = {split: [_open(path) for path in paths] for split, paths in tables_by_split(root).items()}
    if "train" not in tables:
        raise InputError(f"{root} has no files with train in their names, only of {', '.join(tables)}")
    first = tables["train"][0]
    image, label = choose_columns(first.path, first.schema, label)
    for table in (table for each in tables.values() for table in each):
        if missing := [name for name in (image, label) if name not in table.schema.names]:
            raise InputError(f"{table.path} has no column {missing[0]}, which {first.path} has")
    columns = {split: [_column(table, label) for table in each] for split, each in tables.items()}
    classes = class_names_of(first.schema, label, columns["train"])
    splits: dict[str, TableImages] = {}
    for split, each in tables.items():
        if not any(map(len, columns[split])):
            raise InputError(f"{each[0].path} has no rows: is the download complete?")
        labels = labels_of(f"{each[0].path}: column {label}", columns[split], classes, may_lack=split != "train")
        if labels is not None:
            splits[split] = TableImages(root, [group for table in each for group in table.groups(image)], labels)
    if "val" not in splits and "test" in splits:
        splits["val"] = splits.pop("test")
    return OwnSplits.of(classes.names, splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """An open file: its schema, a function that reads a whole column, and one that lists its row groups."""

    path: Path
    schema: Any
    column: Callable[[str], Any]
    groups: Callable[[str], list[RowGroup]]


def _open(path: Path) -> _Table:
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"{path} needs pyarrow: pip install 'cputrain[parquet]'") from None
    try:
        return _open_parquet(path) if path.suffix == ".parquet" else _open_arrow(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _column(table: _Table, name: str) -> Any:
    import pyarrow

    try:
        return table.column(name)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(table.path, error) from None


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"cannot read {path}: {str(error).splitlines()[0][:200]}: is the download complete?")


def _open_parquet(path: Path) -> _Table:
    from pyarrow import parquet

    file = parquet.ParquetFile(path, memory_map=True)
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


def _open_arrow(path: Path) -> _Table:
    import pyarrow

    table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()  # mapped: nothing is loaded
    return _Table(
        path=path,
        schema=table.schema,
        column=table.column,
        groups=lambda image: [
            RowGroup(path=path, first=0, rows=len(table), load=lambda: table.column(image), mapped=True)
        ],
    )
