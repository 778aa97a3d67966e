"""The trainings of a sweep, one after another; what is done stays done."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from affinity.errors import InputError, RunError
from cputrain.launch.local import Planned, train_here
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import LOGS, RECIPE
from cputrain.runs.resume import differences
from cputrain.sweep.clock import time_limit
from cputrain.sweep.endings import DONE, REFUSED, STOPPED, TIME_LIMIT, ending, oom_kills
from cputrain.sweep.record import Record, write_record
from cputrain.sweep.results import Result, refused_result, result_of, setup_of
from cputrain.sweep.variants import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A training that cannot be started here, and why: status "does not fit" (memory) or "refused"."""

    recipe: Recipe
    status: str
    why: str


def train_all(planned: Sequence[tuple[Variant, Planned | Refused]], limit_s: float | None = None) -> list[Result]:
    """Train what is not done yet, one after another, each for `limit_s` seconds at most over all its starts.

    Raises InputError where a folder holds another training.
    """
    results = []
    for number, (variant, one) in enumerate(planned, 1):
        if isinstance(one, Refused):
            results.append(refused_result(variant, one.recipe, one.status, one.why))
            continue
        folder = one.recipe.folder
        known = (folder / RECIPE).is_file()
        if known and differences(load_recipe(str(folder / RECIPE)), one.recipe):
            raise InputError(f"{folder} holds a run of another recipe: sweep --into another folder, or take it away")
        setup = setup_of(one)
        result = result_of(variant, setup, folder)
        used_s = result.wall_s or 0.0
        if result.status != DONE and (limit_s is None or used_s < limit_s):
            click.echo(f"\n{number}/{len(planned)}  {' '.join(variant.arguments)}")
            _train(one, resume=known, limit_s=limit_s, used_s=used_s)
            result = result_of(variant, setup, folder)
        if result.status == STOPPED:
            raise RunError(f"stopped in {folder}: call sweep again to go on")
        results.append(result)
    return results


def _train(one: Planned, *, resume: bool, limit_s: float | None, used_s: float) -> None:
    """Train, and keep how long it took and how it ended."""
    started, killed, told = time.monotonic(), oom_kills(), ""
    with time_limit(None if limit_s is None else limit_s - used_s) as limit:
        try:
            status = train_here(one, resume=resume, overwrite=False, verify=True)
        except RunError as error:
            told, status = str(error), 1
    if status == 1:
        click.echo(f"cputrain: {told}", err=True)
        ended, why = ending(told, oom_killed=oom_kills() > killed)
    elif status == 2:
        ended, why = REFUSED, _last_line(one.recipe.folder / LOGS / "rank-0.log")
    elif limit.reached:
        ended, why = TIME_LIMIT, f"stopped by SIGUSR1 after --time {limit_s:g} s"
    else:
        ended, why = "", ""
    used = used_s + time.monotonic() - started
    write_record(one.recipe.folder, Record(requested_s=limit_s, used_s=used, status=ended, ended_by=why))
    if status >= 128:
        raise click.exceptions.Abort  # a signal ends the sweep too


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return lines[-1].removeprefix("cputrain: ") if lines else ""
