"""Image folders: one folder per class, or flat with a file of labels."""

import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import one_form, text_of
from cputrain.affinity.wording import first_named, plural
from cputrain.data.formats.source import (
    NAMES,
    SPLIT_OF,
    SPLITS,
    TEST,
    TRAIN,
    VAL,
    Source,
    Split,
    advice_for,
    is_hidden,
    is_image,
    read_lines,
    suffix_of,
    visible_entries,
)

if TYPE_CHECKING:  # counting does not need numpy
    from cputrain.data.formats.dataset import Images

DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
SYNSETS = ("imagenet_2012_validation_synset_labels.txt", "synset_labels.txt", "val_synsets.txt")
# Of Kaggle's ImageNet ("ILSVRC2012_val_00000001,n01751748 85 1 499 272"), Tiny ImageNet ("val_0.JPEG n03444034 0 0").
FILES = ("LOC_val_solution.csv", "val_annotations.txt", *SYNSETS)
HEADER = "ImageId,"

KAGGLE = ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC")  # where Kaggle's ImageNet has train/ and val/
TABLES_OF_LABELS = (".csv", ".tsv", ".txt", ".json", ".jsonl")
WORD = re.compile("[a-z]+")  # train2017, test1
SHARD = re.compile("0[0-9]+|[0-9]{5,}")  # of img2dataset, which writes five digits by default; 0 and 1 may be classes
PARTS = frozenset(("images", "labels", "annotations", "masks", "jpegimages", "imagesets"))  # of detection data sets
MAX_SUBFOLDERS = 100  # subfolders to look into; a folder may have thousands of classes
LEVELS_ABOVE = 4  # from Kaggle's val/ to the folder that has its labels

# Data sets that their authors publish as arrays, not as image files: files in the folder, what they are, torchvision's
# name, and the folder's name as torchvision unpacks it ("" for any, None if torchvision cannot read these files).
ARRAYS = (
    (("data_batch_1", "test_batch"), "pickled arrays", "CIFAR10", "cifar-10-batches-py"),
    (("meta", "train", "test"), "pickled arrays", "CIFAR100", "cifar-100-python"),
    (("train_X.bin", "train_y.bin"), "binary arrays", "STL10", "stl10_binary"),
    (("train_32x32.mat", "test_32x32.mat"), "MATLAB arrays", "SVHN", ""),
    (("data_batch_1.bin", "test_batch.bin"), "binary arrays, not the pickled ones", "CIFAR10", None),
    (("train.bin", "test.bin", "fine_label_names.txt"), "binary arrays, not the pickled ones", "CIFAR100", None),
)


def has_labels(folders: Sequence[Path]) -> bool:
    """Return whether one of these folders has a file of labels."""
    return any((folder / name).is_file() for folder in folders for name in (*FILES, DEVKIT))


def flat_labels(folders: Sequence[Path], files: Sequence[str], images: Path) -> tuple[list[str], Path]:
    """Return the class of each of the `files`, which are all in `images` and sorted, and the label file.

    This is the first one found in `folders`: lines that begin with a file's name, with or without its suffix, and its
    class; or one class per line, in the order of `files`; or ImageNet's development kit. Raises InputError if there is
    none, or it does not match the images.
    """
    paths = [folder / name for name in (*FILES, DEVKIT) for folder in folders if (folder / name).is_file()]
    if not paths:
        raise InputError(
            f"{images} has {plural(len(files), 'image')}, but no labels: put {FILES[0]}, {DEVKIT} or {SYNSETS[0]} next "
            "to it, or sort the images into class folders"
        )
    source = paths[0]
    if source.name == DEVKIT:
        return _devkit(source, len(files), images), source
    rows = [
        line.replace(",", " ").split() for line in read_lines(source) if line.strip() and not line.startswith(HEADER)
    ]
    if all(len(words) > 1 for words in rows):
        by_name = {PurePosixPath(words[0]).stem: words[1] for words in rows}
        absent = next((name for name in files if PurePosixPath(name).stem not in by_name), None)
        if absent is not None:
            raise InputError(f"{source} has no line for {absent} in {images}: is it from another data set?")
        return [by_name[PurePosixPath(name).stem] for name in files], source
    if len(rows) != len(files):
        raise InputError(f"{source} has {plural(len(rows), 'line')}, but {images} has {plural(len(files), 'image')}")
    return [words[0] for words in rows], source


