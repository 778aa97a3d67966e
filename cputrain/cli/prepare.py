"""cputrain prepare: raw images -> shuffled shards."""

import sys
from pathlib import Path

import click
from tqdm import tqdm

from affinity.errors import InputError
from cputrain.data.digits import write_digits
from cputrain.data.prepare import SHARD_BYTES, prepare_folder

MIB = 1 << 20


@click.command("prepare")
@click.argument("kind", type=click.Choice(["imagefolder", "digits"]))
@click.argument("source", type=click.Path(path_type=Path), metavar="SRC")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="of the shuffle over all shards")
@click.option(
    "--shard-mib", type=click.IntRange(1), default=SHARD_BYTES // MIB, show_default=True, help="size of a shard"
)
def command(kind: str, source: Path, out: Path, seed: int, shard_mib: int) -> None:
    """Pack images into shards, shuffled over all categories, that any webdataset reader opens.

    imagefolder: SRC holds train/CLASS/* and val/CLASS/*, as unpacked ImageNet does. digits: scikit-learn's handwritten
    digits, written to SRC as such a folder first.
    """
    if out.exists():
        raise InputError(f"{out} is already there: remove it, or prepare into another folder")
    if kind == "digits":
        write_digits(source)
    with tqdm(unit="img", file=sys.stderr, desc=f"packing {source}", leave=False, delay=1) as bar:
        splits = prepare_folder(source, out, seed=seed, shard_bytes=shard_mib * MIB, seen=bar.update)
    for split, counts in splits.items():
        click.echo(f"{out}: {split} {counts['images']:,} images in {counts['shards']} shard(s)")
