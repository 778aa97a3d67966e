"""manifest.json of a prepared folder: written last, so a folder that has one is whole."""

import json
from pathlib import Path
from typing import Any

from affinity.errors import InputError
from cputrain.files import write_atomic

VERSION = 1
MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """{"version", "classes", "splits": {split: {"images", "shards"}}}. Raises InputError on any other."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}: prepare again") from None
    if manifest.get("version") != VERSION:
        raise InputError(f"{path} has version {manifest.get('version')}; this program reads {VERSION}: prepare again")
    return manifest


def write_manifest(folder: Path, classes: tuple[str, ...], splits: dict[str, dict[str, int]]) -> None:
    """Write the manifest of a folder whose shards and indices are all there."""
    text = json.dumps({"version": VERSION, "classes": list(classes), "splits": splits}, indent=1)
    write_atomic(folder / MANIFEST, text.encode())