def check_classes(names: Sequence[str], classes: Sequence[str], source: Path, training: Path) -> None:
    """Raise InputError if the labels in `source` have a class that the training images lack."""
    if unknown := sorted(set(names) - set(classes)):
        raise InputError(f"{unknown[0]!r} in {source} is not a class of {training}: are both from the same data set?")


def _devkit(archive: Path, count: int, images: Path) -> list[str]:
    """Return the synset of each validation image; meta.mat maps the class numbers of the kit's ground truth to them."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise InputError(
            f"{archive.name} needs scipy: pip install scipy, or put {SYNSETS[0]} next to the images"
        ) from None
    try:
        with tarfile.open(archive) as tar:
            members_by_name = {Path(name).name: name for name in tar.getnames()}
            truth, meta = members_by_name.get("ILSVRC2012_validation_ground_truth.txt"), members_by_name.get("meta.mat")
            if truth is None or meta is None:
                raise InputError(f"{archive} lacks the ground truth or meta.mat: is it the development kit?")
            numbers_file, meta_file = tar.extractfile(truth), tar.extractfile(meta)
            assert numbers_file is not None and meta_file is not None, "tarfile returns None only for folders"
            numbers = [int(word) for word in numbers_file.read().split()]
            synsets = loadmat(meta_file, squeeze_me=True)["synsets"]
        by_number = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
        class_names = [by_number[number] for number in numbers]
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001  tarfile, zlib and scipy raise many types for a damaged file
        raise InputError(f"cannot read {archive}: {type(error).__name__} {error}; is the download complete?") from None
    if len(class_names) != count:
        raise InputError(
            f"{archive} has {plural(len(class_names), 'label')}, but {images} has {plural(count, 'image')}"
        )
    return class_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Images of a split: paths and labels; `others` counts the files that are not images, by suffix ("" for none)."""

    paths: list[str]
    labels: list[int]
    others: Counter[str]

    @property
    def split(self) -> Split:
        """The images as a Split."""

        def images() -> "Images":
            from cputrain.data.formats.dataset import ImageFiles  # imports numpy

            return ImageFiles(self.paths, self.labels)

        return Split(images=len(self.paths), labels=self.labels, load=images)


def read_folder(root: Path) -> Source:
    """List the images of train/CLASS/* and perhaps val/CLASS/* and test/CLASS/*, or of CLASS/* for training.

    Raises InputError if something is missing or invalid.
    """
    folders = split_folders(root)
    classes, notes = class_names(folders), _notes_beside(root, folders)
    if TEST in folders and not _has_any(folders[TEST], classes):  # as in competitions
        notes.append(f"ignored {folders[TEST]}, which has none of the class folders of {folders[TRAIN]}")
        del folders[TEST]
    listings = {split: _list_split(folder, classes, training=folders[TRAIN]) for split, folder in folders.items()}
    notes += [note for split, folder in folders.items() for note in folder_notes(folder, listings[split])]
    notes += other_forms(folders, classes)
    splits = {split: listing.split for split, listing in listings.items()}
    return Source(place=str(root), classes=classes, splits=splits, notes=tuple(notes))


def split_folders(root: Path) -> dict[str, Path]:
    """Return the folders of the splits, which may have other usual names (training, valid, testing). A folder CLASS/*
    without splits is returned as train.

    Without val/, the test/ folder is the validation split. Raises InputError if there is neither a training split nor a
    class.
    """
    if root.is_file():
        raise InputError(f"data folder {root} is a file: {advice_for(root.name) or 'give the folder that it is in'}")
    if not root.is_dir():
        raise InputError(f"data folder {root} does not exist: give one with CLASS/*, or train/CLASS/* and val/CLASS/*")
    root, folders = _folders_by_split(root)
    if VAL not in folders and TEST in folders and folders_in(folders[TEST]):
        folders[VAL] = folders.pop(TEST)
    if not any(folders_in(folder) for folder in folders.values()):
        if names := _class_folders_without_splits(root):
            _check_are_classes(root, names)
            return {TRAIN: root}
        _check_is_one_level(root)
    if TRAIN not in folders:
        _check_are_no_arrays(root)
    if TRAIN not in folders and any(root.glob("*-images-idx3-ubyte*")):
        raise InputError(
            f"{root} has MNIST's original files: pack them with cputrain prepare mnist {root} OUT, and give OUT"
        )
    if TRAIN not in folders:
        names = [path.name for path in visible_entries(root)]
        usual = "an image folder has train/CLASS/* and val/CLASS/*, or only CLASS/*"
        advice = _advice_for_any(names) or _advice_if_nested(root)
        if not advice:
            _check_are_no_parts(root, folders_in(root))
        raise InputError(f"{root} has no {TRAIN}/ folder, but {first_named(names) or 'nothing'}: {advice or usual}")
    return folders


