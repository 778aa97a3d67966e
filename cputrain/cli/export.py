"""cputrain export: a checkpoint's network as one file for other programs."""

import os
from pathlib import Path

import click

from cputrain.cli.predict import find_checkpoint
from cputrain.data.formats.folder import image_files

FORMATS = ("safetensors", "state-dict", "torchscript", "onnx")


@click.command("export")
@click.argument("checkpoint", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--to", "format_name", type=click.Choice(FORMATS), help="the format  [default: by the suffix of FILE]")
@click.option("--last", is_flag=True, help="the newest checkpoint of RUN, not the best one")
@click.option(
    "--images",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="IMAGE|FOLDER",
    help="images to compare logits with  [default: validation images of the recipe's data]",
)
def command(checkpoint: Path, file: Path | None, format_name: str | None, last: bool, images: tuple[Path, ...]) -> None:
    """Write the network of a run's best checkpoint, or of CHECKPOINT, to FILE, by default NAME.FORMAT here.

    Its weights are those that an evaluation uses, of the moving average if there is one. The file is used to compute
    the logits of some images, and gets its name only if they are an evaluation's. A FILE that is there is replaced.

    \b
    safetensors  .safetensors       weights under torchvision's names; network, classes, normalization in the header
    state-dict   .pt, .pth          weights under torchvision's names, for torch.load
    torchscript  .torchscript, .ts  for torch.jit.load, any batch size; cputrain.json inside has the rest
    onnx         .onnx              any batch size; the rest is in its metadata; needs pip install 'cputrain[onnx]'
    """
    found = find_checkpoint(checkpoint, last=last)
    if file is None:
        if format_name is None:
            raise click.UsageError(f"what to write? give FILE, or --to {', '.join(FORMATS)}")
        file = Path(f"{checkpoint.resolve().name}.{'pt' if format_name == 'state-dict' else format_name}")
    from cputrain.inference.export import choose_format, export  # torch: only for this

    done = export(found, file, choose_format(file, format_name), os.environ, image_files(images))
    click.echo(
        f"{file}: {done.tensors} tensors of {found}; logits of {done.images} images differ from an evaluation's by at "
        f"most {done.difference:.1g} of the largest one"
    )
