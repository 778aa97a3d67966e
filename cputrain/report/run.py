"""A run's folder as read for pages: events, resource use, summary, history."""

import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cputrain.affinity.errors import InputError, as_option, as_recipe_key
from cputrain.affinity.filesystem import PLAN_FILE
from cputrain.affinity.planner.plan import Plan, WorkerPlan
from cputrain.affinity.planner.plan_file import plan_from_dict, plan_of_host, read_json
from cputrain.affinity.wording import GIB, first_named, plural
from cputrain.data.settings import USER_SAMPLES
from cputrain.files import ENVIRONMENT, PLAN, RECIPE
from cputrain.mpi.usage import FOLDER, HostUse, Use, WorkerUse, read_usage_records, sum_networks
from cputrain.mpi.usage import FOLDER as USAGE
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.resume import differences, values_by_key
from cputrain.recipe.schema import Recipe
from cputrain.rows import Column, Rows
from cputrain.runs.events import FILE, Log, elapsed, read_log, seconds_between

LOOPBACK = "lo"
MB = 1e6
PAUSE_S = 2.0  # a longer gap without records is the pause between the end of a run and its resumption

DONE, STOPPED, RUNNING, INTERRUPTED, NOT_STARTED = "done", "stopped", "running", "interrupted", "not started"
LAST_EVENTS = 100  # whose intervals count
PATIENCE_S, PATIENCE = 120.0, 10.0  # silence that is normal, and as a multiple of the longest interval so far

NamedValues = list[tuple[str, str]]
"""(name, value) pairs."""
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400

MIN_BUSY_FRACTION = (
    0.8  # share of their CPUs' time that workers of a training compute at least, unless something slows them
)
MIN_USAGE_S = 60.0  # of resource use, of which starting is a small part
OTHERS = 0.05  # share of a host's planned CPUs that other programs use

MAX_WARNINGS, MAX_IMAGES = 200, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resource use of a run: records by rank and by host, oldest first; and each rank's planned worker."""

    workers: dict[int, list[WorkerUse]]
    hosts: dict[str, list[HostUse]]
    planned: dict[int, WorkerPlan]


def read_usage(run: Path) -> Usage | None:
    """Read the records in a run's folder; None if nothing was sampled."""
    folder = run / FOLDER
    workers = {
        int(path.stem[len("rank-") :]): read_usage_records(path, WorkerUse) for path in folder.glob("rank-[0-9]*.jsonl")
    }
    hosts = {path.stem[len("host-") :]: read_usage_records(path, HostUse) for path in folder.glob("host-*.jsonl")}
    nonempty = {rank: workers[rank] for rank in sorted(workers) if workers[rank]}
    if not nonempty:
        return None
    return Usage(
        workers=nonempty,
        hosts={host: hosts[host] for host in sorted(hosts) if hosts[host]},
        planned=_planned_workers(run / PLAN_FILE, {rank: records[-1].host for rank, records in nonempty.items()}),
    )


def _planned_workers(path: Path, host_of: dict[int, str]) -> dict[int, WorkerPlan]:
    """Return each rank's planned worker, omitting hosts that ran a different number of ranks than planned."""
    try:
        data = read_json(path)
    except InputError:  # missing or damaged
        return {}
    plans: dict[int, WorkerPlan] = {}
    for host in sorted(set(host_of.values())):
        ranks = sorted(rank for rank, where in host_of.items() if where == host)
        try:
            plan = plan_of_host(data, host)
            workers = plan_from_dict(plan).workers
        except InputError:
            continue  # the host is not in the plan, for example after a requeue
        if len(workers) == len(ranks):
            plans |= dict(zip(ranks, workers, strict=True))
    return plans


def busy_cpus(record: WorkerUse | HostUse) -> float:
    """Return the mean number of busy CPUs: CPU seconds per second."""
    return record.cpu_s / record.seconds if record.seconds > 0 else 0.0


def mean_of(records: Sequence[Use], value: Callable[[Use], float]) -> float:
    """Return the mean of a rate over time."""
    return sum(value(r) * r.seconds for r in records) / max(sum(r.seconds for r in records), 1e-9)