def _folders_by_split(root: Path) -> tuple[Path, dict[str, Path]]:
    """Return the folder of the split folders, below `root` for Kaggle's ImageNet, and those that it has."""
    root = next((root / inner for inner in KAGGLE if (root / inner / TRAIN).is_dir()), root)
    return root, {split: folder for split in SPLITS if (folder := _split_folder(root, split))}


def class_folders_with_images(root: Path) -> list[str]:
    """Return the class folders in which `read_folder` would find images, by their paths in `root`.

    Returns [] for fewer than two, as one may have the images of a table. Folders of splits and parts of detection data
    sets are not classes.
    """
    if not root.is_dir():
        return []
    top, folders = _folders_by_split(root)
    if any(folders_in(folder) for folder in folders.values()):
        folder = folders.get(TRAIN)
        names = [name for name in folders_in(folder) if _has_image_below(folder / name)] if folder else []
    else:
        folder, names = top, _class_folders_without_splits(top)
        if _are_splits(names):
            return []
    if folder is None or _are_parts(names):
        return []
    return [str((folder / name).relative_to(root)) for name in names] if len(names) > 1 else []


def _class_folders_without_splits(root: Path) -> list[str]:
    """Return the subfolders with images of their own. Without any, return those with all their images in one subfolder,
    if these subfolders as classes would give the same labels, or one class: CLASS/CLASS/*, CLASS/images/*.
    """
    if names := _folders_with_images(root):
        return names
    below = _folders_below_with_images(root)
    inner = [(name, folder) for name, folders in below.items() for folder in folders]
    labels = {folder for _, folder in inner}
    same_labels = len(inner) == len(below) and len(labels) in (1, len(inner))
    if not same_labels or any(_are_splits([label]) for label in labels):
        return []
    return list(below) if all(has_image(root / name / folder) for name, folder in inner) else []


def _folders_below_with_images(root: Path) -> dict[str, list[str]]:
    """Return the subfolders that contain an image at any depth, each with those of its own subfolders that do."""
    by_split = {
        name: [inner for inner in folders_in(root / name) if _has_image_below(root / name / inner)]
        for name in folders_in(root)
    }
    return {name: inner for name, inner in by_split.items() if inner}


def _check_is_one_level(root: Path) -> None:
    """Raise InputError if the subfolders have all their images in subfolders, and either may be the classes."""
    below = _folders_below_with_images(root)
    inner = sorted({name for names in below.values() for name in names})
    if len(below) > 1 and not any(map(_are_splits, (list(below), inner))) and not _are_parts(list(below)):
        examples = [f"{name}/{names[0]}" for name, names in below.items()]
        raise InputError(
            f"{root} has images in {first_named(examples)}, so its classes may be {first_named(list(below))} or "
            f"{first_named(inner)}: for the first, move these folders into {root / TRAIN}; for the second, give one of "
            "them, or move the images of each class into one folder"
        )


def folders_of_images(root: Path) -> list[str]:
    """Return the names of the first subfolders that contain an image at any depth."""
    return [name for name in folders_in(root)[:MAX_SUBFOLDERS] if _has_image_below(root / name)]


def _has_image_below(folder: Path) -> bool:
    """Return whether the folder contains an image at any depth; links to folders inside it are not followed."""
    return has_image(folder) or any(
        _has_image_below(folder / name) for name in folders_in(folder) if not (folder / name).is_symlink()
    )


def _with_class_folders(path: Path) -> Iterator[Path]:
    """Yield a folder and its first subfolders, of those that are named as splits also theirs."""
    yield path
    for name in folders_in(path)[:MAX_SUBFOLDERS]:
        yield path / name
        if _are_splits([name]) and not path.is_symlink():
            yield from (path / name / inner for inner in folders_in(path / name)[:MAX_SUBFOLDERS])


