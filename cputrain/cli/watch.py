"""cputrain watch: a run as it goes on, from any terminal that sees its folder."""

import os
import sys
from pathlib import Path

import click

from affinity.errors import InputError
from affinity.terminal import redraws, shows_color
from cputrain.cli.numbers import FiniteRange
from cputrain.runs.events import FILE
from cputrain.runs.folder import RECIPE


@click.command("watch")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="print the current state and exit")
@click.option(
    "--interval",
    type=FiniteRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="S",
    help="seconds between updates",
)
def command(run: Path, once: bool, interval: float) -> None:
    """Show a run as it goes on: progress, curves, each rank's times as heat, binding, the last warnings.

    Only RUN/events.jsonl is read, so that it works from a login node. It ends with the run, or with q or Ctrl-C, which
    leave the run alone. Where the output is no terminal, or TERM=dumb, it prints how the run stands, once.
    """
    from rich.console import Console  # a tenth of a second: only for this command
    from rich.live import Live

    from cputrain.watch.keys import keys_pressed
    from cputrain.watch.screen import screen
    from cputrain.watch.state import WatchState
    from cputrain.watch.tail import EventTail

    if not (run / FILE).is_file() and not (run / RECIPE).is_file():
        raise InputError(f"{run} contains no run ({FILE}): give the output folder of a training")
    tail, state = EventTail(run / FILE), WatchState()
    env = os.environ
    console = Console(no_color=not shows_color(sys.stdout, env))
    name = run.resolve().name

    def look() -> WatchState:
        events, replaced = tail.read()
        known = WatchState() if replaced else state
        known.add(events)
        return known

    state = look()
    if redraws(sys.stdout, env) and not once:
        with (
            keys_pressed() as pressed,
            Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live,
        ):
            while state.end is None:
                live.update(screen(name, state, width=console.width, damaged=tail.damaged), refresh=True)
                if "q" in pressed(interval).lower():
                    break
                state = look()
    console.print(screen(name, state, width=console.width, damaged=tail.damaged))
