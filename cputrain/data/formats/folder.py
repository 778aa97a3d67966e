"""An image folder: SPLIT/CLASS/*.jpg, or CLASS/*.jpg without splits."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from affinity.errors import InputError
from affinity.utf8 import one_form, text_of

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
SPLITS = ("train", "val", "test")
TRAIN, VAL, TEST = SPLITS


def split_folders(root: Path) -> dict[str, Path]:
    """The folders of the splits: train/, and those of val/ and test/ that contain class folders; of a folder CLASS/*
    itself, without splits, it alone as train.

    Without val/ the test/ folder is the validation split. Raises InputError where there are neither.
    """
    if root.is_file():
        raise InputError(f"data folder {root} is a file: give its folder, or pack an archive with cputrain prepare")
    if not root.is_dir():
        raise InputError(f"data folder {root} does not exist: give one with CLASS/*, or train/CLASS/* and val/CLASS/*")
    found = {split: root / split for split in SPLITS if (root / split).is_dir()}
    if TEST in found and not folders_in(found[TEST]):
        del found[TEST]  # images without classes, as in competitions
    if VAL not in found and TEST in found:
        found[VAL] = found.pop(TEST)
    if not any(folders_in(folder) for folder in found.values()) and _has_class_folders(root):
        return {TRAIN: root}
    if TRAIN not in found and any(root.glob("*-images-idx3-ubyte*")):
        raise InputError(
            f"{root} has MNIST's own files: pack them with cputrain prepare mnist {root} OUT, and name OUT"
        )
    if TRAIN not in found:
        raise InputError(
            f"{root} has no {TRAIN}/ folder: an image folder is train/CLASS/* and val/CLASS/*, or CLASS/* alone"
        )
    return found


def _has_class_folders(root: Path) -> bool:
    """Whether one of the folders in a folder contains an image."""
    for name in folders_in(root):
        with _entries(root / name) as entries:
            if any(entry.name.lower().endswith(SUFFIXES) for entry in entries):
                return True
    return False


def class_names(folders: dict[str, Path]) -> tuple[str, ...]:
    """The classes of train/, sorted: a class's place is its label.

    Raises InputError when train/ has no class, or another split has one that train/ lacks.
    """
    names = sorted(map(text_of, class_folders(folders[TRAIN]).values()))
    if not names:
        raise InputError(f"{folders[TRAIN]} has no class folders: put images into train/CLASS/")
    for folder in folders.values():
        if extra := sorted(class_folders(folder).keys() - set(map(one_form, names))):
            raise InputError(f"{folder} has classes that train/ lacks: {', '.join(extra[:5])}: add them or remove them")
    return tuple(names)


def class_folders(folder: Path) -> dict[str, str]:
    """The folders in a folder by their names in one Unicode form. Raises InputError where two have the same name."""
    found: dict[str, str] = {}
    for name in folders_in(folder):
        before = found.setdefault(one_form(text_of(name)), name)
        if before != name:
            raise InputError(
                f"{folder} has the class {name} twice, in two Unicode forms, as {text_of(before)!a} and "
                f"{text_of(name)!a}: move the images of one folder into the other"
            )
    return found


def other_forms(folders: dict[str, Path], classes: Sequence[str]) -> str:
    """A line about classes whose names have another Unicode form in another split, as macOS writes them; or ""."""
    for split, folder in folders.items():
        there = class_folders(folder)
        for name in classes:
            own = text_of(there.get(one_form(name), name))
            if own != name:
                return f"{split}/ has {name} in another Unicode form, {own!a} for {name!a}: it is the same class"
    return ""


def list_images(folder: Path, classes: Sequence[str], *, every_class: bool) -> tuple[list[str], list[int]]:
    """Paths and labels of the images in a folder CLASS/*, sorted by class and file name.

    Raises InputError when it contains no image, or with `every_class` when a class has none.
    """
    paths: list[str] = []
    labels: list[int] = []
    own_names = class_folders(folder)
    for label, name in enumerate(classes):
        if one_form(name) not in own_names:
            continue  # val/ need not have every class
        class_folder = folder / own_names[one_form(name)]
        with _entries(class_folder) as entries:
            names = sorted(e.name for e in entries if e.name.lower().endswith(SUFFIXES) and e.is_file())
        if every_class and not names:
            suffixes = " ".join(SUFFIXES)
            raise InputError(f"class {name} has no image in {class_folder} ({suffixes}): add some, or remove it")
        paths += [f"{class_folder}/{name}" for name in names]
        labels += [label] * len(names)
    if not paths:
        raise InputError(f"{folder} contains no image ({' '.join(SUFFIXES)}): put images into {folder.name}/CLASS/")
    return paths, labels


def image_files(paths: Sequence[Path]) -> list[str]:
    """The images that are named: files as they are; of a folder the images at any depth, sorted by path.

    Raises InputError for a path that is not there, or a folder without images.
    """
    found: list[str] = []
    for path in paths:
        if path.is_dir():
            named = [each for each in path.rglob("*") if each.name.lower().endswith(SUFFIXES)]
            inside = sorted(str(each) for each in named if each.is_file() or not each.exists())  # no folders, no pipes
            if not inside:
                raise InputError(f"{path} contains no image ({' '.join(SUFFIXES)}): name a folder with some")
            found += inside
        elif path.exists():
            found.append(str(path))
        else:
            raise InputError(f"image {path} does not exist: name image files, or a folder of them")
    return found


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    with _entries(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


@contextmanager
def _entries(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None
