"""Sets of PUs and NUMA nodes: "0-3,8" <-> tuple of ids <-> mask."""

import re
from collections.abc import Iterable

MOST_IDS = 1 << 16  # far beyond any kernel's NR_CPUS: a larger id is damage, not a machine
RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
WORD = re.compile(r"(?:0x)?[0-9a-fA-F]*")


def parse_list(text: str) -> tuple[int, ...]:
    """Read the kernel's list format ("0-3,8", "" for none) into ascending ids.

    Raises ValueError on anything else.
    """
    ids: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = RANGE.fullmatch(part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low or high >= MOST_IDS:
            raise ValueError(f"bad range {part!r} in CPU list {text.strip()!r}")
        ids.update(range(low, high + 1))
    return tuple(sorted(ids))


def format_list(ids: Iterable[int]) -> str:
    """Write ids in the kernel's list format; the inverse of `parse_list`."""
    ranges: list[list[int]] = []
    for i in sorted(set(ids)):
        if ranges and i == ranges[-1][1] + 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def parse_mask(text: str) -> tuple[int, ...]:
    """Read a mask of 32-bit hexadecimal words, most significant first, into ids.

    The kernel writes "1,00000003", hwloc "0x1,,0x3" with empty words for zero. Raises ValueError on anything else.
    """
    words = [word.strip() for word in text.strip().split(",")]
    if len(words) * 32 > MOST_IDS or not all(WORD.fullmatch(word) and len(word) <= MOST_IDS // 4 for word in words):
        raise ValueError(f"bad CPU mask {text.strip()[:40]!r}")
    mask = 0
    for word in words:
        mask = mask << 32 | int(word.removeprefix("0x") or "0", 16)
    return tuple(i for i, bit in enumerate(reversed(f"{mask:b}")) if bit == "1")


def format_mask(ids: Iterable[int]) -> str:
    """Write ids as one hexadecimal number, bit i for id i: (0, 1) -> "0x3"."""
    return hex(sum(1 << i for i in set(ids)))
