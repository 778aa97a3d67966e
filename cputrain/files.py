"""Files that are either whole or not there."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside, sync, rename: readers see the old file or the whole new one, also after a crash."""
    write_with(path, lambda file: file.write(data))


def write_with(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Like `write_atomic`, for writers that want a file object. Raises OSError that names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except BaseException as error:
        with suppress(OSError):  # on a file system that is read-only there is nothing to take away
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
