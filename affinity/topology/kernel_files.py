"""The kernel's small files: text, numbers, sets of ids. Every error names its file."""

import re
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.machine import parse_list, parse_mask

MOST_BYTES = 1 << 24  # /proc/cpuinfo of 4,096 CPUs has 6 MB; everything else is far smaller
NUMBER = re.compile(r"-?[0-9]{1,20}")


def first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The first of these files that the folder has."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """The numbered entries of a folder, as "cpu12" for the prefix "cpu", by number."""
    found = {path.name.removeprefix(prefix): path for path in folder.glob(f"{prefix}[0-9]*")}
    return {int(name): found[name] for name in sorted(found, key=len) if re.fullmatch("0|[1-9][0-9]{0,8}", name)}


def text(path: Path, around: str = " \t\r\n\0") -> str:
    """A file's text without the blanks, line ends and NUL bytes around it. Raises InputError when it cannot be read."""
    data = bytearray()
    try:
        with path.open("rb") as file:
            # In parts: for one large read the kernel would reserve that much memory, and refuses below proc/sys.
            while len(data) <= MOST_BYTES and (part := file.read(1 << 16)):
                data += part
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise InputError(f"{path} has more than {MOST_BYTES >> 20} MiB: it is not the kernel's: copy the tree again")
    return data.decode(errors="replace").strip(around)


def ids(path: Path) -> tuple[int, ...]:
    """The ids in a list file (...list, online, cpus) or a mask file. Raises InputError when it contains neither."""
    is_list = path.name.endswith("list") or path.name in ("online", "cpus", "isolated")
    try:
        return parse_list(text(path)) if is_list else parse_mask(text(path))
    except ValueError:
        raise InputError(f"{path} contains {_start(path)}, which is not a set of ids: copy the tree again") from None


def number(path: Path) -> int:
    """A file's number. Raises InputError when it contains none."""
    if NUMBER.fullmatch(text(path)) is None:
        raise InputError(f"{path} contains {_start(path)}, which is not a number: copy the tree again")
    return int(text(path))


def number_if_any(path: Path) -> int | None:
    """A file's number; None where the file is missing, cannot be read or contains another text ("<unknown>")."""
    try:
        found = text(path) if path.is_file() else ""
    except InputError:  # the kernel's drivers answer with I/O errors where the firmware has no value
        return None
    return int(found) if NUMBER.fullmatch(found) else None


def numbers(path: Path) -> tuple[int, ...]:
    """A file's numbers, between spaces. Raises InputError when it contains anything else."""
    words = text(path).split()
    if not all(NUMBER.fullmatch(word) for word in words):
        raise InputError(f"{path} contains {_start(path)}, which is not a row of numbers: copy the tree again")
    return tuple(map(int, words))


def rows(path: Path, columns: int, separator: str | None = None) -> tuple[tuple[str, ...], ...]:
    """A file's lines split into columns; none where the file is missing. Raises InputError at a shorter line."""
    lines = text(path, "\r\n\0").splitlines() if path.is_file() else ()  # a first column may be empty
    split = tuple(tuple(line.split(separator, columns - 1)) for line in lines if line.strip())
    short = next((row for row in split if len(row) < columns), None)
    if short is not None:
        line = repr(" ".join(short)[:40])
        raise InputError(f"{path} contains the line {line}, which has fewer than {columns} columns")
    return split


def _start(path: Path) -> str:
    return repr(text(path)[:40])
