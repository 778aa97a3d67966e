"""cputrain bench: what this machine, or a run, measures."""

from pathlib import Path
from typing import Any

import click

from affinity.errors import InputError
from cputrain.runs.events import FILE, read_events
from cputrain.sweep import columns


@click.group("bench")
def command() -> None:
    """Measure."""


@command.command("optimizer")
@click.option("--ratios", "run", required=True, type=click.Path(path_type=Path), metavar="RUN", help="a run's folder")
@click.option("--step", type=int, help="of this step  [default: the last that has them]")
def optimizer(run: Path, step: int | None) -> None:
    """Each layer's norms of weights and gradients, their ratio, and LARS' trust ratio, as RUN's events have them.

    A run writes them where its recipe says so: log_norms_every_steps=100. You et al. 2018, Table 3.
    """
    if not (run / FILE).is_file():
        raise InputError(f"{run} holds no run: give a run's output folder")
    written = {event["step"]: event for event in read_events(run) if event["event"] == "ratios"}
    if not written:
        raise InputError(f"{run} has no ratios: train with log_norms_every_steps=N")
    chosen = max(written) if step is None else step
    if chosen not in written:
        raise InputError(f"{run} has no ratios of step {chosen}: it has {', '.join(map(str, sorted(written)))}")
    click.echo(f"step {chosen:,}, learning rate {written[chosen]['rate']:g}")
    click.echo(columns([("layer", "|w|", "|g|", "|w| / |g|", "trust ratio"), *map(_row, written[chosen]["layers"])]))


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    values = (layer[key] for key in ("weights", "gradients", "ratio", "trust"))
    return (layer["layer"], *("" if value is None else f"{value:.4g}" for value in values))
