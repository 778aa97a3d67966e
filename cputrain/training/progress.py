"""How far rank 0 is, while it trains or evaluates."""

import os
import sys
from typing import Any, TextIO

from tqdm import tqdm

REDRAWN_S = 0.5
EVALUATION = "{desc} [{n_fmt}/{total_fmt}] |{bar:20}| {remaining} left"
LINES = 10  # of an evaluation, where there is no terminal
FORMAT = "{desc} |{bar:20}| {percentage:3.0f}%  {rate_fmt}  {remaining} left"


class Progress:
    """Images, or points, done of all; silent on other ranks."""

    def __init__(self, done: int, images: int, *, unit: str, shown: bool) -> None:
        self.shown = shown
        self._bar: Any = tqdm(
            total=images,
            initial=done,
            disable=not shown,
            desc="first step",
            unit=unit,
            file=sys.stderr,
            bar_format=FORMAT,
            mininterval=float(os.environ.get("TQDM_MININTERVAL", REDRAWN_S)),
            leave=False,
        )

    def step(self, where: str, images: int, *, loss: float, rate: float) -> None:
        """One update is done."""
        self._bar.set_description_str(f"{where}  loss {loss:.4f}  lr {rate:.4g}", refresh=False)
        self._bar.update(images)

    def line(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        if self.shown:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


class EvaluationProgress:
    """Batches done of all: a bar on a terminal, else a line after every tenth of them; silent on other ranks."""

    def __init__(self, steps: int, *, shown: bool, bar: bool, lines: TextIO) -> None:
        self._done, self._steps = 0, steps
        self._lines = lines if shown and not bar else None
        self._bar: Any = tqdm(
            total=steps,
            disable=not (shown and bar),
            desc="Evaluation",
            file=sys.stderr,
            bar_format=EVALUATION,
            mininterval=REDRAWN_S,
            leave=False,
        )

    def step(self) -> None:
        """One batch is done."""
        self._bar.update()
        before, self._done = self._done, self._done + 1
        if self._lines and self._done * LINES // self._steps > before * LINES // self._steps:
            print(f"Evaluation [{self._done}/{self._steps}]", file=self._lines, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