def _notes_beside(root: Path, folders: Mapping[str, Path]) -> list[str]:
    """Return a line about folders beside those of the splits that contain images, also in subfolders; or no line."""
    if folders[TRAIN] == root:
        return []  # the class folders are not in a folder of a split
    top = folders[TRAIN].parent
    beside = [top / name for name in folders_in(top)[:MAX_SUBFOLDERS] if top / name not in folders.values()]
    if with_images := [path.name for path in beside if any(map(has_image, _with_class_folders(path)))]:
        return [f"{top}: ignored the images in {first_named(with_images)}, which are in no split's folder"]
    return []


def _advice_for_any(names: Sequence[str]) -> str | None:
    return next(filter(None, map(advice_for, names)), None)


def _advice_if_nested(root: Path) -> str | None:
    """Return advice if exactly one subfolder has images, as when an archive unpacks into a folder; else None."""
    inner = [path for path in visible_entries(root) if path.is_dir()]
    candidates = [path for path in inner[:MAX_SUBFOLDERS] if _split_folder(path, TRAIN) or _folders_with_images(path)]
    return f"give {candidates[0]}" if len(candidates) == 1 else None


def _check_are_no_arrays(root: Path) -> None:
    """Raise InputError if the folder, or one in it, has a data set of ARRAYS."""
    for folder in (root, *(path for path in visible_entries(root)[:MAX_SUBFOLDERS] if path.is_dir())):
        for files, kind, name, unpacked in ARRAYS:
            if all((folder / file).is_file() for file in files):
                absolute, pack = folder.absolute(), "pack them"
                source = str(absolute.parent if unpacked else absolute)
                if unpacked is None:
                    source, pack = "DIR", "fetch and pack these"
                elif unpacked and absolute.name != unpacked:
                    pack = f"rename it to {absolute.with_name(unpacked)}, and pack them"
                raise InputError(
                    f"{folder} has the images of {name} as {kind}: {pack} with cputrain prepare torchvision:{name} "
                    f"{source} OUT, and give OUT"
                )


def _split_folder(root: Path, split: str) -> Path | None:
    """Return the folder of a split under any of its names. Raises InputError if there are several."""
    matching = [path for path in visible_entries(root) if path.name.lower() in NAMES[split] and path.is_dir()]
    exact = [path for path in matching if path.name == split]
    if len(matching) > 1 and not exact:
        raise InputError(f"{root} has {' and '.join(path.name for path in matching)}: rename the right one to {split}")
    return next(iter(exact or matching), None)


def has_train_folder(root: Path) -> bool:
    """Return whether a folder has a folder of the training split, under any name or where Kaggle's ImageNet has it."""
    return any((root / inner / TRAIN).is_dir() for inner in KAGGLE) or _split_folder(root, TRAIN) is not None


def has_image(folder: Path) -> bool:
    """Return whether the folder itself contains an image; its entries are read up to the first one."""
    with _entries(folder) as entries:
        return any(is_image(entry.name) and not entry.is_dir(follow_symlinks=False) for entry in entries)


def _folders_with_images(root: Path) -> list[str]:
    """Return the names of the subfolders that contain an image."""
    return [name for name in folders_in(root) if has_image(root / name)]


def _check_are_classes(root: Path, names: Sequence[str]) -> None:
    """Raise InputError if all folders of images are splits of a competition (train/, test1/; train_images/,
    test_images/), whose classes are in a table. One among others may be a class called train."""
    if _are_splits(names):
        paths = [path for folder in (root, *(root / name for name in names)) for path in visible_entries(folder)]
        tables = [str(path.relative_to(root)) for path in paths if path.suffix.lower() in TABLES_OF_LABELS]
        listed = f", perhaps by {first_named(tables)}" if tables else ""
        raise InputError(
            f"{root} has images in {first_named(names)}, which are splits, not classes: sort the images into class "
            f"folders, {TRAIN}/CLASS/*{listed}"
        )


def _are_splits(names: Sequence[str]) -> bool:
    return all(SPLIT_OF.keys() & WORD.findall(name.lower()) for name in names)


def _are_parts(names: Sequence[str]) -> bool:
    return bool(names) and all(name.lower() in PARTS for name in names)


