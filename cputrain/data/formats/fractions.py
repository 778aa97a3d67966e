"""How many images of each class are split off for validation or test, and what is said of classes: without numpy."""

from collections.abc import Mapping, Sequence

from affinity.errors import InputError
from affinity.wording import counted

VAL_FRACTION = 0.2  # of a source without validation images, unless another is requested
SPLIT_SEED = 1  # of a training, and of cputrain prepare unless it gets another: both draw the same images
ALREADY_PREPARED = " is prepared: remove data.val_fraction, or prepare again with --val-fraction"
BOTH_SPLITS = " has validation and test images of its own: remove data.val_fraction"


def counts_to_draw(
    classes: Sequence[str], sizes: Sequence[int], fractions: Mapping[str, float]
) -> dict[str, list[int]]:
    """For each split in `fractions`, the images to draw from each class, of which there are `sizes`.

    Raises InputError where a class would keep no image to train on.
    """
    drawn = {split: apportioned(fraction, sizes) for split, fraction in fractions.items()}
    for name, size, *counts in zip(classes, sizes, *drawn.values(), strict=True):
        if sum(counts) >= size:
            requested = " and ".join(f"{fraction:g}" for fraction in fractions.values())
            raise InputError(
                f"class {name} has {counted(size, 'image')}: too few to split off {requested} of them for validation: "
                "add images to it, or name a folder that has validation images of its own in val/CLASS/"
            )
    return drawn


def apportioned(fraction: float, sizes: Sequence[int]) -> list[int]:
    """How many images of each class make that fraction of all: largest remainders (Hamilton), at least 1 each."""
    exact = [fraction * size for size in sizes]
    counts = [max(1, int(share)) for share in exact]
    missing = round(fraction * sum(sizes)) - sum(counts)
    by_remainder = sorted(range(len(sizes)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, missing)]:
        counts[i] += 1
    return counts


def describe_drawn(source: str, images: int, fraction: float) -> str:
    """A line about validation images that were drawn from a source."""
    return (
        f"{source} has no validation images of its own: {counted(images, 'image')} drawn from its classes in "
        f"proportion, a share of {fraction:g}, are for validation"
    )


def order_notes(classes: Sequence[str]) -> tuple[str, ...]:
    """A line where the classes are numbers, and their order as texts, which makes the labels, is another one."""
    if not all(name.isdecimal() for name in classes):
        return ()
    first = next((label for label, name in enumerate(sorted(classes, key=int)) if name != classes[label]), None)
    if first is None:
        return ()
    return (
        f"the classes are numbers in the order of texts, as torchvision's ImageFolder has them: label {first} is class "
        f'"{classes[first]}"',
    )
