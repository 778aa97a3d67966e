"""Progress bars of trainings and evaluations."""

import sys
from contextlib import nullcontext
from typing import Any, TextIO

from tqdm import tqdm

from cputrain.affinity.terminal import printable_lines
from cputrain.training.step import StepResult, StepSettings

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


class TrainingBar:
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


class EvaluationBar:
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
