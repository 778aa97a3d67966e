"""Images, wherever they lie -> shuffled shards, in parallel; what a kill leaves is taken up again."""

import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from affinity.errors import InputError
from cputrain.data.decode import ImageError
from cputrain.data.images import Dataset, Images
from cputrain.data.inspect import Encoded, encode
from cputrain.data.manifest import MANIFEST, read_manifest, write_manifest
from cputrain.data.mixing import classes_expected, classes_together
from cputrain.data.order import Order, epoch_order
from cputrain.data.shards import RECORD, index_path, shard_paths
from cputrain.data.writers import WRITERS, Record, Sample, ShardWriter
from cputrain.files import write_atomic, write_with

SHARD_BYTES = 256 << 20
OVERHEAD = 2048  # bytes of a sample in a tar beside its image: two headers, padding, the label; fewer in a TFRecord
SAMPLED = 64  # images that are re-encoded to know what shards will hold
OPTIONS = "options.json"
AHEAD = 256  # images


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a data set is prepared. `quality` None: the files as they are, in TFRecords where they are JPEGs of gray or
    RGB."""

    kind: str
    source: str
    seed: int = 1
    shard_bytes: int = SHARD_BYTES
    shards: int | None = None
    val_fraction: float | None = None
    test_fraction: float | None = None
    short_side: int | None = None
    quality: int | None = None
    format: str = "tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A split as it is to be packed."""

    name: str
    images: Images
    labels: Order
    classes: tuple[str, ...]
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What became of one image: `encoded`, or what is wrong with it."""

    name: str
    label: int
    class_name: str
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
    """Pack all splits into shards, each in one seeded permutation; images that cannot be read are left out and named.

    `out` is whole or absent: what is not finished lies beside it, in .OUT.partial, and is taken up when the same is
    asked for again; a finished `out` of the same options is left as it is. `seen` is called once per image. Returns the
    manifest's splits. Raises InputError where `out` is anything else, or the disk is too small.
    """
    asked = asdict(options)
    if out.exists():
        manifest = read_manifest(out) if (out / MANIFEST).is_file() else None
        if manifest is None or asdict(Options(**manifest["made"])) != asked:
            raise InputError(f"{out} is already there, and is not this: remove it, or prepare into another folder")
        done: dict[str, dict[str, Any]] = manifest["splits"]
        return done
    splits = [
        Split(name=name, images=images, labels=images.labels, classes=dataset.classes, options=options)
        for name, images in dataset.splits.items()
    ]
    factor = _shrinking(splits[0])
    beside = _taken_up(out, asked)
    _check_space(beside, sum(_bytes(split.images) for split in splits) * factor)
    made: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), thread_name_prefix="prepare") as pool:
        for split in splits:
            made[split.name] = _write_split(pool, beside, split, factor, seen)
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


def _shrinking(split: Split) -> float:
    """Bytes of a shard per byte of the source, from a sample."""
    images, options = split.images, split.options
    if options.quality is None:
        return 1.0
    before = after = 0
    for i in epoch_order(len(images), options.seed, 0)[:SAMPLED].tolist():
        made = _make(split, i)
        if made.encoded:
            before += images.size(i) + OVERHEAD
            after += len(made.encoded.data) + OVERHEAD
    return after / before if before else 1.0


def _make(split: Split, i: int) -> Made:
    options, label, encoded, wrong = split.options, int(split.labels[i]), None, ""
    try:
        encoded = encode(
            split.images.read(i),
            short_side=options.short_side,
            quality=options.quality,
            jpeg_only=options.format == "tfrecord",  # whose readers call decode_jpeg
        )
    except (ImageError, OSError) as error:
        encoded, wrong = None, str(error)
    name, class_name = split.images.name(i), split.classes[label]
    return Made(name=name, label=label, class_name=class_name, encoded=encoded, wrong=wrong)


def _write_split(
    pool: ThreadPoolExecutor, folder: Path, split: Split, factor: float, seen: Callable[[], object]
) -> dict[str, Any]:
    """Write a split's shards, those that are there already left out, and its index; returns the manifest's entry."""
    options = split.options
    order = epoch_order(len(split.images), options.seed, 0)
    count = options.shards or max(1, round(_bytes(split.images) * factor / options.shard_bytes))
    cuts = [len(order) * number // count for number in range(count + 1)]
    parts = [order[first:last] for first, last in pairwise(cuts) if last > first]
    paths = shard_paths(folder, split.name, len(parts), options.format)
    kept = [folder / f"{split.name}-{number:05d}.json" for number in range(len(parts))]
    reports, written = [], 0
    for number, (part, path, report) in enumerate(zip(parts, paths, kept, strict=True)):
        if report.is_file():
            for _ in part:
                seen()
        else:
            opened = partial(WRITERS[options.format], number)
            _write_shard(path, report, opened, _in_order(pool, split, part, seen), written)
        reports.append(json.loads(report.read_text()))
        written += len(reports[-1]["records"])
    records = [tuple(record) for report in reports for record in report["records"]]
    if not records:
        raise InputError(f"{split.name}: not one image can be read: {reports[0]['damaged'][0]}")
    index = np.array(records, dtype=RECORD)
    write_with(index_path(folder, split.name), lambda file: np.save(file, index))
    for report in kept:
        report.unlink()
    order_of_labels = index["label"].astype(np.int64)
    odd: Counter[str] = sum((Counter(report["odd"]) for report in reports), Counter())
    return {
        "images": len(index),
        "shards": len(parts),
        "bytes": [path.stat().st_size for path in paths],
        "mix": {
            "classes_in_32": classes_together(order_of_labels),
            "at_random": classes_expected(order_of_labels),
        },
        "odd": dict(odd),
        "damaged": [line for report in reports for line in report["damaged"]],
    }


def _write_shard(
    path: Path,
    report: Path,
    opened: Callable[[BinaryIO], ShardWriter],
    images: Iterator[Made],
    first_key: int,
) -> None:
    """Write one shard, then its report, whose presence says that the shard is whole."""
    odd: Counter[str] = Counter()
    damaged: list[str] = []
    records: list[Record] = []

    def write(file: BinaryIO) -> None:
        shard = opened(file)
        for made in images:
            if made.encoded is None:
                damaged.append(f"{made.name}: {made.wrong}")
                continue
            odd.update(made.encoded.odd)
            shard.add(
                Sample(
                    key=first_key + len(shard.records),
                    image=made.encoded,
                    label=made.label,
                    class_name=made.class_name,
                    file_name=made.name.rpartition("/")[2],
                )
            )
        shard.close()
        records.extend(shard.records)

    write_with(path, write)
    write_atomic(report, json.dumps({"records": records, "odd": odd, "damaged": damaged}).encode())


def _in_order(pool: ThreadPoolExecutor, split: Split, part: Order, seen: Callable[[], object]) -> Iterator[Made]:
    """What becomes of each image, made by all threads, a few hundred ahead."""
    waiting: deque[Future[Made]] = deque()
    for i in part.tolist():
        waiting.append(pool.submit(_make, split, i))
        if len(waiting) > AHEAD:
            yield waiting.popleft().result()
            seen()
    while waiting:
        yield waiting.popleft().result()
        seen()
