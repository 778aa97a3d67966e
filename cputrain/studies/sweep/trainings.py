"""The trainings of a sweep: expand runs and grid, train one after another within a time limit, record each result."""

import itertools
import json
import logging
import math
import os
import re
import shlex
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from types import FrameType
from typing import Any

import yaml

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.terminal import ExitStatus, status_of_signal
from cputrain.files import LOGS, RECIPE, write_text
from cputrain.launch.rank_process import own_line, rejection
from cputrain.mpi.supervise.processes import JobFailedError, in_one_line
from cputrain.mpi.supervise.signals import PREEMPTION_SIGNAL
from cputrain.recipe.derivation import derive, largest_local_batch
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.resume import check_folder, differences
from cputrain.recipe.schema import Recipe, SweepSection
from cputrain.report.run import Run
from cputrain.runs.events import DIVERGENCE_FACTOR, Log, elapsed, read_log
from cputrain.training.local import PlannedTraining, train_here

SEED, WORKERS = "seed", "plan.ppn"
DONE, STOPPED, FAILED, DIVERGED = "done", "stopped", "failed", "diverged"
OUT_OF_MEMORY, TIME_LIMIT, DOES_NOT_FIT, INVALID = "out of memory", "time limit", "does not fit", "invalid"

NO_MEMORY = re.compile(
    r"can't allocate memory|MemoryError|bad_alloc|Cannot allocate memory|Out of memory|not enough memory"
    r"|could not create a memory|failed to map segment|can't start new thread|Thread creation failed"
)
NON_FINITE = re.compile(r"\bloss -?(nan|inf)\b|\bNaN or Inf\b")
FILE = "sweep-run.json"
Event = dict[str, Any]
IMAGES = "images"  # the default kind of data in the start event
MAX_POINTS = 100  # of a loss curve; each is a mean of consecutive steps
AGAIN_S = 5.0  # repeat the signal, as one that is sent while the workers are being started reaches none of them
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One training of a sweep: the settings in which it differs, as (key, value) texts in order."""

    settings: tuple[tuple[str, str], ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The settings in the form that `load_recipe` takes."""
        return tuple(f"{key}={value}" for key, value in self.settings)

    @property
    def label(self) -> str:
        """The settings without the seed, abbreviated: "sgd peak_rate 0.5"."""
        return settings_label(self.settings, without=(SEED,))

    @property
    def folder(self) -> str:
        """The name of the run folder, unique within a sweep."""
        return re.sub(r"[^\w.=,+-]+", "_", ",".join(self.arguments)) or "run"


def settings_label(settings: Sequence[tuple[str, str]], *, without: Sequence[str]) -> str:
    """Abbreviate settings, omitting the keys in `without`."""
    return " ".join(
        value if key.endswith(".name") else f"{key.rpartition('.')[2]} {value}"
        for key, value in settings
        if key not in without
    )


def variants(section: SweepSection, grids: Sequence[str], runs: Sequence[str]) -> tuple[Variant, ...]:
    """Combine every run's settings with every combination of the grid; the command line replaces the recipe's section.

    `grids` are "key=a,b,c"; `runs` are "key=value key=value". Raises InputError if there is nothing to sweep over.
    """
    grid = {key: tuple(map(_text, values)) for key, values in section.grid.items()}
    if grids or runs:
        grid = dict(_parse_grid(text) for text in grids)
    together = [_parse_run(text) for text in (runs if grids or runs else section.runs)] or [()]
    trainings = tuple(
        Variant(settings=(*run, *zip(grid, values, strict=True)))
        for run in together
        for values in itertools.product(*grid.values())
    )
    if trainings == (Variant(settings=()),):
        raise InputError(
            "nothing to sweep over; pass --grid KEY=A,B,C or --run 'KEY=VALUE ...', or a recipe with a sweep section"
        )
    twice = [
        training.folder for training in trainings if sum(another.folder == training.folder for another in trainings) > 1
    ]
    if twice:
        raise InputError(f"the sweep contains {twice[0]} twice; remove one of them")
    return trainings


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(yaml.safe_dump(value)).removesuffix("...\n").strip()


def _parse_grid(text: str) -> tuple[str, tuple[str, ...]]:
    key, equals, values = text.partition("=")
    if not equals or not key or not all(values.split(",")):
        raise InputError(f"--grid {text!r} is not KEY=A,B,C, as in batch.local=32,64")
    return key, tuple(values.split(","))


