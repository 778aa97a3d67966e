"""Raw images -> shuffled shards."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from affinity.errors import InputError
from cputrain.data import folder
from cputrain.data.manifest import write_manifest
from cputrain.data.order import epoch_order
from cputrain.data.shards import Sample, write_split

SHARD_BYTES = 256 << 20


def prepare_folder(
    source: Path, out: Path, *, seed: int, shard_bytes: int = SHARD_BYTES, seen: Callable[[], object] = lambda: None
) -> dict[str, dict[str, int]]:
    """Pack an image folder's train/ and val/ into shards, files as they are, in one seeded permutation of each split.

    Written beside and renamed, so `out` is whole or absent. `seen` is called once per image. Returns images and shards
    by split. Raises InputError when out exists or source is not an image folder.
    """
    if out.exists():
        raise InputError(f"{out} is already there: remove it, or prepare into another folder")
    classes = folder.class_names(source)
    listed = {split: folder.list_images(source, split, classes) for split in folder.SPLITS}
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    splits = {}
    for split, (paths, labels) in listed.items():
        splits[split] = write_split(beside, split, _samples(paths, labels, seed, seen), shard_bytes)
    write_manifest(beside, classes, splits)
    beside.rename(out)
    return splits


def _samples(paths: list[str], labels: list[int], seed: int, seen: Callable[[], object]) -> Iterator[Sample]:
    for i in epoch_order(len(paths), seed, 0):
        path = Path(paths[i])
        yield Sample(image=path.read_bytes(), suffix=path.suffix.lower(), label=labels[i])
        seen()
