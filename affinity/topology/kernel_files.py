"""The kernel's small files: text, numbers, sets of ids. Every error names its file."""

from pathlib import Path

from affinity.errors import InputError
from affinity.topology.cpuset import parse_list, parse_mask


def first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The first of these files that the folder has."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def text(path: Path) -> str:
    """A file's text, stripped. Raises InputError when it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def ids(path: Path) -> tuple[int, ...]:
    """The ids in a list file (...list, online, cpus) or a mask file. Raises InputError when it holds neither."""
    is_list = path.name.endswith("list") or path.name in ("online", "cpus")
    try:
        return parse_list(text(path)) if is_list else parse_mask(text(path))
    except ValueError:
        raise InputError(f"{path} holds {text(path)[:40]!r}, which is not a set of ids") from None


def number(path: Path) -> int:
    """A file's number. Raises InputError when it holds none."""
    try:
        return int(text(path))
    except ValueError:
        raise InputError(f"{path} holds {text(path)[:40]!r}, which is not a number") from None


def numbers(path: Path) -> tuple[int, ...]:
    """A file's numbers, between spaces. Raises InputError when it holds anything else."""
    try:
        return tuple(int(word) for word in text(path).split())
    except ValueError:
        raise InputError(f"{path} holds {text(path)[:40]!r}, which is not a row of numbers") from None


def rows(path: Path, columns: int, separator: str | None = None) -> tuple[tuple[str, ...], ...]:
    """A file's lines split into columns; none where the file is missing. Raises InputError at a shorter line."""
    lines = text(path).splitlines() if path.is_file() else ()
    split = tuple(tuple(line.split(separator, columns - 1)) for line in lines if line.strip())
    short = next((row for row in split if len(row) < columns), None)
    if short is not None:
        raise InputError(f"{path} holds the line {' '.join(short)[:40]!r}, which has fewer than {columns} columns")
    return split
