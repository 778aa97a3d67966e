"""cputrain bench: measurements of a run."""

from pathlib import Path
from typing import Any

import click

from affinity.errors import InputError
from affinity.text_table import align_columns
from cputrain.runs.events import FILE, read_events


@click.group("bench")
def command() -> None:
    """Print measurements of a run."""


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
