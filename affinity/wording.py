"""Formatting of numbers in messages: plurals, ranges, lists, amounts of memory; texts that keep their numbers."""

import re
from collections.abc import Collection, Mapping, Sequence
from string import Formatter
from typing import Any

NAMED = 5
SENTENCE_END = re.compile(r"(?<!et al)\.(?= |$)")

Number = float | tuple[float, ...]
MIB = 1 << 20
GIB = 1 << 30
UNITS = {"GiB": GIB, "GB": 1e9, "ms": 1e-3}


def plural(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: "1 worker", "2,048 workers", "10 classes"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def spread(numbers: Collection[int], noun: str = "") -> str:
    """Return the range of some numbers, with an optional noun: "4", "4-5", "1 core", "4-5 cores"."""
    low, high = min(numbers), max(numbers)
    text = str(low) if low == high else f"{low}-{high}"
    return f"{text} {noun if high == 1 else f'{noun}s'}" if noun else text


class Text(str):
    """A string that also stores the numbers formatted into it, by name, in base units (bytes, seconds)."""

    __slots__ = ("numbers",)
    numbers: Mapping[str, Number]


def numbers_text(template: str, **values: Number | str) -> Text:
    """Format a template and keep its numbers.

    "{cores:core}" becomes "1 core" or "24 cores", for a tuple "4-5 cores"; "{room:GiB .1f}" an amount in that unit; any
    other format is Python's. The numbers of a `Text` that is formatted into the template are kept, too.
    """
    text = Text(template.format_map({name: _Value(value) for name, value in values.items()}))
    used = {name: values[name] for _, name, _, _ in Formatter().parse(template) if name}
    numbers = {name: value for name, value in used.items() if not isinstance(value, str)}
    text.numbers = numbers | numbers_of(*used.values())
    return text


def numbers_of(*texts: object) -> dict[str, Number]:
    """Collect the numbers that texts keep."""
    return {name: number for text in texts if isinstance(text, Text) for name, number in text.numbers.items()}


class _Value:
    """Value of a template, with the formats of `numbers_text`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __format__(self, spec: str) -> str:
        unit, _, number_format = spec.partition(" ")
        if isinstance(self._value, tuple):
            return spread(self._value, spec)
        if unit in UNITS:
            return format(self._value / UNITS[unit], number_format)
        noun = len(spec) > 1 and spec[0].isalpha()
        return plural(self._value, spec) if noun else format(self._value, spec)


def join_or(words: Sequence[str]) -> str:
    """Join words by "or": "momentum, lars or rmsprop"; by ", or" throughout if a word contains a comma."""
    if any("," in word for word in words):
        return ", or ".join(words)
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def first_named(items: Sequence[str]) -> str:
    """List at most NAMED items: "a, b" or "a, b, c, d, e and 3 more"."""
    more = f" and {len(items) - NAMED:,} more" if len(items) > NAMED else ""
    return f"{', '.join(items[:NAMED])}{more}"


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop, which is left out; "et al." does not end a sentence."""
    return SENTENCE_END.split(" ".join(text.split()), maxsplit=1)[0]


def memory_text(size_bytes: int) -> str:
    """Format an amount of memory: "64 GiB", "2.9 GiB" or "231 MiB"."""
    if size_bytes >= 10 * GIB or size_bytes % GIB == 0:
        return f"{size_bytes / GIB:.0f} GiB"
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"
