"""The Parquet and Arrow files of a folder, by split: as on the Hugging Face Hub, or as `save_to_disk` writes them."""

import re
from pathlib import Path

SUFFIXES = (".parquet", ".arrow")
MOST_FOLDERS = 100  # an image folder may have thousands of classes
# The names of splits that the Hub understands; a file without any of them is of the training split.
NAMES = {
    "train": ("train", "training"),
    "val": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {name: split for split, names in NAMES.items() for name in names}


def has_tables(root: Path) -> bool:
    """Whether a folder contains Parquet or Arrow files."""
    return bool(_files(root))


def tables_below(root: Path) -> list[str]:
    """The folders of a folder that contain such files, as the configurations of a data set on the Hub are; [] where
    it is an image folder itself."""
    if not root.is_dir() or (root / "train").is_dir():
        return []
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()][:MOST_FOLDERS]
    return [str(path) for path in folders if has_tables(path)]


def tables_by_split(root: Path) -> dict[str, list[Path]]:
    """The files of each split, in the order of their names."""
    found: dict[str, list[Path]] = {}
    for path in _files(root):
        found.setdefault(_split_of(path.relative_to(root)), []).append(path)
    return found


def _files(root: Path) -> list[Path]:
    """Those in the folder itself, in data/, or in a folder that has a split's name; no others are looked for, as an
    image folder may have a million files."""
    folders = [root, *(root / name for name in ("data", *SPLIT_OF))]
    return sorted(path for folder in folders for suffix in SUFFIXES for path in folder.glob(f"*{suffix}"))


def _split_of(path: Path) -> str:
    words = [word for part in path.parts for word in re.split(r"[^a-z0-9]+", part.lower())]
    return next((SPLIT_OF[word] for word in words if word in SPLIT_OF), "train")
