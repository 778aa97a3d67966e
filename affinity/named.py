"""Lists in messages: the first few items by name, and how many more there are."""

from collections.abc import Sequence

NAMED = 5


def first_named(items: Sequence[str]) -> str:
    """The items, NAMED of them at most: "a, b" or "a, b, c, d, e and 3 more"."""
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return f"{', '.join(items[:NAMED])}{more}"
