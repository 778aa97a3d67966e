"""Progress bars of a training and an evaluation, on rank 0."""

import sys
from typing import Any, TextIO

from tqdm import tqdm

from affinity.terminal_text import printable_lines

REDRAW_S = 0.5
EVALUATION = "{desc} [{n_fmt}/{total_fmt}] |{bar:20}| {remaining} left"
LINES = 10  # printed during an evaluation without a terminal
FORMAT = "{desc} |{bar:12}| {percentage:3.0f}% {remaining} left {rate_fmt}{postfix}"
DECAY = 0.9  # of earlier steps in the shares of waiting


class Progress:
    """The lines of a training, and with `bar` a bar of the images, or points, trained on; silent unless `shown`."""

    def __init__(
        self, done: int, images: int, *, unit: str, shown: bool, bar: bool, redraw_s: float = REDRAW_S
    ) -> None:
        self.shown = shown
        self._whole_s = self._data_s = self._comm_s = 0.0
        self._bar: Any = tqdm(
            total=images,
            initial=done,
            disable=not (shown and bar),
            desc="first step",
            unit=unit,
            file=sys.stderr,
            bar_format=FORMAT,
            mininterval=redraw_s,
            leave=False,
        )

    def step(
        self,
        where: str,
        images: int,
        *,
        loss: float,
        lr: float,
        seconds: float,
        data_wait_s: float,
        comm_wait_s: float,
    ) -> None:
        """Advance by one step of so many images, which took so long, of it waiting for data and for communication."""
        self._whole_s = DECAY * self._whole_s + seconds
        self._data_s = DECAY * self._data_s + data_wait_s
        self._comm_s = DECAY * self._comm_s + comm_wait_s
        data, comm = (100 * part / (self._whole_s or 1.0) for part in (self._data_s, self._comm_s))
        self._bar.set_description_str(where, refresh=False)
        self._bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.4g}, data {data:.0f} %, comm {comm:.0f} %", refresh=False)
        self._bar.update(images)

    def line(self, text: str) -> None:
        """Print a permanent line above the bar."""
        if self.shown:
            tqdm.write(printable_lines(text), file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class EvaluationProgress:
    """The batches evaluated: a bar on a terminal, else a line after each tenth of them; silent on other ranks."""

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
