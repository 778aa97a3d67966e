"""Where oneCCL's CPU build and Intel MPI's runtime lie: from PyPI, or from a module that was loaded."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from affinity.errors import InputError

INSTALL = 'pip install "cputrain[ccl]"'
CCL, HEADER, MPI, FABRIC = "libccl.so.1", "oneapi/ccl.hpp", "libmpi.so.12", "libfabric.so.1"
OLDEST, NEWEST = (2021, 9), (2021, 13)  # with a shared CPU build and this C++ API


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """oneCCL's shared CPU library, its headers and version, and the libmpi and libfabric that it is to load."""

    ccl: Path
    include: Path
    version: tuple[int, int]
    mpi: Path
    fabric: Path


def find_libraries(env: Mapping[str, str]) -> Libraries:
    """The first of each under CCL_ROOT and I_MPI_ROOT, in this Python's packages, under this Python's prefix.

    Raises InputError where one is missing or oneCCL is of a version without a shared CPU build.
    """
    roots = [*_roots(env, "CCL_ROOT", "oneccl-devel", HEADER, 2)]
    include = next((root / "include" for root in roots if (root / "include" / HEADER).is_file()), None)
    if include is None:
        raise InputError(f"comm.backend=ccl: oneCCL is not installed: {INSTALL}, or set comm.backend=gloo")
    version = _version(include / "oneapi/ccl/config.h")
    folders = ("lib/ccl/cpu/lib", "lib/cpu", "lib/cpu_icx")
    ccl = next((path for folder in folders if (path := include.parent / folder / CCL).is_file()), None)
    if ccl is None or not OLDEST <= version <= NEWEST:
        found, newest = (".".join(map(str, numbers)) for numbers in (version, NEWEST))
        raise InputError(
            f"comm.backend=ccl: oneCCL {found} in {include.parent} is none of those up to {newest} that have a shared "
            f"CPU library: {INSTALL}"
        )
    return Libraries(ccl=ccl, include=include, version=version, mpi=_library(env, MPI), fabric=_library(env, FABRIC))


def _library(env: Mapping[str, str], name: str) -> Path:
    folders = ("lib", "lib/release", "opt/mpi/libfabric/lib", "libfabric/lib")
    roots = _roots(env, "I_MPI_ROOT", "impi-rt", MPI, 1)
    path = next((path for root in roots for folder in folders if (path := root / folder / name).is_file()), None)
    if path is None:
        raise InputError(f"comm.backend=ccl: oneCCL needs {name} of Intel MPI's runtime: {INSTALL}")
    return path


def _roots(env: Mapping[str, str], variable: str, package: str, landmark: str, depth: int) -> Iterator[Path]:
    """Folders that may hold lib/ and include/; a package's is the one `depth` above the folder of its landmark."""
    if variable in env:
        yield Path(env[variable])
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    yield from (Path(str(file.locate())).resolve().parents[depth] for file in files if str(file).endswith(landmark))
    yield Path(sys.prefix)


def _version(header: Path) -> tuple[int, int]:
    text = header.read_text() if header.is_file() else ""
    numbers = re.findall(r"CCL_(?:MAJOR|MINOR)_VERSION\s+(\d+)", text)
    if len(numbers) != 2:
        raise InputError(f"comm.backend=ccl: {header} tells no version of oneCCL: {INSTALL}")
    return int(numbers[0]), int(numbers[1])
