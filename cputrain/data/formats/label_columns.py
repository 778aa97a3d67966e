"""The columns of a table of images: which one has the images, which one the labels, and the classes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from affinity.errors import InputError
from affinity.utf8 import one_form

IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "picture", "photo")
UNLABELED = -1
PATH_NAMES = (*IMAGE_NAMES, "path", "image_path", "img_path", "file", "filename", "file_name", "filepath", "file_path")
LABEL_NAMES = ("label", "labels", "class", "category", "target", "cls", "y")
WANTED = {"image": "images (bytes, structs with bytes, or paths of files)", "label": "labels (numbers or texts)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The names of the classes, and the number of each value that a label may have."""

    names: tuple[str, ...]
    numbers: dict[Any, int]


def choose_columns(path: Path, schema: Any, label: str | None) -> tuple[str, str]:
    """The names of the image column and of the label column, `label` if that is given.

    Columns that Hugging Face's metadata call Image and ClassLabel come first, then those of usual names, then the only
    one of a fitting type. Without a column of encoded images, a column of texts that has a usual name for one has the
    paths of image files. Raises InputError where that leaves none, or several.
    """
    types = {name: _type_of(schema.field(name).type) for name in schema.names}
    features = {name: _feature(schema, name).get("_type") for name in schema.names}
    kinds = {name: str(schema.field(name).type) for name in schema.names}
    encoded = [name for name in types if types[name] == "image"]
    paths = [name for name in types if name.lower() in PATH_NAMES and _is_text(schema.field(name).type)]
    image = _choose(path, "image", encoded or paths, features, "Image", PATH_NAMES, kinds)
    candidates = [name for name in types if types[name] == "label" and name != image]
    if label is not None:
        if label not in candidates:
            named = ", ".join(candidates) or "none"
            raise InputError(f"{path} has no column {label!r} of labels, which are numbers or texts: it has {named}")
        return image, label
    return image, _choose(path, "label", candidates, features, "ClassLabel", LABEL_NAMES, kinds)


def _choose(
    path: Path,
    what: str,
    fitting: list[str],
    features: dict[str, Any],
    feature: str,
    usual: Sequence[str],
    kinds: dict[str, str],
) -> str:
    for chosen in (
        [name for name in fitting if features[name] == feature],
        [name for name in fitting if name.lower() in usual],
        fitting,
    ):
        if len(chosen) == 1:
            return chosen[0]
        if chosen and what == "label":
            raise InputError(
                f"{path} has several columns of labels: set data.label_column to one of {', '.join(chosen)}"
            )
        if chosen:
            return chosen[0]
    only = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "none"
    raise InputError(f"{path} has no column of {WANTED[what]}: its columns are {only}")


def _type_of(kind: Any) -> str:
    """ "image" for bytes and structs with bytes, "label" for texts and numbers, else ""."""
    from pyarrow import types

    if types.is_struct(kind):
        return "image" if kind.get_field_index("bytes") >= 0 else ""
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "image"
    return "label" if _is_text(kind) or types.is_integer(kind) or types.is_boolean(kind) else ""


def _is_text(kind: Any) -> bool:
    """Whether a column is of texts, each written by itself or by its number in a list of all."""
    from pyarrow import types

    plain = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return bool(plain or types.is_dictionary(kind))


def _feature(schema: Any, name: str) -> dict[str, Any]:
    """What Hugging Face's metadata in a schema say of a column; empty where there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        found = features.get(name, {})
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def class_names_of(schema: Any, label: str, columns: Sequence[Any]) -> Classes:
    """The classes of a label column: a ClassLabel's names, or else the sorted values of the training files."""
    names = _feature(schema, label).get("names")
    if isinstance(names, list) and names:
        return Classes(names=tuple(map(str, names)), numbers={number: number for number in range(len(names))})
    found = {_value(value) for column in columns for value in column.unique().to_pylist() if value is not None}
    values = sorted(found)
    return Classes(names=tuple(map(str, values)), numbers={value: number for number, value in enumerate(values)})


def _value(label: Any) -> Any:
    """A label; a text in one Unicode form, as both forms of a class look the same."""
    return one_form(label) if isinstance(label, str) else label


def labels_of(where: str, columns: Sequence[Any], classes: Classes) -> NDArray[np.int64]:
    """The class number of each row, shape (n,); -1 where it has none (null, or -1 where that is no class).

    Raises InputError for a label that is no class.
    """
    values = [_value(value) for column in columns for value in column.to_pylist()]
    numbers = {None: UNLABELED, UNLABELED: UNLABELED} | classes.numbers
    wrong = next((row for row, value in enumerate(values) if value not in numbers), None)
    if wrong is not None:
        raise InputError(
            f"{where}: row {wrong:,} has the label {values[wrong]!r}, which is not a class of the training files"
        )
    return np.array([numbers[value] for value in values], dtype=np.int64)
