"""The search for oneCCL's CPU build and Intel MPI's runtime: in a loaded module or in packages from PyPI."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from affinity.errors import InputError

INSTALL = 'pip install "cputrain[ccl]"'
CCL, HEADER, MPI, FABRIC = "libccl.so.1", "oneapi/ccl.hpp", "libmpi.so.12", "libfabric.so.1"
OLDEST, NEWEST = (2021, 9), (2021, 13)  # these have a shared CPU library and this C++ API


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """oneCCL's shared CPU library, headers and version, and the libmpi and libfabric for it to load."""

    ccl: Path
    include: Path
    version: tuple[int, int]
    mpi: Path
    fabric: Path

    @property
    def mpi_root(self) -> Path:
        """Intel MPI's folder, which has lib/ and bin/."""
        return next(folder.parent for folder in self.mpi.parents if folder.name == "lib")


def find_libraries(env: Mapping[str, str]) -> Libraries:
    """Find each library under CCL_ROOT or I_MPI_ROOT, then in this Python's packages, then under its prefix.

    Raises InputError where one is missing, or where this version of oneCCL has no shared CPU library.
    """
    roots = [*_roots(env, "CCL_ROOT", "oneccl-devel", HEADER, 2)]
    include = next((root / "include" for root in roots if (root / "include" / HEADER).is_file()), None)
    if include is None:
        raise InputError(f"comm.backend=ccl: oneCCL is not installed: {INSTALL}, or set comm.backend=gloo")
    version = _version(include / "oneapi/ccl/config.h")
    folders = ("lib/ccl/cpu/lib", "lib/cpu", "lib/cpu_icx")
    ccl = next((path for folder in folders if (path := include.parent / folder / CCL).is_file()), None)
    if ccl is None or not OLDEST <= version <= NEWEST:
        found, oldest, newest = (".".join(map(str, numbers)) for numbers in (version, OLDEST, NEWEST))
        raise InputError(
            f"comm.backend=ccl: oneCCL {found} in {include.parent} cannot be used, only {oldest} to {newest} with "
            f"their shared CPU library: {INSTALL}"
        )
    return Libraries(ccl=ccl, include=include, version=version, mpi=_library(env, MPI), fabric=_library(env, FABRIC))


def _library(env: Mapping[str, str], name: str) -> Path:
    folders = ("lib", "lib/release", "opt/mpi/libfabric/lib", "libfabric/lib")
    roots = _roots(env, "I_MPI_ROOT", "impi-rt", MPI, 1)
    path = next((path for root in roots for folder in folders if (path := root / folder / name).is_file()), None)
    if path is None:
        raise InputError(f"comm.backend=ccl: oneCCL needs {name} of Intel MPI's runtime, found none: {INSTALL}")
    return path


def _roots(env: Mapping[str, str], variable: str, package: str, landmark: str, depth: int) -> Iterator[Path]:
    """Folders that may contain lib/ and include/; a package's is `depth` levels above the folder of its landmark."""
    if variable in env:
        yield Path(env[variable])
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    yield from (Path(str(file.locate())).resolve().parents[depth] for file in files if str(file).endswith(landmark))
    yield Path(sys.prefix)


def _version(header: Path) -> tuple[int, int]:
    text = header.read_text(encoding="utf-8") if header.is_file() else ""
    numbers = re.findall(r"CCL_(?:MAJOR|MINOR)_VERSION\s+(\d+)", text)
    if len(numbers) != 2:
        raise InputError(f"comm.backend=ccl: {header} contains no version of oneCCL: {INSTALL}")
    return int(numbers[0]), int(numbers[1])
