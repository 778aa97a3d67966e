"""`cputrain data` describes and verifies a data folder and draws its first images; `cputrain prepare` packs images."""

import io
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import check_writable, write_bytes
from cputrain.affinity.terminal import printable
from cputrain.affinity.wording import MIB, join_or, plural
from cputrain.cli.options import settings_argument
from cputrain.cli.output import format_option, number_option, path_option, print_json, shows_bars
from cputrain.cli.words import FullSummaryGroup
from cputrain.data.formats.dataset import Dataset, summarize_corrupt
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.source import MANIFEST, SPLITS, read_data_manifest
from cputrain.data.from_settings import training_transform
from cputrain.data.order import WINDOW, expected_classes_in_window, mean_classes_in_window
from cputrain.data.pixels import choose_decoder
from cputrain.data.prepare import (
    PLAIN,
    SHARD_BYTES,
    SHARD_FORMATS,
    Options,
    contact_sheet,
    is_begun,
    pack_dataset,
    sample_problems,
    transformed_squares,
)
from cputrain.data.sources import KINDS, TORCHVISION, open_source, write_digits
from cputrain.recipe.resume import load_training

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
FOLDER = click.argument("folder", type=click.Path(path_type=Path))
LABELS = click.option(
    "--label-column", metavar="NAME", help="read the labels from this column of Parquet or Arrow files"
)

QUALITY = 90  # of JPEGs, 1 to 95

Splits = dict[str, dict[str, Any]]  # of the manifest, by name


@click.group("data", cls=FullSummaryGroup)
def data_command() -> None:
    """Inspect a data folder: images, Parquet files, TFRecords, tar files, or the output of `cputrain prepare`."""


@data_command.command("info")
@FOLDER
@LABELS
@format_option
def info(folder: Path, label_column: str | None, output_format: str) -> None:
    """Print classes, images, sizes, unusual images, and how well the classes are shuffled."""
    dataset = open_dataset(str(folder), label_column=label_column)
    found = _describe(folder, dataset)
    if output_format == "json":
        print_json(found)
        return
    more = ", ..." if len(dataset.classes) > 5 else ""
    click.echo(f"{plural(len(dataset.classes), 'class')}: {printable(', '.join(dataset.classes[:5]))}{more}")
    for note in dataset.notes:
        click.echo(printable(note))
    for split, each in found["splits"].items():
        counts = f"{min(each['images_of_class']):,} to {max(each['images_of_class']):,} per class"
        click.echo(f"{split}: {plural(each['images'], 'image')}, {each['bytes'] / 1e6:,.1f} MB, {counts}")
        click.echo(_mixing(each["classes_in_window"], each["expected_classes_in_window"]))
        if found["prepared_with"] is not None:
            unusual = "".join(f", {name}: {count:,}" for name, count in sorted(each["unusual"].items()))
            damaged = plural(len(each["damaged"]), "damaged image")
            click.echo(f"  {plural(each['shards'], 'shard')}, {damaged} not packed{unusual}")
    if found["prepared_with"] is not None:
        options = (f"{key}={value}" for key, value in found["prepared_with"].items() if value is not None)
        click.echo(printable(f"prepared with {', '.join(options)}"))


def _mixing(mean: float, expected: float) -> str:
    """Format a line about how well the classes are shuffled."""
    return f"  different classes among {WINDOW} images in a row: {mean:.1f} (in random order {expected:.1f})"


def _describe(folder: Path, dataset: Dataset) -> dict[str, Any]:
    """Return the JSON output of `info`."""
    manifest = read_data_manifest(folder) if (folder / MANIFEST).is_file() else None
    splits = {}
    for split, images in dataset.splits.items():
        entry = manifest["splits"][split] if manifest else {}
        splits[split] = {
            "images": len(images),
            "bytes": sum(images.size(i) for i in range(len(images))),
            "images_of_class": np.bincount(images.labels, minlength=len(dataset.classes)).tolist(),
            "classes_in_window": mean_classes_in_window(images.labels),
            "expected_classes_in_window": expected_classes_in_window(images.labels),
            "shards": entry.get("shards"),
            "damaged": entry.get("damaged", []),
            "unusual": entry.get("unusual", {}),
        }
    options = manifest["options"] if manifest else None
    return {"classes": list(dataset.classes), "window": WINDOW, "splits": splits, "prepared_with": options}


