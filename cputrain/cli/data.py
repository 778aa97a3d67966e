"""cputrain data: what a data folder holds, whether it is whole, what it looks like."""

import io
import sys
from pathlib import Path

import click
import numpy as np
from tqdm import tqdm

from affinity.errors import InputError
from cputrain.data.folder import SPLITS
from cputrain.data.manifest import MANIFEST, read_manifest
from cputrain.data.mixing import classes_expected, classes_together
from cputrain.data.sheet import contact_sheet
from cputrain.data.source import open_dataset
from cputrain.data.verify import problems
from cputrain.files import write_atomic

FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@click.group("data")
def command() -> None:
    """Look at data that `cputrain prepare` made, or at an image folder."""


@command.command("info")
@FOLDER
def info(folder: Path) -> None:
    """Classes, images, sizes, oddities, and how well categories are mixed."""
    dataset = open_dataset(str(folder))
    more = ", ..." if len(dataset.classes) > 5 else ""
    click.echo(f"{len(dataset.classes):,} classes: {', '.join(dataset.classes[:5])}{more}")
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    for split, images in dataset.splits.items():
        labels = images.labels
        per_class = np.bincount(labels, minlength=len(dataset.classes))
        size = sum(images.size(i) for i in range(len(images)))
        mix = f"{classes_together(labels):.1f} (at random {classes_expected(labels):.1f})"
        a_class = f"{per_class.min():,} to {per_class.max():,} a class"
        click.echo(f"{split}: {len(images):,} images, {size / 1e6:,.1f} MB, {a_class}, classes in 32 in a row: {mix}")
        if manifest:
            made = manifest["splits"][split]
            odd = "".join(f", {name}: {count:,}" for name, count in sorted(made["odd"].items()))
            click.echo(f"  {made['shards']} shard(s), left out as damaged: {len(made['damaged']):,}{odd}")
    if manifest:
        chosen = (f"{key}={value}" for key, value in manifest["made"].items() if value is not None)
        click.echo(f"made with {', '.join(chosen)}")


@command.command("verify")
@FOLDER
def verify(folder: Path) -> int:
    """Read every byte of a prepared folder and compare it with the index; status 1 where a sample is damaged."""
    if not (folder / MANIFEST).is_file():
        raise InputError(f"{folder} has no {MANIFEST}: only what cputrain prepare wrote can be verified")
    splits = read_manifest(folder)["splits"]
    found = []
    with tqdm(total=sum(made["images"] for made in splits.values()), unit="img", file=sys.stderr, delay=1) as bar:
        for split in splits:
            for wrong in problems(folder, split):
                bar.update()
                if wrong:
                    found.append(wrong)
                    click.echo(wrong)
    click.echo(f"{folder}: {len(found):,} of {sum(made['images'] for made in splits.values()):,} samples damaged")
    return int(bool(found))


@command.command("show")
@FOLDER
@click.option("--split", type=click.Choice(SPLITS), default="train", show_default=True)
@click.option("--count", type=click.IntRange(1), default=64, show_default=True, help="images")
@click.option("--output", type=click.Path(path_type=Path), default=Path("sheet.png"), show_default=True)
def show(folder: Path, split: str, count: int, output: Path) -> None:
    """Draw the first images with their classes as one picture."""
    dataset = open_dataset(str(folder))
    if split not in dataset.splits:
        raise InputError(f"{folder} has no {split} split: it has {', '.join(dataset.splits)}")
    images = dataset.splits[split]
    out = io.BytesIO()
    contact_sheet(images, dataset.classes, count).save(out, "PNG")
    write_atomic(output, out.getvalue())
    click.echo(output)
