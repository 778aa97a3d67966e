"""Packing the splits of a data set into shuffled shards, in parallel. A killed run is continued by the next one."""

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
from cputrain.data.formats.dataset import Dataset, Images
from cputrain.data.formats.manifest import MANIFEST, read_manifest, write_manifest
from cputrain.data.formats.shards import RECORD, index_path, shard_paths
from cputrain.data.order.mixing import expected_classes_in_window, mean_classes_in_window
from cputrain.data.order.permutations import Indices, epoch_order
from cputrain.data.pixels.decode import ImageError
from cputrain.data.prepare.encode import Encoded, encode
from cputrain.data.prepare.options import Options
from cputrain.data.prepare.shard_writers import WRITERS, Sample, ShardRecord, ShardWriter
from cputrain.files import write_text, write_with

OVERHEAD = 2048  # bytes of a sample in a tar beside its image: two headers, padding, the label; fewer in a TFRecord
SAMPLED = 64  # images that are re-encoded to estimate the size of the shards
OPTIONS = "options.json"
AHEAD = 256  # images that threads encode in advance


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A split to pack."""

    name: str
    images: Images
    labels: Indices
    classes: tuple[str, ...]
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An image for a shard; `encoded` is None where it cannot be read, for the reason `error`."""

    name: str
    label: int
    class_name: str
    encoded: Encoded | None
    error: str = ""


