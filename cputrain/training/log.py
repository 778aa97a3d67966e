"""Output of a training: environment, start-up lines, progress bar, events and summary."""

import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from cputrain import __version__
from cputrain.affinity.kernel.bound_plan import PLAN_VARIABLE, read_host_plan
from cputrain.affinity.terminal import printable_lines
from cputrain.affinity.wording import GIB
from cputrain.checkpoint.folder import name_of
from cputrain.files import CHECKPOINTS
from cputrain.measurements import BF16_GAIN, bf16_line
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import EventLog, TimeSpent
from cputrain.runs.folder import wording_for
from cputrain.training.session import Session
from cputrain.training.step import Accuracy, StepResult, StepSettings, TrainResult, Watcher
from cputrain.variables import job_in, shown_variables


def describe_environment(session: Session) -> dict[str, Any]:
    """Return the content of environment.json."""
    env = session.context.env
    return {
        "cputrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": session.group.backend,
        "backend_why": session.group.why,
        "engine": session.engine.name,
        "engine_why": session.engine.why,
        "decoder": session.data.decoder,
        "allocator": read_host_plan(Path(env[PLAN_VARIABLE])).runtime.allocator,
        "torch_build": torch.__config__.show().split("\n"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
        "host": socket.gethostname(),
        "job": job_in(env),
        "variables": shown_variables(env),
    }


def binding_record(session: Session) -> dict[str, Any]:
    """Return this rank's entry in the start event: planned and actual PUs, threads and memory."""
    context = session.context
    return {
        "rank": session.rank.rank,
        "host": socket.gethostname(),
        "planned_pus": list(context.worker.pus),
        "local_batch": session.mean_local_batch,
        **asdict(context.observed),
        "threads": torch.get_num_threads(),
        "thread_pus": [list(thread.pus) for thread in session.team],
        "memory_share": session.memory_share,
    }


# Measured in docs/benchmarks.md: an all-reduce of 25 MiB over two ranks; photos, original or prepared.
CCL_GAIN = "all-reduces of 25 MiB up to 3.2 times as fast"
TURBO_GAIN = "2.6-3.6 times the images per CPU-second"
ENGINE_GAIN = "evaluations up to 1.6 times as fast, steps up to 1.2 times"
OWN_CHOICE = ("comm.backend=gloo", "data.decoder=pillow")


def startup_lines(environment: Mapping[str, Any], *, ranks: int, bf16_speedup: float) -> list[str]:
    """Return rank 0's start-up lines: the components in use, and one line for each faster one that is not in use.

    In `environment`, `backend_why` of ccl is its transport, "over libfabric (...)"; `decoder` is "NAME: WHY", where WHY
    is the library's path or the reason for the choice. `bf16_speedup` is a convolution's, 1 if the precision is not
    float32.
    """
    backend, backend_why, engine, engine_why, decoder, allocator = (
        environment[name] for name in ("backend", "backend_why", "engine", "engine_why", "decoder", "allocator")
    )
    name, _, decoder_why = decoder.partition(": ")
    transport = f" {backend_why}" if backend == "ccl" and ranks > 1 else ""
    lines = [f"backend {backend}{transport}, engine {engine}, decoder {name}, allocator {allocator}"]
    if backend == "gloo" and ranks > 1 and backend_why not in OWN_CHOICE:
        lines.append(f"faster: oneCCL ({CCL_GAIN}): {backend_why}")
    if engine == "eager" and not engine_why.startswith(("engine=", "precision=", "the network ")):
        lines.append(f"faster: native kernels ({ENGINE_GAIN}): {engine_why}")
    if bf16_speedup >= BF16_GAIN:
        lines.append(bf16_line(bf16_speedup))
    if name == "Pillow" and decoder_why not in OWN_CHOICE:
        lines.append(f"faster: libjpeg-turbo ({TURBO_GAIN}): {decoder_why.removeprefix('data.decoder=turbo: ')}")
    if allocator == "glibc":
        lines.append("faster: tcmalloc, which a plan preloads if it is installed (Debian: libtcmalloc-minimal4)")
    return lines


REDRAW_S = 0.5
PLAIN_S = 10.0  # between lines of progress, as of a job that cputrain launches
EVALUATION = "{desc} [{n_fmt}/{total_fmt}] |{bar:20}| {remaining} left"
LINES = 10  # progress lines of an evaluation without a terminal
FORMAT = "{desc} |{bar:12}| {percentage:3.0f}% {remaining} left {rate_fmt}{postfix}"
DECAY = 0.9  # per step, in the exponential average of wait times


class BarLines:
    """Stream for a bar that prints it as lines of standard output."""

    @property
    def encoding(self) -> str:
        """Encoding of standard output, which decides how tqdm draws."""
        return sys.stdout.encoding

    def write(self, text: str) -> None:
        """Print the bar, unless it is erased."""
        if line := text.strip("\r "):
            print(line, flush=True)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


class Progress:
    """Printed lines of a training and, with `bar`, a progress bar in images or points; silent unless `shown`. If the
    bar is not `redrawn`, it is printed as a line every PLAIN_S seconds, or `redraw_s` if that is more."""

    def __init__(
        self,
        done: int,
        images: int,
        *,
        unit: str,
        shown: bool,
        bar: bool,
        redrawn: bool = True,
        redraw_s: float = REDRAW_S,
    ) -> None:
        self.shown, self._redrawn = shown, redrawn
        interval_s = redraw_s if redrawn else max(redraw_s, PLAIN_S)
        self._whole_s = self._data_s = self._comm_s = 0.0
        self._bar: Any = tqdm(
            total=images,
            initial=done,
            disable=not (shown and bar),
            desc="first step",
            unit=unit,
            file=sys.stderr if redrawn else BarLines(),
            bar_format=FORMAT,
            mininterval=interval_s,
            delay=0 if redrawn else interval_s,
            leave=False,
        )

    def step(self, where: str, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Advance by one step that took `seconds`."""
        self._whole_s = DECAY * self._whole_s + seconds
        self._data_s = DECAY * self._data_s + result.data_wait_s
        self._comm_s = DECAY * self._comm_s + result.comm_wait_s
        data, comm = (100 * part / (self._whole_s or 1.0) for part in (self._data_s, self._comm_s))
        self._bar.set_description_str(where, refresh=False)
        figures = f"loss {result.loss:.4f}, lr {settings.lr:.4g}, data {data:.0f} %, comm {comm:.0f} %"
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(settings.images)

    def line(self, text: str) -> None:
        """Print a permanent line above the bar."""
        if self.shown:
            with tqdm.external_write_mode() if self._redrawn else nullcontext():
                print(printable_lines(text), flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class EvaluationProgress:
    """Progress of an evaluation: with `bar` a progress bar, else 10 lines; silent unless `shown`."""

    def __init__(self, steps: int, *, shown: bool, bar: bool, lines: TextIO) -> None:
        self._done, self._steps = 0, steps
        self._lines = lines if shown and not bar else None
        self._bar: Any = tqdm(
            total=steps,
            disable=not (shown and bar),
            desc="Evaluation",
            file=sys.stderr,
            bar_format=EVALUATION,
            mininterval=REDRAW_S,
            leave=False,
        )

    def step(self) -> None:
        """Advance by one batch."""
        self._bar.update()
        before, self._done = self._done, self._done + 1
        if self._lines and self._done * LINES // self._steps > before * LINES // self._steps:
            print(f"Evaluation [{self._done}/{self._steps}]", file=self._lines, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


MOST_IN_FULL = 1e6  # a diverging loss would be printed with dozens of digits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog(Watcher):
    """Writes to the terminal and to the run's event log, on rank 0 only.

    `last_step` is the step after which the training ends; with `quiet` only warnings are printed.
    """

    recipe: Recipe
    progress: Progress
    events: EventLog
    last_step: int
    steps_per_epoch: int
    quiet: bool = False

    def warn(self, step: int, what: str, *, line: str | None = None, **fields: Any) -> None:
        """Print and log a warning. `line` replaces `what` on the terminal; `fields` are added to the event."""
        self.progress.line(f"warning: {line or what}")
        self.events.write("warning", step=step, what=what, **fields)

    def checkpoint(self, step: int, *, best: bool) -> None:
        """Log a written checkpoint; its path is relative, so that the run folder can be moved."""
        path = f"{CHECKPOINTS}/{name_of(step)}"
        self.events.write("checkpoint", step=step, epoch=step / self.steps_per_epoch, path=path, best=best)

    def after_step(self, step: int, settings: StepSettings, result: StepResult, seconds: float) -> None:
        """Show a step in the progress bar and log it."""
        epoch = (step - 1) // self.steps_per_epoch + 1
        where = f"epoch {epoch}/{self.recipe.epochs} step {step:,}/{self.last_step:,}"
        self.progress.step(where, settings, result, seconds)
        self.events.write(
            "step",
            step=step,
            epoch=step / self.steps_per_epoch,
            loss=result.loss,
            rate=settings.lr,
            images_per_s=settings.images / seconds,
            data_wait_s=result.data_wait_s,
            comm_wait_s=result.comm_wait_s,
        )
        if result.layer_ratios:
            self.events.write("ratios", step=step, rate=settings.lr, layers=result.layer_ratios)

    def rank_times(self, step: int, steps: int, times: Sequence[Sequence[float]]) -> None:
        """Log each rank's means over the last steps, in seconds: step, communication wait and data wait."""
        seconds, comm_wait_s, data_wait_s = ([float(f"{value:.4g}") for value in values] for values in times)
        self.events.write(
            "ranks", step=step, steps=steps, seconds=seconds, data_wait_s=data_wait_s, comm_wait_s=comm_wait_s
        )

    def epoch(
        self,
        *,
        step: int,
        epoch: int,
        train_loss: float,
        train_top1: float | None,
        accuracy: Accuracy | None,
        seconds: float,
        images: int,
    ) -> None:
        """Print and log an epoch, counted from 1; `accuracy` is None if it was not evaluated."""
        val_loss, val_top1 = (accuracy.loss, accuracy.top1) if accuracy and accuracy.images else (None, None)
        values = {"loss": (train_loss, 4), "acc": (train_top1, 2), "val loss": (val_loss, 4), "val acc": (val_top1, 2)}
        figures = [
            f"{name} {value:.{digits}f}" if abs(value) < MOST_IN_FULL else f"{name} {value:.3g}"
            for name, (value, digits) in values.items()
            if value is not None
        ]
        if not self.quiet:
            kind, done = self.recipe.data.kind, f"epoch {epoch}/{self.recipe.epochs}  {'  '.join(figures)}"
            unit = {"images": "img/s", "points": "points/s", "samples": "samples/s"}.get(kind, f"img/s, {kind}")
            self.progress.line(f"{done}  {seconds:.1f} s  ({images / seconds:.1f} {unit})")
        self.events.write(
            "epoch",
            step=step,
            epoch=epoch,
            train_loss=train_loss,
            train_top1=train_top1,
            val_loss=val_loss,
            val_top1=val_top1,
            val_top5=accuracy.top5 if accuracy else None,
            seconds=seconds,
            images_per_s=images / seconds,
        )


def summary_lines(
    result: TrainResult, steps: int, spent: TimeSpent, recipe: Recipe, peak_bytes: int, estimate_bytes: int | None
) -> list[str]:
    """Return the summary: times, accuracies, and memory of one worker. `steps` is the number of steps in all epochs."""
    accuracy, kind = result.accuracy, recipe.data.kind
    if accuracy is None:
        resume = wording_for(recipe)("resume", "true")
        return [f"stopped by a signal  after step {result.step:,}, checkpoint saved: continue with {resume}"]
    resumed = spent.starts > 1
    of_last = ", of the last start" if resumed else ""
    starts = f" over {spent.starts} starts" if resumed else ""
    lines = [f"ended by max_steps   after step {result.step:,} of {steps:,}"] if result.step < steps else []
    lines += [
        f"total training time  {result.trained_s:.1f} s (updates only{of_last})",
        f"time to train        {spent.training_s:.1f} s{starts} (with evaluations and checkpoints)",
    ]
    if resumed:
        lines.append(f"wall time            {spent.wall_s:.1f} s (from the first start to the end, waits included)")
    lines += _accuracy_lines(accuracy, kind)
    if (test := result.test) and test.top1 is not None:
        lines += [
            f"test top-1           {test.top1:.2f} %",
            f"test top-5           {test.top5:.2f} %  ({test.images} {kind}, each once, with the last weights)",
        ]
    estimated = f" (estimated {estimate_bytes / GIB:.2f})" if estimate_bytes else ""
    return [*lines, f"peak memory          {peak_bytes / GIB:.2f} GiB per worker{estimated}"]


def _accuracy_lines(accuracy: Accuracy, kind: str) -> list[str]:
    if accuracy.top1 is not None:
        return [
            f"top-1                {accuracy.top1:.2f} %",
            f"top-5                {accuracy.top5:.2f} %  ({accuracy.images} {kind}, each once)",
        ]
    if accuracy.images:
        return [f"validation loss      {accuracy.loss:.4f}  ({accuracy.images} {kind}, each once)"]
    return [f"data                 {kind}: nothing to evaluate"]