def class_names(folders: dict[str, Path]) -> tuple[str, ...]:
    """Return the classes of train/, sorted; the index of a class is its label.

    Raises InputError if train/ has no class, or another split has a class that train/ lacks.
    """
    names = sorted(map(text_of, class_folders(folders[TRAIN]).values()))
    if not names:
        present = [path.name for path in visible_entries(folders[TRAIN])]
        advice = _advice_for_any(present) or "put images into train/CLASS/"
        raise InputError(f"{folders[TRAIN]} has no class folders, but {first_named(present) or 'nothing'}: {advice}")
    _check_are_no_parts(folders[TRAIN], names)
    _check_are_no_shards(folders[TRAIN], names)
    for split, folder in folders.items():
        if not _has_any(folder, names) and (split == TEST or has_labels(_label_places(folder))):
            continue
        if extra := sorted(class_folders(folder).keys() - set(map(one_form, names))):
            raise InputError(f"{folder} has classes that train/ lacks, {', '.join(extra[:5])}: add or remove them")
    return tuple(names)


def _check_are_no_parts(folder: Path, names: Sequence[str]) -> None:
    """Raise InputError if all subfolders are parts of a detection data set: images, annotations or masks."""
    if _are_parts(names):
        raise InputError(
            f"{folder} has {first_named(names)}, which are parts of a detection or segmentation data set, not classes: "
            f"sort its images into class folders, {TRAIN}/CLASS/*"
        )


def _check_are_no_shards(folder: Path, names: Sequence[str]) -> None:
    """Raise InputError if a subfolder is a shard of img2dataset, which writes NUMBER.parquet and NUMBER_stats.json
    beside the folder NUMBER."""
    shards = [
        name
        for name in names
        if SHARD.fullmatch(name) and any((folder / f"{name}{end}").is_file() for end in (".parquet", "_stats.json"))
    ]
    if shards:
        raise InputError(
            f"{folder} has {first_named(shards)}, which are shards of img2dataset, not classes: sort the images into "
            "class folders, or run img2dataset with --output_format webdataset and a column called label in "
            "--save_additional_columns"
        )


def class_folders(folder: Path) -> dict[str, str]:
    """Return the subfolders by their names in one Unicode form. Raises InputError if two have the same name."""
    names: dict[str, str] = {}
    for name in folders_in(folder):
        before = names.setdefault(one_form(text_of(name)), name)
        if before != name:
            raise InputError(
                f"{folder} has the class {name} twice, in two Unicode forms, as {text_of(before)!a} and "
                f"{text_of(name)!a}: move the images of one folder into the other"
            )
    return names


def _has_any(folder: Path, classes: Sequence[str]) -> bool:
    """Return whether the folder has a class folder."""
    return not class_folders(folder).keys().isdisjoint(map(one_form, classes))


def other_forms(folders: dict[str, Path], classes: Sequence[str]) -> list[str]:
    """Return a line about class names with another Unicode form in another split, as macOS writes them; or no line."""
    for split, folder in folders.items():
        validation = class_folders(folder)
        forms = [(text_of(validation.get(one_form(name), name)), name) for name in classes]
        differing = [(form, name) for form, name in forms if form != name]
        if differing:
            (form, name), *more = differing
            more_names = f" (and {plural(len(more), 'more name')})" if more else ""
            return [
                f"{split}/ has {name}{more_names} in another Unicode form, {form!a} for {name!a}; the class is the same"
            ]
    return []


def _label_places(folder: Path) -> list[Path]:
    """Return the folders in which a label file of a split's images may be."""
    return [folder, *folder.absolute().parents[:LEVELS_ABOVE]]


def _list_split(folder: Path, classes: Sequence[str], *, training: Path) -> Listing:
    """List the images of a split by class folders, or by a file of labels if it has no class folder."""
    if folder == training or _has_any(folder, classes):
        return list_images(folder, classes, every_class=folder == training)
    paths, ignored = _images_in(folder)
    if not paths:
        return list_images(folder, classes, every_class=False)  # raises the error
    labels, source = flat_labels(_label_places(folder), [path.rpartition("/")[2] for path in paths], folder)
    check_classes(labels, classes, source, training)
    if source.parent == folder:
        ignored[source.suffix] -= 1
    label = {name: number for number, name in enumerate(classes)}
    return Listing(paths=paths, labels=[label[name] for name in labels], others=+ignored)


