"""A plan as a value that shows itself: SVG in a notebook, text on a terminal."""

from dataclasses import dataclass

from affinity.planner.plan import Plan
from affinity.views.svg import plan_to_svg
from affinity.views.text import plan_to_text


@dataclass(frozen=True, slots=True)
class Picture:
    """The picture of a plan. `Picture(plan)` as a notebook cell's last expression shows it; `print` writes text."""

    plan: Plan

    def __str__(self) -> str:
        return plan_to_text(self.plan)

    def _repr_svg_(self) -> str:
        return plan_to_svg(self.plan)
