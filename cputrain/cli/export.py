"""cputrain export: a checkpoint's weights as one file for other programs."""

from pathlib import Path

import click

from affinity.errors import InputError
from cputrain.runs.folder import checkpoints_of, run_of


@click.command("export")
@click.argument("checkpoint", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--last", is_flag=True, help="the newest checkpoint of RUN, not the best one")
def command(checkpoint: Path, file: Path, last: bool) -> None:
    """Write the weights of a run's best checkpoint, or of CHECKPOINT, to FILE.

    They are the ones that evaluation uses, under torchvision's names where the network is torchvision's.
    FILE.safetensors has the network, its classes and the normalization of images in its header; FILE.pt or FILE.pth is
    a state dict for torch.load.
    """
    run = run_of(str(checkpoint))
    found, *others = checkpoints_of(run, () if run else (checkpoint,), last=last)
    if others:
        raise InputError(f"{checkpoint} has {len(others) + 1} checkpoints: name one, as in {others[-1]}")
    from cputrain.checkpoints.export import export_weights  # torch: only for this

    count = export_weights(found, file)
    click.echo(f"{file}: {count} tensors of {found}")
