"""Writing files so that they are either complete or absent."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def write_atomic(path: Path, data: bytes) -> None:
    """Write to a temporary file, sync, rename: readers see the old or the complete new file, also after a crash."""
    write_with(path, lambda file: file.write(data))


def write_with(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Like `write_atomic`, for functions that write to a file object. Raises OSError that names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException as error:
        with suppress(OSError):  # on a read-only file system there is nothing to remove
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