def prepare(
    dataset: Dataset,
    out: Path,
    options: Options,
    *,
    threads: int | None = None,
    on_image: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Pack all splits into shards, each in one random permutation; images that cannot be read are skipped and named.

    `out` is complete or absent. Unfinished work is kept beside it, in .OUT.partial, and continued when prepare is
    called again with the same options; a complete `out` with the same options is left as it is. `on_image` is called
    after each image. Returns the manifest's splits. Raises InputError where `out` is anything else, or the disk is too
    small.
    """
    requested = asdict(options)
    if out.exists():
        manifest = read_manifest(out) if (out / MANIFEST).is_file() else None
        if manifest is None or {**asdict(Options(kind="", source="")), **manifest["options"]} != requested:
            raise InputError(
                f"{out} already exists, and was not made with this source and these options: remove it, or prepare "
                "into another folder"
            )
        complete: dict[str, dict[str, Any]] = manifest["splits"]
        return complete
    splits = [
        Split(name=name, images=images, labels=images.labels, classes=dataset.classes, options=options)
        for name, images in dataset.splits.items()
    ]
    factor = _size_factor(splits[0])
    partial_out = _unfinished(out, requested)
    _check_space(partial_out, sum(_bytes(split.images) for split in splits) * factor)
    entries: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)), thread_name_prefix="prepare") as pool:
        for split in splits:
            entries[split.name] = _write_split(pool, partial_out, split, factor, on_image)
    write_manifest(partial_out, dataset.classes, requested, entries)
    (partial_out / OPTIONS).unlink()
    partial_out.rename(out)
    return entries


def _unfinished(out: Path, requested: dict[str, Any]) -> Path:
    """The folder .OUT.partial, emptied where it was begun with other options."""
    partial_out = out.with_name(f".{out.name}.partial")
    try:
        begun_with = json.loads((partial_out / OPTIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        begun_with = None
    if begun_with != requested:
        shutil.rmtree(partial_out, ignore_errors=True)
        write_text(partial_out / OPTIONS, json.dumps(requested))
    return partial_out


def _check_space(folder: Path, needed: float) -> None:
    """Raise InputError where the disk has no room for `needed` bytes, including those already written."""
    written = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if needed - written > free:
        raise InputError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, the shards need about {needed / 1e9:.1f}: free some space, "
            "or prepare elsewhere"
        )


def _bytes(images: Images) -> int:
    return sum(images.size(i) + OVERHEAD for i in range(len(images)))


def _size_factor(split: Split) -> float:
    """Bytes of a shard per byte of the source, estimated from a sample."""
    images, options = split.images, split.options
    if options.quality is None:
        return 1.0
    before = after = 0
    for i in epoch_order(len(images), options.seed, 0)[:SAMPLED].tolist():
        prepared = _prepare_image(split, i)
        if prepared.encoded:
            before += images.size(i) + OVERHEAD
            after += len(prepared.encoded.data) + OVERHEAD
    return after / before if before else 1.0


def _prepare_image(split: Split, i: int) -> Prepared:
    options, label, encoded, problem = split.options, int(split.labels[i]), None, ""
    try:
        encoded = encode(
            split.images.read(i),
            short_side=options.short_side,
            quality=options.quality,
            jpeg_only=options.format == "tfrecord",  # its readers call decode_jpeg
        )
    except (ImageError, OSError) as error:
        encoded, problem = None, str(error)
    name, class_name = split.images.name(i), split.classes[label]
    return Prepared(name=name, label=label, class_name=class_name, encoded=encoded, error=problem)


def _write_split(
    pool: ThreadPoolExecutor, folder: Path, split: Split, factor: float, on_image: Callable[[], object]
) -> dict[str, Any]:
    """Write a split's index and those shards that do not exist yet; returns the manifest's entry."""
    options = split.options
    order = epoch_order(len(split.images), options.seed, 0)
    count = options.shards or max(1, round(_bytes(split.images) * factor / options.shard_bytes))
    cuts = [len(order) * number // count for number in range(count + 1)]
    parts = [order[first:last] for first, last in pairwise(cuts) if last > first]
    paths = shard_paths(folder, split.name, len(parts), options.format)
    receipts = [folder / f"{split.name}-{number:05d}.json" for number in range(len(parts))]
    shards, written = [], 0
    for number, (part, path, receipt) in enumerate(zip(parts, paths, receipts, strict=True)):
        if receipt.is_file():
            for _ in part:
                on_image()
        else:
            writer = partial(WRITERS[options.format], number)
            _write_shard(path, receipt, writer, _prepared_images(pool, split, part, on_image), written)
        shards.append(json.loads(receipt.read_text(encoding="utf-8")))
        written += len(shards[-1]["records"])
    records = [tuple(record) for shard in shards for record in shard["records"]]
    if not records:
        raise InputError(f"{split.name}: not one image can be read: {shards[0]['damaged'][0]}")
    index = np.array(records, dtype=RECORD)
    write_with(index_path(folder, split.name), lambda file: np.save(file, index))
    for receipt in receipts:
        receipt.unlink()
    labels = index["label"].astype(np.int64)
    unusual: Counter[str] = sum((Counter(shard["unusual"]) for shard in shards), Counter())
    return {
        "images": len(index),
        "shards": len(parts),
        "bytes": [path.stat().st_size for path in paths],
        "mixing": {
            "classes_in_32": mean_classes_in_window(labels),
            "at_random": expected_classes_in_window(labels),
        },
        "unusual": dict(unusual),
        "damaged": [line for shard in shards for line in shard["damaged"]],
    }


def _write_shard(
    path: Path,
    receipt: Path,
    writer: Callable[[BinaryIO], ShardWriter],
    images: Iterator[Prepared],
    first_key: int,
) -> None:
    """Write a shard, then its receipt: a file that exists only beside a complete shard, with the shard's records."""
    unusual: Counter[str] = Counter()
    damaged: list[str] = []
    records: list[ShardRecord] = []

    def write(file: BinaryIO) -> None:
        shard = writer(file)
        for image in images:
            if image.encoded is None:
                damaged.append(f"{image.name}: {image.error}")
                continue
            unusual.update(image.encoded.unusual)
            shard.add(
                Sample(
                    key=first_key + len(shard.records),
                    image=image.encoded,
                    label=image.label,
                    class_name=image.class_name,
                    file_name=image.name.rpartition("/")[2],
                )
            )
        shard.close()
        records.extend(shard.records)

    write_with(path, write)
    write_text(receipt, json.dumps({"records": records, "unusual": unusual, "damaged": damaged}))


def _prepared_images(
    pool: ThreadPoolExecutor, split: Split, part: Indices, on_image: Callable[[], object]
) -> Iterator[Prepared]:
    """The images of a shard in order, prepared by all threads up to AHEAD images in advance."""
    waiting: deque[Future[Prepared]] = deque()
    for i in part.tolist():
        waiting.append(pool.submit(_prepare_image, split, i))
        if len(waiting) > AHEAD:
            yield waiting.popleft().result()
            on_image()
    while waiting:
        yield waiting.popleft().result()
        on_image()