def mb_per_s(name: str, direction: int) -> Callable[[HostUse], float]:
    """Return a function for a record's MB/s on an interface, received (0) or sent (1)."""
    return lambda r: r.network.get(name, (0, 0))[direction] / MB / r.seconds if r.seconds > 0 else 0.0


def interfaces_of(records: Sequence[HostUse]) -> list[str]:
    """Return a host's interfaces with traffic, the busiest first, the loopback last."""
    by_name = sum_networks(*(record.network for record in records))
    return sorted(by_name, key=lambda name: (name == LOOPBACK, -sum(by_name[name]), name))


def worker_table(usage: Usage) -> Rows:
    """Return a row for each rank."""

    def planned(of: Callable[[WorkerPlan], float | None]) -> Callable[[int], float | None]:
        return lambda rank: of(usage.planned[rank]) if rank in usage.planned else None

    columns = (
        Column("rank", lambda rank: rank),
        Column("host", lambda rank: usage.workers[rank][-1].host),
        Column("CPUs busy, mean", lambda rank: mean_of(usage.workers[rank], busy_cpus), ".2f"),
        Column("peak", lambda rank: max(map(busy_cpus, usage.workers[rank])), ".2f"),
        Column("planned CPUs", planned(lambda plan: len(plan.pus))),
        Column("memory GiB, peak", lambda rank: max(r.rss_bytes for r in usage.workers[rank]) / GIB, ".2f"),
        Column("estimated", planned(lambda plan: plan.memory_bytes / GIB if plan.memory_bytes else None), ".2f"),
        Column("processes", lambda rank: max(r.processes for r in usage.workers[rank])),
    )
    return Rows(columns, list(usage.workers))


def host_table(usage: Usage) -> Rows:
    """Return a row for each host."""
    columns = (
        Column("host", lambda host: host),
        Column("CPUs busy, mean", lambda host: mean_of(usage.hosts[host], busy_cpus), ".2f"),
        Column("peak", lambda host: max(map(busy_cpus, usage.hosts[host])), ".2f"),
        Column(
            "available memory GiB, minimum",
            lambda host: min(r.memory_available_bytes for r in usage.hosts[host]) / GIB,
            ".1f",
        ),
    )
    return Rows(columns, list(usage.hosts))


def network_table(usage: Usage) -> Rows:
    """Return a row for each host and interface."""

    def mean_and_peak(what: str, direction: int) -> tuple[Column, Column]:
        return (
            Column(f"MB/s {what}, mean", lambda row: mean_of(usage.hosts[row[0]], mb_per_s(row[1], direction)), ".3f"),
            Column("peak", lambda row: max(map(mb_per_s(row[1], direction), usage.hosts[row[0]])), ".3f"),
        )

    columns = (
        Column("host", lambda row: row[0]),
        Column("interface", lambda row: "lo (loopback)" if row[1] == LOOPBACK else row[1]),
        *mean_and_peak("received", 0),
        *mean_and_peak("sent", 1),
    )
    return Rows(columns, [(host, name) for host, records in usage.hosts.items() for name in interfaces_of(records)])


