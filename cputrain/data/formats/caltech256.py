"""Caltech-256 from its archive, 256_ObjectCategories.tar, or from the folder that the archive unpacks to."""

from pathlib import Path

from affinity.errors import InputError
from affinity.utf8 import text_of
from cputrain.data.formats.dataset import ArchiveMembers, ImageFiles, OwnSplits
from cputrain.data.formats.folder import class_folders, list_images, notes_of
from cputrain.data.formats.places import is_image
from cputrain.data.formats.tar import members

ARCHIVE = "256_ObjectCategories.tar"


def open_caltech256(source: Path) -> OwnSplits:
    """Classes and images of 001.ak47/001_0001.jpg, ..., without splits. Raises InputError."""
    if (source / ARCHIVE).is_file():
        source = source / ARCHIVE
    if not source.is_file():
        inner = source / Path(ARCHIVE).stem
        folder = inner if inner.is_dir() else source
        if not folder.is_dir():
            raise InputError(f"{folder} does not exist: name a folder with a folder for each class")
        names = tuple(sorted(map(text_of, class_folders(folder).values())))
        listing = list_images(folder, names, every_class=True)
        train = ImageFiles(listing.paths, listing.labels)
        return OwnSplits(classes=names, train=train, notes=tuple(notes_of(folder, listing)))
    found = [row for row in members(source, 0) if is_image(row[0])]
    by_class = [(Path(name).parent.name, name, offset, length) for name, offset, length in sorted(found)]
    classes = tuple(sorted({row[0] for row in by_class}))
    if not by_class:
        raise InputError(f"{source} contains no image: is it {ARCHIVE}?")
    label = {name: number for number, name in enumerate(classes)}
    images = ArchiveMembers(
        source,
        [offset for _, _, offset, _ in by_class],
        [length for _, _, _, length in by_class],
        [label[name] for name, *_ in by_class],
        [name for _, name, _, _ in by_class],
    )
    return OwnSplits(classes=classes, train=images)
