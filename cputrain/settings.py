"""Types of the parts' settings, with the limits that recipes check.

A part declares its settings as a frozen data class, with a docstring below each field that is its manual; the recipe's
section inherits them.
"""

from typing import Annotated, Literal

from annotated_types import Ge, Le

MAX_COUNT = 10**10  # limit of every count: larger ones are typing errors, which would only fail later
Positive = Annotated[int, Ge(1), Le(MAX_COUNT)]
NotNegative = Annotated[int, Ge(0), Le(MAX_COUNT)]
Rate = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Auto = Literal["auto"]
