"""cputrain prepare: raw images -> shuffled shards."""

import sys
from fractions import Fraction
from pathlib import Path

import click
from tqdm import tqdm

from affinity.errors import RunError
from affinity.filesystem import check_writable
from cputrain.data.digits import write_digits
from cputrain.data.prepare import SHARD_BYTES, Options, prepare
from cputrain.data.source import SPLIT, TORCHVISION, UNSPLIT, open_source
from cputrain.data.writers import WRITERS

MIB = 1 << 20
QUALITY = 90
KINDS = (*SPLIT, *UNSPLIT)


def share(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """A share of a whole as a number between 0 and 1, both excluded."""
    if value is None:
        return None
    try:
        number = float(Fraction(value))
    except (ValueError, ZeroDivisionError):
        number = 0.0
    if not 0 < number < 1:
        raise click.BadParameter(f"{value!r} is no share between 0 and 1, as in 0.2 or 1/6")
    return number


def known(_context: click.Context, _parameter: click.Parameter, kind: str) -> str:
    """The kind as it stands; one that there is not is refused with those that there are."""
    if kind not in KINDS and not kind.startswith(TORCHVISION):
        raise click.BadParameter(f"{kind!r} is not one of {', '.join(KINDS)}, {TORCHVISION}NAME")
    return kind


@click.command("prepare")
@click.argument("kind", callback=known)
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="of the shuffle over all shards")
@click.option(
    "--shard-mib", type=click.IntRange(1), default=SHARD_BYTES // MIB, show_default=True, help="size of a shard, about"
)
@click.option("--shards", type=click.IntRange(1), help="how many shards each split gets, in place of their size")
@click.option(
    "--val-fraction",
    callback=share,
    metavar="SHARE",
    help="draw this share of the training images (0.2, 1/6), of each class alike, by the seed, for validation; "
    "the source's own validation images become a test split",
)
@click.option(
    "--test-fraction", callback=share, metavar="SHARE", help="draw a test split likewise, of a source that has none"
)
@click.option(
    "--format",
    "form",
    type=click.Choice(sorted(WRITERS)),
    default="tar",
    show_default=True,
    help="tar: for webdataset readers; tfrecord: for TensorFlow's, with ImageNet's feature keys, labels from 1",
)
@click.option("--short-side", type=click.IntRange(8), help="scale images down to this short side, in pixels, as JPEGs")
@click.option("--quality", type=click.IntRange(1, 95), help=f"of JPEGs written anew  [default: {QUALITY}]")
@click.option("--jobs", type=click.IntRange(1), help="threads  [default: the cores lent to this process]")
def command(
    kind: str,
    source: Path,
    out: Path,
    seed: int,
    shard_mib: int,
    shards: int | None,
    val_fraction: float | None,
    test_fraction: float | None,
    form: str,
    short_side: int | None,
    quality: int | None,
    jobs: int | None,
) -> None:
    """Pack images into shards, shuffled over all categories, that any webdataset or TFRecord reader opens.

    \b
    imagefolder  SRC/train/CLASS/*, SRC/val/CLASS/* and SRC/test/CLASS/*, or two of them;
                 with --val-fraction also SRC/CLASS/*
    imagenet     ILSVRC2012's archives in SRC, read as they lie, or the unpacked tree
    mnist        the four idx files in SRC, gzipped or not
    caltech256   256_ObjectCategories.tar or its folder; needs --val-fraction
    tfrecord     ImageNet's TFRecords, train-*-of-*, validation-*-of-*
    digits       scikit-learn's handwritten digits, written to SRC first
    torchvision:NAME  one of torchvision's data sets, under SRC, or downloaded there

    Files stay as they are unless --short-side or --quality asks for new JPEGs; only in TFRecords, whose readers decode
    JPEGs alone, PNG, CMYK and others become JPEGs of quality 100. What cannot be read is left out and named. Killed and
    started again, it goes on; done, it does nothing.
    """
    check_writable(out, "OUT")
    if kind == "digits" and not source.exists():
        write_digits(source)
    anew = short_side is not None or quality is not None
    options = Options(
        kind=kind,
        source=str(source.absolute()),
        seed=seed,
        shard_bytes=shard_mib * MIB,
        shards=shards,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
        short_side=short_side,
        quality=(quality or QUALITY) if anew else None,
        format=form,
    )
    dataset = open_source(kind, source, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed)
    images = sum(len(split) for split in dataset.splits.values())
    with tqdm(total=images, unit="img", file=sys.stderr, desc=f"packing {source}", leave=False, delay=1) as bar:
        try:
            splits = prepare(dataset, out, options, threads=jobs, seen=bar.update)
        except OSError as error:
            raise RunError(f"prepare: {error}: what is done is kept; mend that and give the same command") from None
    if form == "tfrecord":
        names = dataset.classes
        click.echo(f"{out}: labels 1 ({names[0]}) to {len(names)} ({names[-1]}), 0 is left free")
    for split, made in splits.items():
        mix = made["mix"]
        click.echo(f"{out}: {split} {made['images']:,} images in {made['shards']} shard(s)")
        click.echo(f"  classes in 32 in a row: {mix['classes_in_32']:.1f}; at random {mix['at_random']:.1f}")
        if made["odd"]:
            click.echo("  " + ", ".join(f"{name}: {count:,}" for name, count in sorted(made["odd"].items())))
        if made["damaged"]:
            click.echo(f"  left out {len(made['damaged']):,} that cannot be read: {'; '.join(made['damaged'][:3])}")
