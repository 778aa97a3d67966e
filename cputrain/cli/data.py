"""cputrain data: describe a data folder, verify it, draw its first images."""

import io
import os
import sys
from pathlib import Path

import click
import numpy as np
from tqdm import tqdm

from affinity.errors import InputError
from affinity.wording import counted
from cputrain.data.formats.folder import SPLITS
from cputrain.data.formats.manifest import MANIFEST, read_manifest
from cputrain.data.formats.open import open_dataset
from cputrain.data.order.mixing import WINDOW, expected_classes_in_window, mean_classes_in_window
from cputrain.data.pixels.decode import choose_decoder
from cputrain.data.prepare.contact_sheet import contact_sheet
from cputrain.data.prepare.verify import problems
from cputrain.files import write_atomic

FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@click.group("data")
def command() -> None:
    """Inspect a data folder: an image folder, TFRecords, or the output of `cputrain prepare`."""


@command.command("info")
@FOLDER
def info(folder: Path) -> None:
    """Print classes, images, sizes, unusual images, and how well the classes are mixed."""
    dataset = open_dataset(str(folder))
    more = ", ..." if len(dataset.classes) > 5 else ""
    click.echo(f"{len(dataset.classes):,} classes: {', '.join(dataset.classes[:5])}{more}")
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    for split, images in dataset.splits.items():
        labels = images.labels
        per_class = np.bincount(labels, minlength=len(dataset.classes))
        size = sum(images.size(i) for i in range(len(images)))
        counts = f"{per_class.min():,} to {per_class.max():,} per class"
        click.echo(f"{split}: {len(images):,} images, {size / 1e6:,.1f} MB, {counts}")
        mean, expected = mean_classes_in_window(labels), expected_classes_in_window(labels)
        click.echo(f"  different classes among {WINDOW} images in a row: {mean:.1f} (in random order {expected:.1f})")
        if manifest:
            entry = manifest["splits"][split]
            unusual = "".join(f", {name}: {count:,}" for name, count in sorted(entry["unusual"].items()))
            damaged = counted(len(entry["damaged"]), "damaged image")
            click.echo(f"  {counted(entry['shards'], 'shard')}, {damaged} not packed{unusual}")
    if manifest:
        options = (f"{key}={value}" for key, value in manifest["options"].items() if value is not None)
        click.echo(f"prepared with {', '.join(options)}")


@command.command("verify")
@FOLDER
def verify(folder: Path) -> int:
    """Compare every byte of a prepared folder with its index. Exit status 1: a sample is damaged."""
    if not (folder / MANIFEST).is_file():
        raise InputError(f"{folder} has no {MANIFEST}: only the output of cputrain prepare can be verified")
    splits = read_manifest(folder)["splits"]
    damaged, total = 0, sum(entry["images"] for entry in splits.values())
    with tqdm(total=total, unit="img", file=sys.stderr, delay=1) as bar:
        for split in splits:
            for problem in problems(folder, split):
                bar.update()
                if problem:
                    damaged += 1
                    click.echo(problem)
    click.echo(f"{folder}: {damaged:,} of {total:,} samples damaged")
    return int(damaged > 0)


@command.command("show")
@FOLDER
@click.option("--split", type=click.Choice(SPLITS), default="train", show_default=True)
@click.option("--count", type=click.IntRange(1), default=64, show_default=True, help="how many images")
@click.option("--output", type=click.Path(path_type=Path), default=Path("sheet.png"), show_default=True)
def show(folder: Path, split: str, count: int, output: Path) -> None:
    """Draw the first images and the names of their classes as one picture."""
    dataset = open_dataset(str(folder))
    if split not in dataset.splits:
        raise InputError(f"{folder} has no {split} split: it has {', '.join(dataset.splits)}")
    images = dataset.splits[split]
    out = io.BytesIO()
    decode, _ = choose_decoder("auto", os.environ)
    contact_sheet(images, dataset.classes, decode, count=count).save(out, "PNG")
    write_atomic(output, out.getvalue())
    click.echo(output)
