"""Images, wherever they lie -> shuffled shards, in parallel; what a kill leaves is taken up again."""

import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from affinity.errors import InputError
from cputrain.data.decode import ImageError
from cputrain.data.images import Dataset, Images
from cputrain.data.inspect import Encoded, inspect, reencode
from cputrain.data.manifest import MANIFEST, read_manifest, write_manifest
from cputrain.data.mixing import classes_expected, classes_together
from cputrain.data.order import Order, epoch_order
from cputrain.data.shards import RECORD, ShardWriter, index_path, shard_path
from cputrain.files import write_atomic, write_with

SHARD_BYTES = 256 << 20
OVERHEAD = 2048  # bytes of a sample in a tar beside its image: two headers, padding, the label
SAMPLED = 64  # images that are re-encoded to know what shards will hold
OPTIONS = "options.json"
AHEAD = 256  # images


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a data set is prepared. `quality` None: the files as they are."""

    kind: str
    source: str
    seed: int = 1
    shard_bytes: int = SHARD_BYTES
    shards: int | None = None
    val_fraction: float | None = None
    short_side: int | None = None
    quality: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What became of one image: `encoded`, or what is wrong with it."""

    name: str
    label: int
    encoded: Encoded | None
    wrong: str = ""


def prepare(
    dataset: Dataset,
    out: Path,
    options: Options,
    *,
    threads: int | None = None,
    seen: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Pack both splits into shards, each in one seeded permutation; images that cannot be read are left out and named.

    `out` is whole or absent: what is not finished lies beside it, in .OUT.partial, and is taken up when the same is
    asked for again; a finished `out` of the same options is left as it is. `seen` is called once per image. Returns the
    manifest's splits. Raises InputError where `out` is anything else, or the disk is too small.
    """
    asked = asdict(options)
    if out.exists():
        manifest = read_manifest(out) if (out / MANIFEST).is_file() else None
        if manifest is None or manifest["made"] != asked:
            raise InputError(f"{out} is already there, and is not this: remove it, or prepare into another folder")
        splits: dict[str, dict[str, Any]] = manifest["splits"]
        return splits
    sources: dict[str, Images] = {"train": dataset.train, "val": dataset.val}
    factor = _shrinking(dataset.train, options)
    beside = _taken_up(out, asked)
    _check_space(beside, sum(_bytes(images) for images in sources.values()) * factor)
    made: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), thread_name_prefix="prepare") as pool:
        for split, images in sources.items():
            made[split] = _write_split(pool, beside, split, images, options, factor, seen)
    write_manifest(beside, dataset.classes, asked, made)
    (beside / OPTIONS).unlink()
    beside.rename(out)
    return made


def _taken_up(out: Path, asked: dict[str, Any]) -> Path:
    """The unfinished folder beside `out`, emptied where it was begun with other options."""
    beside = out.with_name(f".{out.name}.partial")
    try:
        begun = json.loads((beside / OPTIONS).read_text())
    except (OSError, ValueError):
        begun = None
    if begun != asked:
        shutil.rmtree(beside, ignore_errors=True)
        write_atomic(beside / OPTIONS, json.dumps(asked).encode())
    return beside


def _check_space(folder: Path, needed: float) -> None:
    there = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if needed - there > free:
        raise InputError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, the shards need about {needed / 1e9:.1f}: make room, or "
            "prepare elsewhere"
        )


def _bytes(images: Images) -> int:
    return sum(images.size(i) + OVERHEAD for i in range(len(images)))


def _shrinking(images: Images, options: Options) -> float:
    """Bytes of a shard per byte of the source, from a sample."""
    if options.quality is None:
        return 1.0
    before = after = 0
    for i in epoch_order(len(images), options.seed, 0)[:SAMPLED].tolist():
        made = _make(images, i, 0, options)
        if made.encoded:
            before += images.size(i) + OVERHEAD
            after += len(made.encoded.data) + OVERHEAD
    return after / before if before else 1.0


def _make(images: Images, i: int, label: int, options: Options) -> Made:
    try:
        data = images.read(i)
        if options.quality is None:
            encoded = inspect(data)
        else:
            encoded = reencode(data, short_side=options.short_side, quality=options.quality)
    except (ImageError, OSError) as error:
        return Made(name=images.name(i), label=label, encoded=None, wrong=str(error))
    return Made(name=images.name(i), label=label, encoded=encoded)


def _write_split(
    pool: ThreadPoolExecutor,
    folder: Path,
    split: str,
    images: Images,
    options: Options,
    factor: float,
    seen: Callable[[], object],
) -> dict[str, Any]:
    """Write a split's shards, those that are there already left out, and its index; returns the manifest's entry."""
    order = epoch_order(len(images), options.seed, 0)
    count = options.shards or max(1, round(_bytes(images) * factor / options.shard_bytes))
    cuts = [len(order) * number // count for number in range(count + 1)]
    parts = [order[first:last] for first, last in pairwise(cuts) if last > first]
    labels, reports, written = images.labels, [], 0
    for number, part in enumerate(parts):
        report = folder / f"{split}-{number:05d}.json"
        if report.is_file():
            for _ in part:
                seen()
        else:
            made = _in_order(pool, images, part, labels, options)
            _write_shard(folder, split, number, written, made, seen)
        reports.append(json.loads(report.read_text()))
        written += len(reports[-1]["records"])
    records = [tuple(record) for report in reports for record in report["records"]]
    if not records:
        raise InputError(f"{split}: not one image can be read: {reports[0]['damaged'][0]}")
    index = np.array(records, dtype=RECORD)
    write_with(index_path(folder, split), lambda file: np.save(file, index))
    for number in range(len(parts)):
        (folder / f"{split}-{number:05d}.json").unlink()
    order_of_labels = index["label"].astype(np.int64)
    odd: Counter[str] = sum((Counter(report["odd"]) for report in reports), Counter())
    return {
        "images": len(index),
        "shards": len(parts),
        "bytes": [shard_path(folder, split, number).stat().st_size for number in range(len(parts))],
        "mix": {
            "classes_in_32": classes_together(order_of_labels),
            "at_random": classes_expected(order_of_labels),
        },
        "odd": dict(odd),
        "damaged": [line for report in reports for line in report["damaged"]],
    }


def _write_shard(
    folder: Path, split: str, number: int, first_key: int, images: Iterator[Made], seen: Callable[[], object]
) -> None:
    """Write one shard, then its report, whose presence says that the shard is whole."""
    odd: Counter[str] = Counter()
    damaged: list[str] = []
    records: list[tuple[int, ...]] = []

    def write(file: BinaryIO) -> None:
        shard = ShardWriter(file, number)
        for made in images:
            seen()
            if made.encoded is None:
                damaged.append(f"{made.name}: {made.wrong}")
                continue
            odd.update(made.encoded.odd)
            shard.add(first_key + len(shard.records), made.encoded, made.label)
        shard.close()
        records.extend(shard.records)

    write_with(shard_path(folder, split, number), write)
    report = json.dumps({"records": records, "odd": odd, "damaged": damaged})
    write_atomic(folder / f"{split}-{number:05d}.json", report.encode())


def _in_order(pool: ThreadPoolExecutor, images: Images, part: Order, labels: Order, options: Options) -> Iterator[Made]:
    """What becomes of each image, made by all threads, a few hundred ahead."""
    waiting: deque[Future[Made]] = deque()
    for i in part.tolist():
        waiting.append(pool.submit(_make, images, i, int(labels[i]), options))
        if len(waiting) > AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