@data_command.command("verify")
@FOLDER
@format_option
def verify(folder: Path, output_format: str) -> int:
    """Compare every byte of a prepared folder with its index. Exit with status 1 if a sample is damaged."""
    if not (folder / MANIFEST).is_file():
        raise InputError(_not_prepared(folder))
    splits = read_data_manifest(folder)["splits"]
    damaged: list[str] = []
    total = sum(entry["images"] for entry in splits.values())
    with tqdm(total=total, unit="img", file=sys.stderr, delay=1, disable=not shows_bars()) as bar:
        for split in splits:
            for problem in sample_problems(folder, split):
                bar.update()
                if problem:
                    damaged.append(problem)
                    click.echo(printable(problem), err=output_format == "json")
    if output_format == "json":
        print_json({"folder": str(folder), "samples": total, "damaged": damaged})
    else:
        click.echo(f"{folder}: {len(damaged):,} of {plural(total, 'sample')} damaged")
    return int(bool(damaged))


def _not_prepared(folder: Path) -> str:
    """Return why a folder cannot be verified, and the next step."""
    if not folder.is_dir():
        return f"data folder {folder} does not exist: give the output of cputrain prepare"
    return (
        f"{folder} has no {MANIFEST}: only the output of cputrain prepare can be verified, as in cputrain prepare "
        f"imagefolder {folder} OUT; cputrain data info {folder} describes it"
    )


@data_command.command("show")
@FOLDER
@settings_argument
@click.option(
    "--split", type=click.Choice(SPLITS), default="train", show_default=True, help="draw images of this split"
)
@number_option("--count", default=64, help="draw N images")
@path_option(
    "--output",
    default=Path("sheet.png"),
    show_default=True,
    help=f"write the picture to this file; its suffix is the format: {', '.join(FORMATS)}",
)
@click.option(
    "--as-trained",
    "recipe",
    metavar="RECIPE",
    help="draw images as this recipe's training sees them: cropped, scaled, mirrored, augmented; KEY=VALUE sets a key",
)
@LABELS
@number_option("--epoch", default=1, help="draw the augmentation of this epoch; needs --as-trained")
@click.option("--overwrite", is_flag=True, help="replace an existing picture")
@format_option
def show(
    folder: Path,
    settings: tuple[str, ...],
    split: str,
    count: int,
    output: Path,
    recipe: str | None,
    label_column: str | None,
    epoch: int,
    overwrite: bool,
    output_format: str,
) -> None:
    """Draw the first images with their class names as one picture."""
    _check_picture(output, overwrite=overwrite)
    if settings and recipe is None:
        raise InputError(f"{settings[0]} sets a key of a recipe: add --as-trained RECIPE, or remove it")
    dataset = open_dataset(str(folder), label_column=label_column)
    if split not in dataset.splits:
        raise InputError(f"{folder} has no {split} split: it has {', '.join(dataset.splits)}")
    images = dataset.splits[split]
    out = io.BytesIO()
    env = os.environ
    if recipe is None:
        squares = transformed_squares(images, choose_decoder("auto", env)[0], PLAIN)
        sheet = contact_sheet(images, dataset.classes, squares, count=count)
    else:
        training = load_training(recipe, settings)
        decode, _ = choose_decoder(training.data.decoder, env)
        now = training.at_epoch(epoch - 1)
        transform = training_transform(training.data, now.crop, now.train_crop)
        squares = transformed_squares(images, decode, transform, seed=training.seed, epoch=epoch - 1)
        sheet = contact_sheet(images, dataset.classes, squares, count=count, side=transform.image_size)
    sheet.save(out, FORMATS[output.suffix.lower()])
    write_bytes(output, out.getvalue())
    shown = min(count, len(images))
    if output_format == "json":
        print_json({"file": str(output), "split": split, "images": shown})
    else:
        click.echo(f"{output}: {shown:,} of {plural(len(images), f'{split} image')}")


def _check_picture(file: Path, *, overwrite: bool) -> None:
    """Raise InputError for an output file of an unknown picture format, or an existing one without --overwrite."""
    if file.suffix.lower() not in FORMATS:
        raise InputError(
            f"--output {file}: {file.suffix or 'a name without a suffix'} is not a picture format; "
            f"use {join_or(tuple(FORMATS))}"
        )
    if file.exists() and not overwrite:
        raise InputError(f"--output {file} already exists: name another file, or add --overwrite")


