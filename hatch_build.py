"""Puts affinity/, mpi/, and what `make release` has made, manual pages and compiled kernels, where a wheel has them."""

import os
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("affinity", "mpi")
COMPILED = "cputrain/kernels/compiled"  # see KernelLibrary in cputrain/kernels/build.py


class Folders(BuildHookInterface):  # type: ignore[type-arg]
    """Adds affinity/ and mpi/ below cputrain/, where a checkout has links to them, man/*.1 as share/man/man1, and
    compiled kernels, with which the wheel is for this machine's architecture and C library, or a later one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before the wheel is built."""
        pages = sorted(Path(self.root, "man").glob("*.1"))
        if version != "editable":
            build_data["force_include"].update({str(Path(self.root, name)): f"cputrain/{name}" for name in FOLDERS})
        if version != "editable" and Path(self.root, COMPILED).is_dir():
            build_data["force_include"][str(Path(self.root, COMPILED))] = COMPILED
            _, _, libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")  # "glibc 2.36"
            build_data["tag"] = f"py3-none-manylinux_{libc.replace('.', '_')}_{platform.machine()}"
            build_data["pure_python"] = False
        build_data["shared_data"].update({str(page): f"share/man/man1/{page.name}" for page in pages})
