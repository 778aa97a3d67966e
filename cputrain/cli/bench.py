"""cputrain bench: measurements of this host and of runs."""

import os
from pathlib import Path
from typing import Any

import click

from affinity.errors import InputError
from affinity.text_table import align_columns
from cputrain.cli.options import settings_argument
from cputrain.runs.events import FILE, read_events


@click.group("bench")
def command() -> None:
    """Print measurements of this host, or of a run."""


@command.command("model")
@click.argument("recipe", default="imagefolder")
@settings_argument
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="steps that are counted")
def model(recipe: str, settings: tuple[str, ...], steps: int) -> None:
    """Measure the images/s of RECIPE on this host under its plan, with generated images, and keep the result.

    simulate and plan use it as the machine's rate as long as torch, cputrain and the clock governor stay the same.
    """
    from cputrain.simulate.measured import keep
    from cputrain.simulate.trial import measured_rate

    measured = measured_rate(recipe, settings, steps)
    click.echo(
        f"{measured.network} at {measured.crop} x {measured.crop}, {measured.precision}: "
        f"{measured.images_per_s:,.4g} images/s ({measured.low:,.4g} to {measured.high:,.4g}) with "
        f"{measured.workers} x {measured.threads} threads, {measured.local_batch} images each"
    )
    click.echo(f"kept in {keep(measured, os.environ)}")


@command.command("optimizer")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=int, metavar="N", help="step to print  [default: the last recorded one]")
def optimizer(run: Path, step: int | None) -> None:
    """Print each layer's norms of weights and gradients, their ratio, and LARS' trust ratio, as recorded in RUN.

    A run records them every N steps with log_norms_every_steps=N in its recipe. See You et al. 2018, Table 3.
    """
    if not (run / FILE).is_file():
        raise InputError(f"{run} contains no run: give a run's output folder")
    written = {event["step"]: event for event in read_events(run) if event["event"] == "ratios"}
    if not written:
        raise InputError(f"{run} has recorded no norms: train with log_norms_every_steps=N")
    chosen = max(written) if step is None else step
    if chosen not in written:
        raise InputError(
            f"{run} has recorded no norms at step {chosen}: its steps are {', '.join(map(str, sorted(written)))}"
        )
    click.echo(f"step {chosen:,}, learning rate {written[chosen]['rate']:g}")
    click.echo(
        align_columns(
            [("layer", "|w|", "|g|", "|w| / |g|", "trust ratio"), *map(_row, written[chosen]["layers"])], numbers=True
        )
    )


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    values = (layer[key] for key in ("weights", "gradients", "ratio", "trust"))
    return (layer["layer"], *("" if value is None else f"{value:.4g}" for value in values))