def parse_fraction(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """Parse a decimal or a fraction strictly between 0 and 1."""
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
    """Return the kind unchanged. Raises BadParameter with a list of the kinds if it is not one of them."""
    if kind not in KINDS and not kind.startswith(TORCHVISION):
        raise click.BadParameter(f"{kind!r} is not one of {', '.join(KINDS)}, {TORCHVISION}NAME")
    return kind


@click.command("prepare")
@click.argument("kind", callback=check_kind)
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument("out", type=click.Path(path_type=Path))
@number_option("--seed", least=0, default=1, help="shuffle the images with this random seed")
@number_option("--shard-mib", default=SHARD_BYTES // MIB, metavar="MIB", help="make shards of about this size")
@number_option("--shards", help="make N shards per split, instead of --shard-mib")
@click.option(
    "--val-fraction",
    callback=parse_fraction,
    metavar="SHARE",
    help="use this share of the training images (0.2, 1/6) for validation, drawn from each class by --seed; validation "
    "images of the source become the test split  [default: 0.2 for a source without any]",
)
@click.option(
    "--test-fraction",
    callback=parse_fraction,
    metavar="SHARE",
    help="draw a test split in the same way; only for a source without validation images",
)
@LABELS
@click.option(
    "--format",
    type=click.Choice(sorted(SHARD_FORMATS)),
    default="tar",
    show_default=True,
    help="choose the format; tar: for webdataset readers; tfrecord: for TensorFlow's ImageNet scripts, labels from 1",
)
@number_option("--short-side", least=8, metavar="PIXELS", help="scale larger images down to this short side")
@number_option("--quality", most=95, metavar="1-95", help=f"re-encode JPEGs with this quality  [default: {QUALITY}]")
@number_option("--jobs", help="use N threads  [default: the CPUs available to this process]")
def prepare_command(
    kind: str, source: Path, out: Path, shard_mib: int, quality: int | None, jobs: int | None, **given: Any
) -> None:
    """Pack images into shuffled shards, readable by cputrain and any webdataset or TFRecord reader.

    \b
    imagefolder  SRC/train/CLASS/*, SRC/val/CLASS/* and SRC/test/CLASS/*, or some of them,
                 or SRC/CLASS/*
    imagenet     ILSVRC2012's archives in SRC, the folders that they unpack to, or Kaggle's
    mnist        the four idx files in SRC, gzipped or not
    caltech256   256_ObjectCategories.tar or its folder
    parquet      Parquet or Arrow files of Hugging Face datasets, in SRC, SRC/data or SRC/SPLIT
    tfrecord     TFRecords: train-*-of-*, validation-*-of-*; NAME-train.tfrecord-*-of-*
    webdataset   tar files whose samples are KEY.jpg and KEY.cls, or KEY.json with a label
    digits       scikit-learn's handwritten digits, written to SRC first
    torchvision:NAME  one of torchvision's data sets, in SRC, or downloaded to it

    Image files are stored unchanged, or re-encoded as JPEG with --short-side or --quality. With --format tfrecord,
    whose readers decode only JPEGs, other formats and CMYK become JPEGs of quality 100. Unreadable images are skipped
    and listed. A command that was killed continues when it is repeated; a finished one does nothing.
    """
    check_writable(out, "OUT")
    if kind == "digits" and not source.exists():
        write_digits(source)
    if given["short_side"] is not None:
        quality = quality or QUALITY
    options = Options(kind=kind, source=str(source.resolve()), shard_bytes=shard_mib * MIB, quality=quality, **given)
    choice = {name: given[name] for name in ("val_fraction", "test_fraction", "seed", "label_column")}
    dataset = open_source(kind, source, **choice)
    for note in dataset.notes:
        click.echo(printable(note))
    was_there = is_begun(out)
    splits = _pack(dataset, out, options, jobs)
    if was_there:
        click.echo(f"{out} is already complete, with these options; nothing to do")
    _show(out, dataset.classes if options.format == "tfrecord" else (), splits)


def _pack(dataset: Dataset, out: Path, options: Options, threads: int | None) -> Splits:
    """Write the shards, with a progress bar; return the manifest's entry for each split."""
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
            return pack_dataset(dataset, out, options, threads=threads, on_image=bar.update)
        except OSError as error:
            raise RunError(
                f"prepare: cannot write {out}: {error.strerror or error}; finished shards are kept: fix this and "
                "repeat the command"
            ) from None


def _show(out: Path, tfrecord_classes: tuple[str, ...], splits: Splits) -> None:
    """Print the labels of TFRecords, and each split's images, shuffling and unusual or damaged files."""
    if tfrecord_classes:
        names = tfrecord_classes
        click.echo(f"{out}: labels 1 ({printable(names[0])}) to {len(names)} ({printable(names[-1])}); 0 is not used")
    for split, entry in splits.items():
        click.echo(f"{out}: {split} {entry['images']:,} images in {plural(entry['shards'], 'shard')}")
        click.echo(_mixing(entry["mixing"]["classes_in_32"], entry["mixing"]["at_random"]))
        if entry["unusual"]:
            click.echo("  " + ", ".join(f"{name}: {count:,}" for name, count in sorted(entry["unusual"].items())))
        if entry["damaged"]:
            count = plural(len(entry["damaged"]), "unreadable image")
            click.echo(printable(f"  {count} skipped: {summarize_corrupt(entry['damaged'])}"))
