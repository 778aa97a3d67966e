"""Numbers on the command line."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A number in a range; click's own takes nan and inf too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number