def list_images(folder: Path, classes: Sequence[str], *, every_class: bool) -> Listing:
    """List the images in a folder CLASS/*, at any depth, sorted by class and path.

    Raises InputError if it contains no image, or with `every_class` if a class has none.
    """
    paths: list[str] = []
    labels: list[int] = []
    ignored: Counter[str] = Counter()
    folder_names = class_folders(folder)
    for label, name in enumerate(classes):
        if one_form(name) not in folder_names:
            continue  # val/ need not have every class
        class_folder = folder / folder_names[one_form(name)]
        images, ignored_here = _images_in(class_folder)
        if every_class and not images:
            other_files = f", only {_by_suffix(ignored_here)}" if ignored_here else ""
            raise InputError(f"class {name} has no image in {class_folder}{other_files}: add some, or remove it")
        paths += images
        labels += [label] * len(images)
        ignored += ignored_here
    if not paths:
        other_files = f", only {_by_suffix(ignored)}" if ignored else ""
        raise InputError(f"{folder} contains no image{other_files}: put images into {folder.name}/CLASS/")
    return Listing(paths=paths, labels=labels, others=ignored)


def _images_in(folder: Path, above: frozenset[Path] = frozenset()) -> tuple[list[str], Counter[str]]:
    """Return the images below a folder, sorted, and the number of other files by suffix.

    A broken link named as an image counts as an image that cannot be read. `above` are the folders on the way to this
    one: a link back to one of them would recurse without end.
    """
    paths: list[str] = []
    ignored: Counter[str] = Counter()
    inner: list[Path] = []
    prefix = f"{folder}/"
    way = above | {folder.resolve()}
    with _entries(folder) as entries:
        for entry in entries:
            name = entry.name
            if is_hidden(name):
                continue
            broken = _is_broken_link(entry)
            if is_image(name) and (broken or entry.is_file()):
                paths.append(prefix + name)
            elif not broken and entry.is_dir():
                inner.append(folder / name)
            elif broken or not is_image(name):  # not a pipe named as an image
                ignored[suffix_of(name)] += 1
    paths.sort()
    for path in sorted(inner):
        if not (path.is_symlink() and any(parent.is_relative_to(path.resolve()) for parent in way)):
            deeper, more = _images_in(path, way)
            paths += deeper
            ignored += more
    return paths, ignored


def _is_broken_link(entry: os.DirEntry[str]) -> bool:
    """Return whether the entry is a link to nothing, or to itself."""
    return entry.is_symlink() and not Path(entry.path).exists()


def folder_notes(folder: Path, listing: Listing) -> Iterator[str]:
    """Yield notes about the files of a split that are ignored."""
    if listing.others:
        yield (
            f"{folder}: ignored {plural(listing.others.total(), 'file')} of other formats "
            f"({_by_suffix(listing.others)}); convert images among them to JPEG or PNG"
        )
    with _entries(folder) as entries:
        images = (entry for entry in entries if is_image(entry.name) and not entry.is_dir(follow_symlinks=False))
        outside = sum(1 for _ in images) if folders_in(folder) else 0
    if outside and not any(path.rpartition("/")[0] == str(folder) for path in listing.paths):
        yield f"{folder}: ignored {plural(outside, 'image')} outside the class folders"


def _by_suffix(counts: Counter[str]) -> str:
    """ "12 .heic, 3 without a suffix", the most frequent first."""
    return first_named([f"{count:,} {suffix or 'without a suffix'}" for suffix, count in counts.most_common()])


def image_files(paths: Sequence[Path]) -> list[str]:
    """Return the named image files, and for each folder its images at any depth, sorted by path.

    Raises InputError if a path does not exist, or a folder has no images.
    """
    listed: list[str] = []
    for path in paths:
        if path.is_dir():
            inside, ignored = _images_in(path)
            if not inside:
                only = f", only {_by_suffix(ignored)}" if ignored else ""
                raise InputError(f"{path} contains no image{only}: give a folder with images")
            listed += sorted(inside)
        elif path.exists():
            listed.append(str(path))
        else:
            raise InputError(f"image {path} does not exist: give image files, or a folder of them")
    return listed


def folders_in(folder: Path) -> list[str]:
    """Return the names of the subfolders, sorted, without hidden ones. A broken link without a suffix counts as a
    folder, so that reading it raises an error; one with a suffix was a file."""
    with _entries(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if not is_hidden(entry.name) and (not suffix_of(entry.name) if _is_broken_link(entry) else entry.is_dir())
        )


@contextmanager
def _entries(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}") from None
