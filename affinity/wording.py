"""Words for numbers: plurals, lists, bytes, bandwidths."""

import re
from collections.abc import Collection, Sequence

NAMED = 5
SENTENCE_END = re.compile(r"(?<!et al)\.(?= |$)")


def counted(number: int, noun: str) -> str:
    """ "1 worker", "2,048 workers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def spread(numbers: Collection[int], noun: str = "") -> str:
    """The smallest and the largest, of what: "4", "4-5", "1 core", "4-5 cores"."""
    least, most = min(numbers), max(numbers)
    text = str(least) if least == most else f"{least}-{most}"
    return f"{text} {noun if most == 1 else f'{noun}s'}" if noun else text


def either(words: Sequence[str]) -> str:
    """ "lars", "momentum or lars", "momentum, lars or rmsprop"; ", or" throughout where a word has a comma itself."""
    if any("," in word for word in words):
        return ", or ".join(words)
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def first_named(items: Sequence[str]) -> str:
    """The items, NAMED of them at most: "a, b" or "a, b, c, d, e and 3 more"."""
    more = f" and {len(items) - NAMED:,} more" if len(items) > NAMED else ""
    return f"{', '.join(items[:NAMED])}{more}"


def first_sentence(text: str) -> str:
    """A text up to its first full stop, without it; that of "et al." is none."""
    return SENTENCE_END.split(" ".join(text.split()), maxsplit=1)[0]


MIB = 1 << 20
GIB = 1 << 30


def memory_text(size_bytes: int) -> str:
    """An amount of memory: "64 GiB", "2.9 GiB" or "231 MiB"."""
    if size_bytes >= 10 * GIB or size_bytes % GIB == 0:
        return f"{size_bytes / GIB:.0f} GiB"
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"
