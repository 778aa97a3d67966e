"""manifest.json of a prepared folder. It is written last, so a folder with a manifest is complete."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from affinity.errors import InputError
from cputrain.files import write_text

VERSION = 3
MANIFEST = "manifest.json"
MOST_BYTES = 256 << 20  # the names of a million damaged images
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 48)]


class _Mixing(BaseModel):
    classes_in_32: float
    at_random: float


class _Split(BaseModel):
    images: Count
    shards: Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
    bytes: list[Count]
    mixing: _Mixing
    unusual: dict[str, Count]
    damaged: list[str]

    @model_validator(mode="after")
    def _has_each_size(self) -> "_Split":
        if len(self.bytes) != self.shards:
            raise ValueError(f"{self.shards} shards, but {len(self.bytes)} sizes")
        return self


class _Manifest(BaseModel):
    version: Literal[3]
    classes: Annotated[list[str], Field(min_length=1)]
    options: dict[str, str | int | float | None]
    splits: dict[Literal["train", "val", "test"], _Split]

    @model_validator(mode="after")
    def _has_training_images(self) -> "_Manifest":
        if "train" not in self.splits:
            raise ValueError("splits has no train")
        return self


def read_manifest(folder: Path) -> dict[str, Any]:
    """{"version", "classes", "options", "splits": {split: {"images", "shards", "bytes", ...}}}.

    `options` are those of `cputrain prepare`, `bytes` each shard's size, `mixing` the classes among 32 in a row,
    `unusual` how many images have each unusual property, `damaged` the images that could not be packed.
    Raises InputError on any other file.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}: prepare again")
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {str(error)[:200]}: prepare again") from None
    if isinstance(manifest, dict) and manifest.get("version") != VERSION:
        found = str(manifest.get("version"))[:60]
        raise InputError(f"{path} has version {found}; this program reads {VERSION}: prepare again")
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part)[:60] for part in first["loc"])
        raise InputError(f"{path} is damaged: {place or 'it'}: {first['msg']}: prepare again") from None
    return manifest


def write_manifest(
    folder: Path, classes: tuple[str, ...], options: dict[str, Any], splits: dict[str, dict[str, Any]]
) -> None:
    """Write the manifest of a folder whose shards and indices are complete."""
    manifest = {"version": VERSION, "classes": list(classes), "options": options, "splits": splits}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1))