def running_time(usage: Usage) -> Callable[[Sequence[float]], np.ndarray]:
    """Return a function from Unix times to seconds of running time, excluding pauses before resumptions."""
    every: list[Sequence[WorkerUse | HostUse]] = [*usage.workers.values(), *usage.hosts.values()]
    spans: list[tuple[float, float]] = []
    for start, end in sorted((r.time - r.seconds, r.time) for records in every for r in records):
        if spans and start <= spans[-1][1] + PAUSE_S:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((start, end))
    edges = [edge for span in spans for edge in span]
    before = accumulate((end - start for start, end in spans), initial=0.0)
    elapsed = [edge for pair in pairwise(before) for edge in pair]
    return lambda times: np.interp(times, edges, elapsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's folder. `by_name` has the events of each name with their seconds of running time since the first event;
    `problems` are messages about unreadable files. Without events, only resource use is known."""

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
        """Whether it is a training rather than a launched command."""
        return bool(self.recipe_text or self.events)

    @property
    def settings(self) -> dict[str, Any] | None:
        """The recipe's values by dotted key; None without a readable recipe."""
        return values_by_key(self.recipe) if self.recipe else None

    @property
    def changed_settings(self) -> dict[str, tuple[Any, Any]]:
        """The settings that differ from the defaults: dotted key -> default and value."""
        return differences(Recipe(), self.recipe) if self.recipe else {}

    @property
    def start(self) -> dict[str, Any]:
        """The event of the last start; {} if there is none."""
        return next((event for event in reversed(self.log.written) if event["event"] == "start"), {})

    @property
    def end(self) -> dict[str, Any] | None:
        """The end event; None if the run has not ended, or was started again."""
        last = next((e for e in reversed(self.log.written) if e["event"] in ("start", "end")), None)
        return last if last is not None and last["event"] == "end" else None

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name."""
        return self.with_times(name)[0]

    def with_times(self, name: str) -> tuple[list[dict[str, Any]], list[float]]:
        """Return the events of this name and their times."""
        return self.by_name.get(name, ([], []))

    def status(self, now: float | None = None) -> str:
        """Return the run's status at a Unix time (None: now); recent samples of resource use also show that it runs."""
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


def default_settings() -> dict[str, Any]:
    """Return the default values of recipes by dotted key."""
    return values_by_key(Recipe())


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises InputError if it has neither a recipe, events nor samples of resource use."""
    if not contains_run(folder):
        raise InputError(
            f"{folder} contains no run ({RECIPE}, {FILE} or {USAGE}/); name the output folder of a run or a sweep"
        )
    problems: list[str] = []
    log, usage, text = read_log(folder), read_usage(folder), _text(folder / RECIPE)
    if log.damaged:
        problems.append(f"{plural(log.damaged, 'damaged line')} of {FILE} omitted")
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
    """Return whether a folder belongs to a training, which may have just started, or to a launched command."""
    return any((folder / name).exists() for name in (RECIPE, FILE, USAGE))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="backslashreplace") if path.is_file() else ""


def _recipe(path: Path, problems: list[str]) -> Recipe | None:
    try:
        return load_recipe(str(path))
    except InputError as error:
        problems.append(f"{RECIPE} is damaged or of another version and shown unchanged: {error}")
        return None


def _environment(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(_text(path) or "{}")
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        problems.append(f"{ENVIRONMENT} is damaged and omitted")
        return {}
    return content


def _plans(path: Path, problems: list[str]) -> tuple[tuple[str, Plan], ...]:
    """Return the plan of each group of hosts with the hosts' names ("" if all hosts have the same plan)."""
    if not path.is_file():
        return ()
    try:
        data = read_json(path)
        groups = data.get("host_groups") if isinstance(data, dict) else None
        if groups is None:
            return (("", plan_from_dict(data)),)
        return tuple((", ".join(map(str, group["hosts"])), plan_from_dict(group["plan"])) for group in groups)
    except (InputError, KeyError, TypeError) as error:
        problems.append(f"{PLAN} is damaged or of another version and omitted: {error}")
        return ()


def unit_of(start: Mapping[str, Any]) -> str:
    """Return the word for samples of the run's data, from its start event."""
    data = start.get("data")
    return str(data) if data in ("points", "samples") else "images"


def duration_text(seconds: float) -> str:
    """Format seconds: "0.4 s", "52 s", "3 min 20 s", "5 h 07 min", "2 d 03 h"."""
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min {whole % MINUTE_S:02} s"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S:02} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S:02} h"


def date_text(time: float) -> str:
    """Format a Unix time as "2026-11-22 18:24 UTC"."""
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def best_of(run: Run) -> tuple[str, str, dict[str, Any]] | None:
    """Return the best evaluation: measure, value and the epoch's event; None if there is none."""
    epochs = run.of("epoch")
    if scored := [event for event in epochs if event["val_top1"] is not None]:
        best = max(scored, key=lambda event: event["val_top1"])
        return "top-1", f"{best['val_top1']:.2f} %", best
    if losses := [event for event in epochs if event["val_loss"] is not None]:
        best = min(losses, key=lambda event: event["val_loss"])
        return "validation loss", f"{best['val_loss']:.4f}", best
    return None


def status_text(run: Run, status: str) -> str:
    """Describe the run's status in a sentence, with what continues it."""
    last, total = _last_step(run), run.start.get("last_step")
    at = f"step {last:,}" + (f" of {total:,}" if total else "")
    seen = f", last event {date_text(run.log.written[-1]['time'])}" if run.log.written else ""
    resume = f"cputrain train {shlex.quote(str(run.folder))} --resume"
    if run.recipe is not None and run.recipe.data.path == USER_SAMPLES:
        resume = f"{run.recipe.wording('resume', 'true')} in the script"
    return {
        DONE: f"all {plural(last, 'step')} done",
        STOPPED: f"stopped after {at}; continue with {resume}",
        RUNNING: f"running, at {at}{seen}",
        INTERRUPTED: f"interrupted after {at}{seen}; continue with {resume}",
        NOT_STARTED: "no event yet",
    }[status]


def _last_step(run: Run) -> int:
    steps = (event["step"] for event in reversed(run.events) if event["event"] in ("step", "epoch"))
    return int(next(steps, (run.end or {}).get("steps", 0)))


def run_figures(run: Run) -> NamedValues:
    """Return the figures at the top of the page as (name, value)."""
    rows: NamedValues = []
    end, best = run.end or {}, best_of(run)
    if best is not None:
        rows.append((f"best {best[0]}, epoch {best[2]['epoch']:g}", best[1]))
    last = next((event for event in reversed(run.of("epoch")) if event["val_top1"] is not None), None)
    final = end.get("top1") if end.get("top1") is not None else last and last["val_top1"]
    if final is not None:
        rows.append(("final top-1" if run.end else "latest top-1", f"{final:.2f} %"))
    for label, key in (("top-5", "top5"), ("test top-1", "test_top1"), ("test top-5", "test_top5")):
        if end.get(key) is not None:
            rows.append((label, f"{end[key]:.2f} %"))
    spent = run.log.spent
    if spent.starts:
        over = f" over {spent.starts} starts" if spent.starts > 1 else ""
        rows.append(("time to train" if run.end else "trained for", duration_text(spent.training_s) + over))
    speeds = [event["images_per_s"] for event in run.of("epoch")] or [e["images_per_s"] for e in run.of("step")]
    if speeds:
        rows.append((f"{unit_of(run.start)}/s", f"{median(speeds):,.1f}"))
    if run.start.get("workers"):
        hosts = len({binding["host"] for binding in run.start["bindings"]})
        rows.append(("workers", f"{run.start['workers']:,} on {plural(hosts, 'host')}"))
    if run.start.get("global_batch"):
        rows.append(("global batch", f"{run.start['global_batch']:,}"))
    return rows


def run_particulars(run: Run) -> NamedValues:
    """Return hardware, software and data of the run, one row for each known item."""
    start, environment, spent = run.start, run.environment, run.log.spent
    written = run.log.written
    hosts = sorted({binding["host"] for binding in start.get("bindings", ())})
    end, saved = run.end or {}, next(reversed(run.of("checkpoint")), None)
    values: list[tuple[str, Any]] = [
        ("started", date_text(written[0]["time"]) if written else ""),
        ("wall time", duration_text(spent.wall_s) if spent.starts > 1 else ""),
        ("hosts", first_named(hosts)),
        ("CPU", "; ".join(dict.fromkeys(_cpu(plan) for _, plan in run.plans))),
        ("steps", f"{end['steps']:,}" if "steps" in end else ""),
        (unit_of(run.start), f"{end['images']:,}" if "images" in end else ""),
        ("data", _data(run)),
        ("validation loss", f"{end['val_loss']:.4f}" if end.get("val_loss") is not None else ""),
        ("backend", _because(environment.get("backend") or start.get("backend"), environment.get("backend_why"))),
        ("engine", _because(environment.get("engine"), environment.get("engine_why"))),
        ("decoder", environment.get("decoder")),
        ("allocator", environment.get("allocator")),
        ("instructions", environment.get("cpu_capability")),
        ("torch", environment.get("torch")),
        ("cputrain", environment.get("cputrain")),
        ("Python", environment.get("python")),
        ("kernel", environment.get("kernel")),
        ("last checkpoint", f"step {saved['step']:,}, {date_text(saved['time'])}" if saved else ""),
    ]
    return [(name, str(value)) for name, value in values if value]


def _cpu(plan: Any) -> str:
    machine = plan.machine
    cores, packages = len(machine.cores), len(machine.packages)
    memory = sum(node.memory_bytes or 0 for node in machine.numa_nodes) / GIB
    size = f", {memory:.0f} GiB" if memory else ""
    return f"{machine.model}: {plural(packages, 'package')}, {plural(cores, 'core')}{size}"


def _data(run: Run) -> str:
    kind, count, classes = (run.start.get(key) for key in ("data", "train_images", "classes"))
    parts: Iterable[str] = (
        f"{count:,} training {unit_of(run.start)}" if count else "",
        f"of {plural(classes, 'class').replace('classs', 'classes')}" if classes and kind != "points" else "",
        f"({kind})" if kind and kind not in ("images", "points", "samples") else "",
    )
    return " ".join(filter(None, parts))


def _because(value: Any, why: Any) -> str:
    return f"{value} ({why})" if value and why else str(value or "")


def run_notes(run: Run) -> tuple[str, ...]:
    """Return the plans' warnings and, if a training's workers computed for less of the time than they could, what the
    samples say about it: lines for the top of the page."""
    wording = as_recipe_key if run.trained else as_option
    several = len(run.plans) > 1
    planned = [
        f"{hosts}: {warning}" if several else warning
        for hosts, plan in run.plans
        for warning in plan.render(wording).warnings
    ]
    slow = _idle_note(run.usage) if run.usage is not None and run.events else ""
    return (*dict.fromkeys(planned), *filter(None, (slow,)))


def _idle_note(usage: Usage) -> str:
    """Describe how much of their CPUs' time the workers had, and who had the rest; "" above MIN_BUSY_FRACTION."""
    used = {rank: mean_of(usage.workers[rank], busy_cpus) for rank in usage.planned}
    cpus = {rank: len(plan.compute_pus) for rank, plan in usage.planned.items()}
    if not used or min(sum(r.seconds for r in usage.workers[rank]) for rank in used) < MIN_USAGE_S:
        return ""
    fraction = sum(used.values()) / sum(cpus.values())
    if fraction >= MIN_BUSY_FRACTION:
        return ""
    notes = []
    for host, records in usage.hosts.items():
        ranks = [rank for rank in used if usage.workers[rank][-1].host == host]
        by_others = mean_of(records, busy_cpus) - sum(used[rank] for rank in ranks)
        if ranks and by_others > OTHERS * sum(cpus[rank] for rank in ranks):
            notes.append(f"{by_others:.1f} CPUs on {host}")
    why = f"other programs used {first_named(notes)}" if notes else "see the waits below"
    return f"the workers used {100 * fraction:.0f} % of the time of the CPUs on which they compute: {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningSummary:
    """A warning: its text, how often and in which range of steps it occurred, and the images that it names."""

    what: str
    times: int
    first: int
    last: int
    images: tuple[str, ...]
    more_images: int


def warnings_of(run: Run) -> tuple[WarningSummary, ...]:
    """Return the warnings, identical ones merged, in the order of their first occurrence."""
    by_text: dict[str, list[Mapping[str, Any]]] = {}
    for event in run.of("warning"):
        by_text.setdefault(event["what"], []).append(event)
    warnings = []
    for what, events in list(by_text.items())[:MAX_WARNINGS]:
        steps = [event.get("step", 0) for event in events]
        images = tuple(dict.fromkeys(image for event in events for image in event.get("images", ())))
        warnings.append(
            WarningSummary(
                what=what,
                times=len(events),
                first=min(steps),
                last=max(steps),
                images=images[:MAX_IMAGES],
                more_images=len(images[MAX_IMAGES:]),
            )
        )
    return tuple(warnings)


def faults_of(run: Run) -> tuple[str, ...]:
    """Describe each restart: how the previous start ended, the pause, and the repeated steps."""
    lines: list[str] = []
    done, last, ended = 0, None, False
    for event in run.log.written:
        if event["event"] == "start" and last is not None:
            how = "stopped" if ended else "interrupted"
            pause = duration_text(max(event["time"] - last["time"], 0.0))
            lines.append(f"{how} after step {done:,}, started again {pause} later ({date_text(event['time'])})")
        if event["event"] == "step":
            if event["step"] <= done and lines:
                lines[-1] += f"; {plural(done - event['step'] + 1, 'step')} repeated"
            done = event["step"]
        last, ended = event, event["event"] == "end"
    return tuple(lines)
