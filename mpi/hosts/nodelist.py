"""Lists of host names, expanded and folded as Slurm does: n[001-128,130],rack[0-1]_blade[0-3],gpu-x3."""

import re
from collections.abc import Iterable
from itertools import product
from math import prod

from affinity.errors import InputError
from affinity.ranks.host_names import repeated_host

ADDRESS = r"\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]"  # of IPv6
NAMES = re.compile(rf"(?:[^\[\],]|\[[0-9,-]+\]|{ADDRESS})*")
RANGES = re.compile(r"\[([0-9,-]+)\]")
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
NUMBERED = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)
MAX_HOSTS = 200_000  # more than any machine has
MAX_DIGITS = 9


def expand(text: str) -> tuple[str, ...]:
    """Host names of a list, in its order. Raises InputError on an empty list, a bad range or a host that is in it
    twice."""
    hosts: list[str] = []
    place = 0
    while place < len(text):
        match = NAMES.match(text, place)
        assert match is not None  # it matches the empty text too
        place = match.end()
        if place < len(text) and text[place] != ",":
            raise InputError(
                f"hosts {text[:60]!r}: {text[place:][:20]!r} is neither a name nor a range: give names as in "
                "n1,n2 or n[001-128,130]"
            )
        place += 1
        hosts += _names(match[0].strip(), text)
        if len(hosts) > MAX_HOSTS:
            raise _too_many(text)
    if not hosts:
        raise InputError(f"hosts {text[:60]!r}: the list is empty: give HOST,HOST,...")
    twice = repeated_host(hosts)
    if twice is not None:
        what = f"{twice[0]} twice" if twice[0] == twice[1] else f"{twice[0]} and {twice[1]}, the same host"
        raise InputError(f"hosts {text[:60]!r}: the list contains {what}: remove one of the two")
    return tuple(hosts)


def _names(item: str, text: str) -> list[str]:
    """The names of one item of a list, with any number of ranges, in Slurm's order: the last number changes fastest,
    then the first, the second and so on."""
    words, ranges = RANGES.split(item)[::2], RANGES.split(item)[1::2]
    if not ranges:
        return [item] if item else []
    *before, last = [_numbers(one, text) for one in ranges]
    if len(last) * prod(map(len, before)) > MAX_HOSTS:
        raise _too_many(text)
    return [
        "".join(word + number for word, number in zip(words, (*reversed(slow), fast, ""), strict=True))
        for *slow, fast in product(*reversed(before), last)
    ]


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = RANGE.fullmatch(part)
        if any(len(number) > MAX_DIGITS for number in part.split("-")):
            raise InputError(f"hosts {text[:60]!r}: {part[:30]!r} has more than {MAX_DIGITS} digits: correct the range")
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise InputError(
                f"hosts {text[:60]!r}: {part[:30]!r} is not a range of numbers: write it as in n[001-128,130]"
            )
        first, last = match[1], match[2] or match[1]
        if len(numbers) + int(last) - int(first) >= MAX_HOSTS:
            raise _too_many(text)
        numbers += [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    return numbers


def _too_many(text: str) -> InputError:
    return InputError(f"hosts {text[:60]!r}: the list has more than {MAX_HOSTS:,} hosts: correct the range")


def fold(hosts: Iterable[str]) -> str:
    """The shortest list that `expand` turns into these hosts, in this order; consecutive numbers become ranges."""
    parts: list[str] = []
    runs: list[tuple[int, int, int]] = []  # first, last, digits of the first
    around: tuple[str, str] | None = None

    def close() -> None:
        if around is not None:
            shown = [f"{a:0{d}}" if a == b else f"{a:0{d}}-{b:0{d}}" for a, b, d in runs]
            single = len(runs) == 1 and runs[0][0] == runs[0][1]
            parts.append(around[0] + (shown[0] if single else f"[{','.join(shown)}]") + around[1])

    for host in hosts:
        match = NUMBERED.fullmatch(host)
        if match is None or any(sign in host for sign in "[],"):
            close()
            around = None
            parts.append(host)
            continue
        prefix, digits, suffix = match.groups()
        number = int(digits)
        if around == (prefix, suffix):
            first, last, width = runs[-1]
            if digits == f"{last + 1:0{width}}":
                runs[-1] = (first, number, width)
            else:
                runs.append((number, number, len(digits)))
        else:
            close()
            around, runs = (prefix, suffix), [(number, number, len(digits))]
    close()
    return ",".join(parts)
