"""cputrain prepare: raw images -> shuffled shards."""

import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from cputrain.affinity.errors import RunError
from cputrain.affinity.filesystem import check_writable
from cputrain.affinity.terminal import printable
from cputrain.affinity.wording import MIB, counted
from cputrain.cli.output import shows_bars
from cputrain.data.formats.dataset import Dataset, causes
from cputrain.data.prepare import SHARD_BYTES, SHARD_FORMATS, Options, prepare
from cputrain.data.sources import KINDS, TORCHVISION, open_source, write_digits

QUALITY = 90

Splits = dict[str, dict[str, Any]]  # of the manifest, by name


def parse_fraction(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """A number strictly between 0 and 1, from a decimal or a fraction."""
    if value is None:
        return None
    try:
        number = float(Fraction(value))
    except (ValueError, ZeroDivisionError):
        number = 0.0
    if not 0 < number < 1:
        raise click.BadParameter(f"{value!r} is not a fraction between 0 and 1, such as 0.2 or 1/6")
    return number


def check_kind(_context: click.Context, _parameter: click.Parameter, kind: str) -> str:
    """The kind unchanged. Raises BadParameter with all kinds where it is not one of them."""
    if kind not in KINDS and not kind.startswith(TORCHVISION):
        raise click.BadParameter(f"{kind!r} is not one of {', '.join(KINDS)}, {TORCHVISION}NAME")
    return kind


@click.command("prepare")
@click.argument("kind", callback=check_kind)
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    metavar="N",
    help="determines the order of the images",
)
@click.option(
    "--shard-mib",
    type=click.IntRange(1),
    default=SHARD_BYTES // MIB,
    show_default=True,
    metavar="MIB",
    help="approximate size of a shard",
)
@click.option(
    "--shards", type=click.IntRange(1), metavar="N", help="number of shards of each split, instead of their size"
)
@click.option(
    "--val-fraction",
    callback=parse_fraction,
    metavar="SHARE",
    help="use this share of the training images (0.2, 1/6) for validation, drawn from each class by the seed; the "
    "source's own validation images become the test split  [default: 0.2 for a source without any]",
)
@click.option(
    "--test-fraction",
    callback=parse_fraction,
    metavar="SHARE",
    help="draw a test split in the same way, from a source without validation images",
)
@click.option("--label-column", metavar="NAME", help="column of Parquet files with the labels, if there are several")
@click.option(
    "--format",
    "shard_format",
    type=click.Choice(sorted(SHARD_FORMATS)),
    default="tar",
    show_default=True,
    help="tar: for webdataset readers; tfrecord: for TensorFlow's ImageNet scripts, with labels from 1",
)
@click.option(
    "--short-side", type=click.IntRange(8), metavar="PIXELS", help="scale larger images down to this short side"
)
@click.option(
    "--quality", type=click.IntRange(1, 95), metavar="1-95", help=f"quality of re-encoded JPEGs  [default: {QUALITY}]"
)
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="threads  [default: the CPUs available to this process]"
)
def prepare_command(
    kind: str,
    source: Path,
    out: Path,
    seed: int,
    shard_mib: int,
    shards: int | None,
    val_fraction: float | None,
    test_fraction: float | None,
    label_column: str | None,
    shard_format: str,
    short_side: int | None,
    quality: int | None,
    jobs: int | None,
) -> None:
    """Pack images into shuffled shards, which cputrain and any webdataset or TFRecord reader can read.

    \b
    imagefolder  SRC/train/CLASS/*, SRC/val/CLASS/* and SRC/test/CLASS/*, or some of them,
                 or SRC/CLASS/*
    imagenet     ILSVRC2012's archives in SRC, the folders that they unpack to, or Kaggle's
    mnist        the four idx files in SRC, gzipped or not
    caltech256   256_ObjectCategories.tar or its folder
    parquet      Parquet or Arrow files of Hugging Face datasets, in SRC, SRC/data or SRC/SPLIT
    tfrecord     TFRecords: train-*-of-*, validation-*-of-*; NAME-train.tfrecord-*-of-*
    digits       scikit-learn's handwritten digits, written to SRC first
    torchvision:NAME  one of torchvision's data sets, in SRC, or downloaded to it

    Image files are stored unchanged; with --short-side or --quality they become new JPEGs. TFRecords, whose readers
    decode only JPEGs, are an exception: other formats and CMYK become JPEGs of quality 100. Images that cannot be read
    are skipped and named. A command that was killed continues when it is given again; a finished one does nothing.
    """
    check_writable(out, "OUT")
    if kind == "digits" and not source.exists():
        write_digits(source)
    reencode = short_side is not None or quality is not None
    options = Options(
        kind=kind,
        source=str(source.absolute()),
        seed=seed,
        shard_bytes=shard_mib * MIB,
        shards=shards,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
        label_column=label_column,
        short_side=short_side,
        quality=(quality or QUALITY) if reencode else None,
        format=shard_format,
    )
    dataset = open_source(
        kind, source, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed, label_column=label_column
    )
    for note in dataset.notes:
        click.echo(printable(note))
    splits = _pack(dataset, out, options, jobs)
    _show(out, dataset.classes if shard_format == "tfrecord" else (), splits)


def _pack(dataset: Dataset, out: Path, options: Options, threads: int | None) -> Splits:
    """Write the shards, with a progress bar; returns the manifest's entry of each split."""
    with tqdm(
        total=sum(len(split) for split in dataset.splits.values()),
        unit="img",
        file=sys.stderr,
        desc=f"packing {options.source}",
        leave=False,
        delay=1,
        disable=not shows_bars(),
    ) as bar:
        try:
            return prepare(dataset, out, options, threads=threads, on_image=bar.update)
        except OSError as error:
            raise RunError(
                f"prepare: {error}: finished shards are kept; repair this and give the same command again"
            ) from None


def _show(out: Path, tfrecord_classes: tuple[str, ...], splits: Splits) -> None:
    """Print the labels of TFRecords, and each split's images, mixing and unusual or damaged files."""
    if tfrecord_classes:
        names = tfrecord_classes
        click.echo(f"{out}: labels 1 ({printable(names[0])}) to {len(names)} ({printable(names[-1])}); 0 is not used")
    for split, entry in splits.items():
        mixing = entry["mixing"]
        click.echo(f"{out}: {split} {entry['images']:,} images in {counted(entry['shards'], 'shard')}")
        click.echo(
            f"  different classes among 32 images in a row: {mixing['classes_in_32']:.1f} (in random order "
            f"{mixing['at_random']:.1f})"
        )
        if entry["unusual"]:
            click.echo("  " + ", ".join(f"{name}: {count:,}" for name, count in sorted(entry["unusual"].items())))
        if entry["damaged"]:
            count = counted(len(entry["damaged"]), "unreadable image")
            click.echo(printable(f"  {count} skipped: {causes(entry['damaged'])}"))
