"""Images that cannot be read: how many a data set may have, and what is said of them."""

import re
from collections.abc import Sequence

from affinity.errors import InputError
from affinity.wording import counted

NUMBERS = re.compile(r"[\d,]+")  # bytes and offsets differ from file to file, and the cause is one
CAUSES = 3  # that a line names


def causes(damaged: Sequence[str]) -> str:
    """ "cannot identify image file (11, first a.jpg), image file is truncated (b.jpg)".

    `damaged` are lines "NAME: CAUSE". Images of one cause are counted together, the most frequent first.
    """
    by_cause: dict[str, list[tuple[str, str]]] = {}
    for line in damaged:
        name, _, cause = line.partition(": ")
        by_cause.setdefault(NUMBERS.sub("", cause), []).append((name, cause))
    groups = sorted(by_cause.values(), key=lambda group: -len(group))
    texts = [
        f"{group[0][1]} ({group[0][0]})" if len(group) == 1 else f"{group[0][1]} ({len(group):,}, first {group[0][0]})"
        for group in groups[:CAUSES]
    ]
    more = f", {counted(len(groups) - CAUSES, 'other cause')}" if len(groups) > CAUSES else ""
    return f"{', '.join(texts)}{more}"


def allowed_damage(images: int, share: float) -> int:
    """How many of so many images may be damaged by data.max_damaged=`share`: at least one, unless the share is 0."""
    return max(1, int(share * images)) if share else 0


def is_too_damaged(damaged: float, images: int, share: float) -> bool:
    """Whether that many damaged images are more than a split of so many `images` may have."""
    return damaged > allowed_damage(images, share)


def refusal(split: str, damaged: Sequence[str], read: int, images: int, share: float) -> InputError:
    """The error about a split of `images` of which these lines are about `read` ones."""
    return InputError(
        f"{split} split: {counted(len(damaged), 'damaged image')} among {read:,} of {images:,}: {causes(damaged)}: "
        f"data.max_damaged={share:g} allows {allowed_damage(images, share):,}: repair or remove them, or raise it"
    )
