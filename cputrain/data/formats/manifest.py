"""manifest.json of a prepared folder. It is written last, so a folder with a manifest is complete."""

import json
from pathlib import Path
from typing import Any

from affinity.errors import InputError
from cputrain.files import write_atomic

VERSION = 3
MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """{"version", "classes", "options", "splits": {split: {"images", "shards", "bytes", ...}}}.

    `options` are those of `cputrain prepare`, `bytes` each shard's size, `mixing` the classes among 32 in a row,
    `unusual` how many images have each unusual property, `damaged` the images that could not be packed.
    Raises InputError on any other file.
    """
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}: prepare again") from None
    if manifest.get("version") != VERSION:
        raise InputError(f"{path} has version {manifest.get('version')}; this program reads {VERSION}: prepare again")
    return manifest


def write_manifest(
    folder: Path, classes: tuple[str, ...], options: dict[str, Any], splits: dict[str, dict[str, Any]]
) -> None:
    """Write the manifest of a folder whose shards and indices are complete."""
    manifest = {"version": VERSION, "classes": list(classes), "options": options, "splits": splits}
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