def _parse_run(text: str) -> tuple[tuple[str, str], ...]:
    settings = []
    for setting in shlex.split(text):
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise InputError(f"run {text!r}: {setting!r} is not KEY=VALUE, as in 'optim.name=adam epochs=3'")
        settings.append((key, value))
    return tuple(settings)


def parse_workers(text: str) -> tuple[int, ...]:
    """Parse "1,2,4" to (1, 2, 4). Raises InputError."""
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise InputError(f"--workers {text!r} is not a list of worker counts, as in 1,2,4")
    return tuple(map(int, counts))


def outcome_of(error: RunError) -> tuple[str, str]:
    """Return status and cause of a failed training."""
    cause = error.cause if isinstance(error, JobFailedError) else None
    if cause is not None and cause.status == -signal.SIGKILL:
        killed = f"{cause.place} killed by SIGKILL"
        if cause.shortage is not None:
            return OUT_OF_MEMORY, f"{killed}: {cause.shortage}"
        return FAILED, f"{killed}: the kernel counted no out-of-memory kill; see the scheduler's log"
    tail = [line.rstrip() for line in cause.printed] if cause else []
    lacking = next((line for line in tail if NO_MEMORY.search(line)), None)
    if lacking is not None:
        return OUT_OF_MEMORY, f"allocation failed: {lacking}"
    if line := own_line(tail):
        return DIVERGED if NON_FINITE.search(line) else FAILED, line
    return FAILED, in_one_line(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """Time limit of a training (None: no limit), seconds used in all its starts, and how the last start ended.

    `status` is "" if the training ended normally or was stopped by the user.
    """

    requested_s: float | None = None
    used_s: float | None = None
    status: str = ""
    ended_by: str = ""


def read_trial_record(folder: Path) -> TrialRecord:
    """Read the record in a run's folder; returns an empty one if no start has ended yet. Raises InputError if it is
    damaged."""
    path = folder / FILE
    if not path.is_file():
        return TrialRecord()
    try:
        return TrialRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise InputError(f"{path} is damaged; remove it, which resets the training's limit and used time") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The requested sizes of a training; None if only a plan determines the size and the plan was rejected."""

    workers: int | None
    local_batch: int | None
    global_batch: int | None
    epochs: int
    optimizer: str
    weight_decay: float
    peak_rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a training; accuracies in percent, None if there is no value.

    `epochs`, `top1s`, `eval_steps` and `elapsed_s` (seconds since the training's first event, without the time between
    starts) have one entry per evaluation; `losses` are (step, training loss) until divergence. `seconds` is the time to
    train, `wall_s` the time of the whole job with startup and shutdown, `requested_s` the limit set by --time; `data`
    is "images" or the kind of generated data.
    """

    label: str
    run: str
    settings: tuple[tuple[str, str], ...]
    status: str
    setup: TrainingSetup
    ended_by: str = ""
    steps: int | None = None
    epochs: tuple[int, ...] = ()
    top1s: tuple[float, ...] = ()
    eval_steps: tuple[int, ...] = ()
    elapsed_s: tuple[float, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    top1: float | None = None
    top5: float | None = None
    train_top1: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    images_per_s: float | None = None
    epoch_s: float | None = None
    seconds: float | None = None
    wall_s: float | None = None
    requested_s: float | None = None
    data: str = IMAGES

    @property
    def best(self) -> tuple[float, int] | None:
        """The highest validation top-1 and the first step that reached it."""
        scored = zip(self.top1s, self.eval_steps, strict=True)
        return max(scored, key=lambda pair: (pair[0], -pair[1]), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedGroup:
    """The results of trainings that differ only in their seed."""

    label: str
    results: tuple[RunResult, ...]


def group_by_seed(results: Iterable[RunResult]) -> tuple[SeedGroup, ...]:
    """Group results whose settings differ only in the seed, in the order of each group's first result."""
    by_label: dict[str, list[RunResult]] = {}
    for result in results:
        by_label.setdefault(result.label, []).append(result)
    return tuple(SeedGroup(label=label, results=tuple(members)) for label, members in by_label.items())


def training_setup(
    recipe: Recipe, *, workers: int | None, local: int | None, global_: int | None, peak_rate: float | None
) -> TrainingSetup:
    """Combine a recipe's sizes with those that depend on a plan."""
    return TrainingSetup(
        workers=workers,
        local_batch=local,
        global_batch=global_,
        epochs=recipe.epochs,
        optimizer=recipe.optim.name,
        weight_decay=recipe.optim.weight_decay,
        peak_rate=peak_rate,
    )


def setup_of_run(run: Run) -> TrainingSetup:
    """Return the sizes of a run that its recipe and its last start event contain."""
    recipe = run.recipe or Recipe()
    workers = run.start.get("workers") or None
    rate, images = None, run.start.get("train_images")
    if workers and images:
        with suppress(InputError):  # for example a run of a version that counted images differently
            rate = derive(recipe, ppn=workers, nodes=1, images=images).peak_rate
    global_batch = run.start.get("global_batch") or None
    return training_setup(recipe, workers=workers, local=recipe.batch.local, global_=global_batch, peak_rate=rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidTraining:
    """A training that cannot be started here: status "does not fit" (memory) or "invalid", and the reason."""

    recipe: Recipe
    status: str
    why: str


def invalid_result(variant: Variant, training: InvalidTraining) -> RunResult:
    """Return the result of a training that could not be started."""

    def number(value: object) -> Any:
        return None if isinstance(value, str) else value

    recipe = training.recipe
    setup = training_setup(
        recipe,
        workers=number(recipe.plan.ppn),
        local=recipe.batch.local if recipe.batch.global_ is None else None,
        global_=recipe.batch.global_,
        peak_rate=number(recipe.schedule.peak_rate) if recipe.optim.scale_rate_by in ("auto", "none") else None,
    )
    return RunResult(
        label=variant.label,
        run="",
        settings=variant.settings,
        status=training.status,
        ended_by=training.why,
        setup=setup,
    )


def result_in(log: Log, variant: Variant, setup: TrainingSetup, folder: Path) -> RunResult:
    """Read the result from the log of a run folder; the training may be unfinished."""
    events = log.events
    end = next((event for event in reversed(events) if event["event"] == "end"), None)
    done = end is not None and end["status"] == DONE
    record = read_trial_record(folder)
    status = DONE if done else record.status or STOPPED
    steps = [event for event in events if event["event"] == "step"]
    epochs = [event for event in events if event["event"] == "epoch"]
    # log.written includes steps that were lost and repeated, which also took time
    since = {id(event): at for event, at in zip(log.written, elapsed(log.written), strict=True)}
    evaluated = [(e, since[id(e)]) for e in epochs if e.get("val_top1") is not None]
    start = next((event for event in events if event["event"] == "start"), {})
    last: Event = epochs[-1] if epochs else {}
    end_event = end or {}
    return RunResult(
        label=variant.label,
        run=str(folder),
        settings=variant.settings,
        status=status,
        ended_by="" if done else record.ended_by,
        setup=setup,
        steps=steps[-1]["step"] if steps else None,
        epochs=tuple(event["epoch"] for event, _ in evaluated),
        top1s=tuple(event["val_top1"] for event, _ in evaluated),
        eval_steps=tuple(event["step"] for event, _ in evaluated),
        elapsed_s=tuple(seconds for _, seconds in evaluated),
        losses=loss_curve([(event["step"], event["loss"]) for event in steps]),
        top1=end_event["top1"] if done else None,
        top5=end_event["top5"] if done else None,
        train_top1=last.get("train_top1"),
        train_loss=last.get("train_loss"),
        val_loss=next((e["val_loss"] for e in reversed(epochs) if e.get("val_loss") is not None), None),
        images_per_s=median(event["images_per_s"] for event in epochs) if epochs else None,
        epoch_s=median(event["seconds"] for event in epochs) if epochs else None,
        seconds=end_event.get("time_to_train_s") if done else None,
        wall_s=record.used_s if record.used_s is not None else end_event.get("wall_time_s"),
        requested_s=record.requested_s,
        data=start.get("data", IMAGES),
    )


def diverged_from(losses: Sequence[float | None]) -> int | None:
    """Return the index from which every loss is NaN, infinite or above DIVERGENCE_FACTOR times the first, or None."""
    first = next((loss for loss in losses if loss is not None), math.inf)
    index = len(losses)
    while index:
        loss = losses[index - 1]
        if loss is not None and not loss > DIVERGENCE_FACTOR * first > 0:  # a user's loss may be negative
            break
        index -= 1
    return index if index < len(losses) else None


def loss_curve(losses: Sequence[tuple[int, float | None]]) -> tuple[tuple[int, float], ...]:
    """Reduce to at most MAX_POINTS points (step, loss), each the mean of a chunk, ending where the loss diverges."""
    stable = losses[: diverged_from([loss for _, loss in losses])]
    size = max(1, -(-len(stable) // MAX_POINTS))
    points = []
    for first in range(0, len(stable), size):
        chunk = stable[first : first + size]
        finite = [loss for _, loss in chunk if loss is not None]
        if finite:
            points.append((chunk[-1][0], mean(finite)))
    return tuple(points)


def has_diverged(result: RunResult) -> bool:
    """Return whether the final loss is NaN, infinite, or so high that the curve was cut off."""
    cut = bool(result.steps) and (not result.losses or result.losses[-1][0] < (result.steps or 0))
    return result.status == DIVERGED or cut


def duration_text(seconds: float) -> str:
    """Format seconds: 436 -> "0:07:16"."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}"


class Limit:
    """Whether the time limit has been reached."""

    reached = False


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Limit]:
    """Send this process the preemption signal (SIGUSR1) after `seconds`, as job scripts do near a job's limit.

    Uses a timer signal instead of a thread, as this process forks. The signal is repeated every AGAIN_S seconds, and
    skipped while no handler is installed, as it would end this process.
    """
    limit = Limit()

    def notify(_number: int, _frame: FrameType | None) -> None:
        limit.reached = True
        if callable(signal.getsignal(PREEMPTION_SIGNAL)):
            os.kill(os.getpid(), PREEMPTION_SIGNAL)

    before = signal.signal(signal.SIGALRM, notify)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0, AGAIN_S)
    try:
        yield limit
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def train_all(
    planned: Sequence[tuple[Variant, PlannedTraining | InvalidTraining]],
    env: Mapping[str, str],
    limit_s: float | None = None,
) -> list[RunResult]:
    """Train everything that is not done yet, one after another, each for at most `limit_s` seconds in all its starts.

    `env` is the environment that the workers inherit. Raises InputError if a folder contains another training, RunError
    if the user stopped one, KeyboardInterrupt if a signal did.
    """
    results = []
    for number, (variant, training) in enumerate(planned, 1):
        if isinstance(training, InvalidTraining):
            results.append(invalid_result(variant, training))
            continue
        folder = training.recipe.folder
        exists = (folder / RECIPE).is_file()
        if exists and differences(load_recipe(str(folder / RECIPE)), training.recipe):
            raise InputError(
                f"{folder} contains a run of another recipe; choose another folder with --output, or remove this one"
            )
        sizes, local = training.sizes, largest_local_batch(training.recipe.batch, training.ppn)
        setup = training_setup(
            training.recipe, workers=training.ppn, local=local, global_=sizes.global_batch, peak_rate=sizes.peak_rate
        )
        result = result_in(read_log(folder), variant, setup, folder)
        used_s = result.wall_s or 0.0
        if result.status != DONE and (limit_s is None or used_s < limit_s):
            logger.info("\n%d/%d  %s", number, len(planned), " ".join(variant.arguments))
            _train(training, env, resume=exists, limit_s=limit_s, used_s=used_s)
            result = result_in(read_log(folder), variant, setup, folder)
        if result.status == STOPPED:
            raise RunError(f"training stopped in {folder}; repeat the command to continue")
        results.append(result)
    return results


def _train(
    training: PlannedTraining, env: Mapping[str, str], *, resume: bool, limit_s: float | None, used_s: float
) -> None:
    """Train, and record the time used and how it ended. Raises InputError if the folder cannot be written to."""
    check_folder(training.recipe, training.scale, resume=resume, overwrite=False)
    started = time.monotonic()
    failure: RunError | None = None
    with time_limit(None if limit_s is None else limit_s - used_s) as limit:
        try:
            status = train_here(training, env, resume=resume, overwrite=False, verify=True, quiet=False)
        except RunError as error:
            failure, status = error, ExitStatus.FAILED
    if failure is not None:
        logger.error("cputrain: %s", failure)
        outcome, why = outcome_of(failure)
    elif status == ExitStatus.WRONG_INPUT:
        outcome, why = INVALID, rejection(training.recipe.folder / LOGS)
    elif limit.reached:
        outcome, why = TIME_LIMIT, f"stopped by SIGUSR1 after --time {limit_s:g} s"
    else:
        outcome, why = "", ""
    used = used_s + time.monotonic() - started
    record = TrialRecord(requested_s=limit_s, used_s=used, status=outcome, ended_by=why)
    write_text(training.recipe.folder / FILE, json.dumps(asdict(record)))
    if status >= status_of_signal(0):
        raise KeyboardInterrupt  # a signal ends the sweep too
