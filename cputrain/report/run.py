"""A run's folder, read for a report: what is damaged or of another version is left out and named."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from affinity.errors import InputError
from affinity.planner.plan import Plan
from affinity.planner.plan_file import plan_from_dict, read_json
from affinity.wording import counted
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import Recipe
from cputrain.report.usage import Usage, read_usage
from cputrain.runs.events import FILE, Log, elapsed, read_log, seconds_between
from cputrain.runs.folder import ENVIRONMENT, PLAN, RECIPE
from mpi.usage.file import FOLDER as USAGE

DONE, STOPPED, RUNNING, INTERRUPTED, NOT_STARTED = "done", "stopped", "running", "interrupted", "not started"
LAST_EVENTS = 100  # whose silences count
PATIENCE_S, PATIENCE = 120.0, 10.0  # without a sign of life, and in units of the longest silence before


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's folder. `by_name` has the events of each name with the seconds of running since the first event;
    `problems` are lines about what could not be read. Without events, only resource use is known."""

    folder: Path
    log: Log
    events: tuple[dict[str, Any], ...]
    by_name: dict[str, tuple[list[dict[str, Any]], list[float]]]
    recipe: Recipe | None
    recipe_text: str
    environment: dict[str, Any]
    plans: tuple[tuple[str, Plan], ...]
    usage: Usage | None
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def trained(self) -> bool:
        """Whether it is a training, and not a launched command."""
        return bool(self.recipe_text or self.events)

    @property
    def start(self) -> dict[str, Any]:
        """The last start's event; {} before it."""
        return next((event for event in reversed(self.log.written) if event["event"] == "start"), {})

    @property
    def end(self) -> dict[str, Any] | None:
        """The event of the end; None where the run has not ended, or has been started again."""
        last = next((e for e in reversed(self.log.written) if e["event"] in ("start", "end")), None)
        return last if last is not None and last["event"] == "end" else None

    def of(self, name: str) -> list[dict[str, Any]]:
        """The events of this name."""
        return self.with_times(name)[0]

    def with_times(self, name: str) -> tuple[list[dict[str, Any]], list[float]]:
        """The events of this name, and their times."""
        return self.by_name.get(name, ([], []))

    def status(self, now: float | None = None) -> str:
        """How the run stands at a Unix time, without one now: the sampled use of resources is a sign of life too."""
        if self.end is not None:
            return DONE if self.end["status"] == DONE else STOPPED
        signs = [event["time"] for event in self.log.written[-1:]]
        if self.usage is not None:
            signs += [records[-1].time for records in self.usage.workers.values()]
        if not signs:
            return NOT_STARTED
        last = pairwise(self.log.written[-LAST_EVENTS:])
        silences = [seconds_between(before, after) for before, after in last if after["event"] != "start"]
        patience = max(PATIENCE_S, PATIENCE * max(silences, default=0.0))
        silent = (time.time() if now is None else now) - max(signs)
        return RUNNING if silent <= patience else INTERRUPTED


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises InputError where it has neither a recipe, events nor samples of resource use."""
    if not contains_run(folder):
        raise InputError(
            f"{folder} contains no run ({RECIPE}, {FILE} or {USAGE}/): give the output folder of a run or a sweep"
        )
    problems: list[str] = []
    log, usage, text = read_log(folder), read_usage(folder), _text(folder / RECIPE)
    if log.damaged:
        problems.append(f"{counted(log.damaged, 'damaged line')} of {FILE}, left out")
    events = log.events
    since = {id(event): at for event, at in zip(log.written, elapsed(log.written), strict=True)}
    by_name: dict[str, tuple[list[dict[str, Any]], list[float]]] = {}
    for event in events:
        of_name = by_name.setdefault(event["event"], ([], []))
        of_name[0].append(event)
        of_name[1].append(since[id(event)])
    return Run(
        folder=folder,
        log=log,
        events=tuple(events),
        by_name=by_name,
        recipe=_recipe(folder / RECIPE, problems) if text else None,
        recipe_text=text,
        environment=_environment(folder / ENVIRONMENT, problems),
        plans=_plans(folder / PLAN, problems),
        usage=usage,
        problems=tuple(problems),
    )


def contains_run(folder: Path) -> bool:
    """Whether a folder is that of a run: a training's, which may have just begun, or a launched command's."""
    return any((folder / name).exists() for name in (RECIPE, FILE, USAGE))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="backslashreplace") if path.is_file() else ""


def _recipe(path: Path, problems: list[str]) -> Recipe | None:
    try:
        return load_recipe(str(path))
    except InputError as error:
        problems.append(f"{RECIPE} is damaged or of another version, shown as it is: {error}")
        return None


def _environment(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"{ENVIRONMENT} is damaged, left out")
        return {}
    return found


def _plans(path: Path, problems: list[str]) -> tuple[tuple[str, Plan], ...]:
    """The plan of each group of hosts, with their names ("" where all hosts have the same)."""
    if not path.is_file():
        return ()
    try:
        data = read_json(path)
        groups = data.get("host_groups") if isinstance(data, dict) else None
        if groups is None:
            return (("", plan_from_dict(data)),)
        return tuple((", ".join(map(str, group["hosts"])), plan_from_dict(group["plan"])) for group in groups)
    except (InputError, KeyError, TypeError) as error:
        problems.append(f"{PLAN} is damaged or of another version, left out: {error}")
        return ()


def unit_of(start: Mapping[str, Any]) -> str:
    """The word for samples of a run's data, by its start event."""
    data = start.get("data")
    return str(data) if data in ("points", "samples") else "images"
