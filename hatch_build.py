"""Puts the manual pages into the wheel where `make release` has written them to man/; a plain build does without."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManPages(BuildHookInterface):  # type: ignore[type-arg]
    """Adds man/*.1 as share/man/man1."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before the wheel is built."""
        pages = sorted(Path(self.root, "man").glob("*.1"))
        build_data["shared_data"].update({str(page): f"share/man/man1/{page.name}" for page in pages})
