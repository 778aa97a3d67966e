"""The bar that rank 0 shows while it trains."""

import os
import sys
from typing import Any

from tqdm import tqdm

REDRAWN_S = 0.5
FORMAT = "{desc} |{bar:20}| {percentage:3.0f}%  {rate_fmt}  {remaining} left"


class Progress:
    """Images done of all; silent on other ranks."""

    def __init__(self, done: int, images: int, *, shown: bool) -> None:
        self.shown = shown
        self._bar: Any = tqdm(
            total=images,
            initial=done,
            disable=not shown,
            desc="first step",
            unit="img",
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
