"""Lists of host names, expanded and folded as Slurm does: n[001-128,130],gpu-x3."""

import re
from collections import Counter
from collections.abc import Iterable

from affinity.errors import InputError

PART = re.compile(r"([^\[\],]*)(?:\[([\d,-]+)\]([^\[\],]*))?")
NUMBERED = re.compile(r"(.*?)(\d+)([^\d]*)")
MOST_HOSTS = 1_000_000


def expand(text: str) -> tuple[str, ...]:
    """Host names of a list, in its order. Raises InputError on an empty list, a bad range or a name given twice."""
    hosts: list[str] = []
    place = 0
    while place < len(text):
        match = PART.match(text, place)
        assert match is not None  # it matches the empty text too
        place = match.end()
        if place < len(text) and text[place] != ",":
            raise InputError(
                f"hosts {text[:60]!r}: {text[place:][:20]!r} is neither a name nor a range: give names as in "
                "n1,n2 or n[001-128,130]"
            )
        place += 1
        prefix, ranges, suffix = match.groups()
        if ranges is None:
            hosts += [prefix.strip()] if prefix.strip() else []
        else:
            hosts += [f"{prefix.strip()}{number}{suffix.strip()}" for number in _numbers(ranges, text)]
        if len(hosts) > MOST_HOSTS:
            raise InputError(f"hosts {text[:60]!r}: the list has more than {MOST_HOSTS:,} hosts: correct the range")
    if not hosts:
        raise InputError(f"hosts {text[:60]!r}: the list is empty: give HOST,HOST,...")
    if len(set(hosts)) < len(hosts):
        twice = next(name for name, count in Counter(hosts).items() if count > 1)
        raise InputError(f"hosts {text[:60]!r}: the list contains {twice} twice: remove one of the two")
    return tuple(hosts)


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last) < int(first) + MOST_HOSTS):
            raise InputError(f"hosts {text[:60]!r}: {part!r} is not a range of numbers: write it as in n[001-128,130]")
        numbers += [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    return numbers


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
