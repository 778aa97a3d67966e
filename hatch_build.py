"""Puts affinity/, mpi/ and the manual pages (where `make release` has written them to man/) where a wheel has them."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("affinity", "mpi")


class Folders(BuildHookInterface):  # type: ignore[type-arg]
    """Adds affinity/ and mpi/ below cputrain/, where a checkout has links to them, and man/*.1 as share/man/man1."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before the wheel is built."""
        pages = sorted(Path(self.root, "man").glob("*.1"))
        if version != "editable":
            build_data["force_include"].update({str(Path(self.root, name)): f"cputrain/{name}" for name in FOLDERS})
        build_data["shared_data"].update({str(page): f"share/man/man1/{page.name}" for page in pages})
