"""cputrain weights: torchvision's pretrained weights of a network."""

import click

from affinity.units import MIB


@click.command("weights")
@click.argument("network", metavar="NAME")
@click.option(
    "--version", "weights", metavar="NAME", help="torchvision's name, as in IMAGENET1K_V1  [default: its best]"
)
@click.option("--mirror", metavar="URL", help="where your site has torchvision's files  [default: PyTorch's server]")
def command(network: str, weights: str | None, mirror: str | None) -> None:
    """Fetch the pretrained weights of a torchvision network (resnet50, vit_b_16, ...) into torch's cache.

    A file that is there already is only checked. Without a network, the error says which file to put where. Train from
    them with model.weights=PATH, the path that this prints; $TORCH_HOME moves the cache.
    """
    from cputrain.models.pretrained import fetch, find_pretrained  # torch: only for this

    wanted = find_pretrained(network, weights, mirror)
    how = "fetched" if fetch(wanted) else "already there"
    published = "" if wanted.accuracy is None else f", published top-1 {wanted.accuracy:.2f} %"
    size = wanted.path.stat().st_size / MIB
    click.echo(f"{wanted.name} of {network}: {how}, {size:,.1f} MiB, SHA-256 {wanted.digits}...{published}")
    click.echo(f"model.weights={wanted.path}")
