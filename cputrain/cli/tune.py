"""cputrain tune: the fastest plan of a training on this machine, by trials."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from tqdm import tqdm

from affinity.errors import InputError
from affinity.wording import counted, first_named
from cputrain.cli.json_output import format_option, print_json
from cputrain.cli.numbers import FiniteRange
from cputrain.cli.options import settings_argument
from cputrain.cli.streams import shows_bars
from cputrain.launch.local import PlannedTraining, plan_training
from cputrain.sweep.clock import parse_clock
from cputrain.tune.candidates import AXES, Values

BAR = "{desc} |{bar:20}| {n_fmt}/{total_fmt} trials  {remaining} left"
PLANNED = ("ppn", "threads", "comm_cores", "loader_cores", "smt", "profile")


@click.command("tune")
@click.argument("recipe")
@settings_argument
@click.option(
    "--axes",
    default=",".join(AXES),
    metavar="LIST",
    show_default=True,
    help="what to vary; keys that the recipe sets are kept",
)
@click.option(
    "--steps", type=click.IntRange(1), default=5, show_default=True, metavar="N", help="steps of a trial that count"
)
@click.option("--time", "limit", metavar="HH:MM:SS", help="stop after this time, even without a winner")
@click.option(
    "--resolution",
    type=FiniteRange(0.1, 50),
    default=2.0,
    show_default=True,
    metavar="PERCENT",
    help="a difference in speed that does not matter",
)
@click.option(
    "--seed", type=int, default=1, show_default=True, metavar="N", help="random seed for the order of the trials"
)
@click.option("--dry-run", is_flag=True, help="list the plans that would be tried; start nothing")
@format_option
def command(
    recipe: str,
    settings: tuple[str, ...],
    axes: str,
    steps: int,
    limit: str | None,
    resolution: float,
    seed: int,
    dry_run: bool,
    output_format: str,
) -> None:
    """Find the fastest plan for RECIPE on this machine: workers, comm and loader cores, allocator, engine.

    Trials are some steps of the training, in turns; plans that are surely slower are dropped, until no other can be the
    fastest. plan and train then use the result for this recipe's network, precision and batch, where the recipe leaves
    a choice. Last, other local batches and precisions are tried with that plan: they change what is trained, and are
    only reported. Measure where nothing else runs.
    """
    from cputrain.measurements import keep
    from cputrain.tune import run
    from cputrain.tune.engines import engine_record
    from cputrain.tune.result import outcome_text, result_json, result_text, suggestions, tuned_record

    varied = _axes(axes)
    env = os.environ
    own = plan_training(run.tuned_recipe(recipe, settings), env)
    choices = run.choices_here(own, varied, env)
    plans = run.plans(own, choices, varied, env)
    if dry_run:
        (_list_as_json if output_format == "json" else _list)(own, plans.tried, plans.refused)
        return
    deadline = None if limit is None else time.monotonic() + parse_clock(limit)
    how = run.Settings(steps=steps, resolution=resolution / 100, seed=seed, deadline=deadline)
    with _bar("plans") as progress:
        found = run.race_here(plans, how, env, progress)
    changed = run.changes(found.winner, choices, varied, env)
    others = None
    if len(changed.tried) > 1:
        with _bar("batch and precision") as progress:
            others = run.race_here(changed, how, env, progress)
    if output_format == "json":
        click.echo(result_json(found, others))
    else:
        click.echo(result_text(found))
        click.echo(f"\n{found.why}\n{outcome_text(found)}")
        for line in suggestions(found, others):
            click.echo(line)
    described = " ".join(("cputrain tune", recipe, *settings))
    if found.sure and (engine := engine_record(found, described)) is not None:
        click.echo(f"{engine.values['why']}: kept for engine=auto in {keep(engine, env)}", err=True)
    why = _not_kept(own, varied) or ("" if found.sure else "it is not decided")
    record = None if why else tuned_record(found, described)
    if record is None:
        why = why or f"the size of {own.recipe.model.name} is not known"
        click.echo(f"not kept for plan and train: {why}", err=True)
    else:
        click.echo(f"kept in {keep(record, env)}", err=True)


def _axes(text: str) -> tuple[str, ...]:
    axes = tuple(text.split(","))
    for axis in axes:
        if axis not in AXES:
            raise InputError(f"--axes {axis!r} is none of {', '.join(AXES)}: name some of them, separated by commas")
    return axes


def _list(own: PlannedTraining, candidates: Any, refused: Sequence[tuple[Values, str]]) -> None:
    data = "generated images" if own.recipe.data.generated else f"the images of {own.recipe.data.path}"
    click.echo(f"{own.recipe.name}: {counted(len(candidates), 'plan')} to try, with {data}")
    for candidate in candidates:
        click.echo(f"  {candidate.name:<32} {' '.join(candidate.settings)}")
    for values, why in refused:
        click.echo(f"  not {', '.join(f'{axis} {value}' for axis, value in values)}: {why}")


def _list_as_json(own: PlannedTraining, candidates: Any, refused: Sequence[tuple[Values, str]]) -> None:
    plans = [{"name": each.name, "settings": dict(map(_pair, each.settings))} for each in candidates]
    others = [{"values": dict(values), "why": why} for values, why in refused]
    print_json({"recipe": own.recipe.name, "data": own.recipe.data.path, "plans": plans, "refused": others})


def _pair(setting: str) -> tuple[str, str]:
    key, _, value = setting.partition("=")
    return key, value


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of the trials, on stderr; yields what to tell it: trials that are done, and left by estimate."""
    bar: Any = tqdm(
        desc=title, total=1, file=sys.stderr, bar_format=BAR, leave=False, mininterval=0, disable=not shows_bars()
    )

    def show(done: int, left: int) -> None:
        bar.total = done + left
        bar.update(done - bar.n)
        bar.refresh()

    with bar:
        yield show


def _not_kept(own: PlannedTraining, varied: tuple[str, ...]) -> str:
    """Why the result does not hold for every such training; "" where it does."""
    fixed = [f"plan.{name}" for name in PLANNED if getattr(own.recipe.plan, name) != "auto"]
    if fixed:
        return f"the recipe sets {first_named(fixed)}"
    return "" if "workers" in varied else "the numbers of workers were not varied"
