"""What the stand-in does not have: one line for each name, with what to use instead."""

from collections.abc import Callable, Mapping
from typing import Any


def absent(module: str, instead: Mapping[str, str], default: str = "") -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which says of the names in `instead` what replaces them, of all with `default`.

    It raises ImportError, whose text `from MODULE import NAME` shows; AttributeError for names that are not known.
    """

    def find(name: str) -> Any:
        use = instead.get(name, "" if name.startswith("__") else default)
        if use:
            raise ImportError(f"{module}.{name} is not in the stand-in of cputrain-compat: use {use}")
        raise AttributeError(f"module {module!r} (the stand-in of cputrain-compat) has no attribute {name!r}")

    return find
