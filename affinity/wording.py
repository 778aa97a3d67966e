"""Numbers of things in messages."""

from collections.abc import Collection


def counted(number: int, noun: str) -> str:
    """ "1 worker", "2,048 workers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def spread(numbers: Collection[int]) -> str:
    """The smallest and the largest: "4", "4-5"."""
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least}-{most}"
