"""Finding the members of a tar archive without unpacking it."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

from affinity.errors import InputError
from cputrain.data.formats.places import is_hidden

GZIP = b"\x1f\x8b"


def members(archive: Path, start: int) -> Iterator[tuple[str, int, int]]:
    """Name, offset and length of the regular files in a tar that begins at byte `start` of a file.

    Nothing is unpacked, so names may be anything; links and hidden files are skipped. Raises InputError where the
    archive is compressed, ends early or has a name twice.
    """
    names: set[str] = set()
    try:
        with archive.open("rb") as file:
            if not start and file.read(2) == GZIP:
                raise InputError(f"{archive} is gzipped, where no image can be read by itself: unpack it with gunzip")
            file.seek(start)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    if member.isfile() and not any(is_hidden(part) for part in Path(member.name).parts if part != ".."):
                        if member.name in names:
                            raise InputError(f"{archive} contains {member.name} twice: was something appended to it?")
                        names.add(member.name)
                        yield member.name, member.offset_data, member.size
                    tar.members.clear()  # type: ignore[attr-defined]  # it would keep all 1.3 million
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"cannot read {archive}: {error}: is the download complete?") from None
