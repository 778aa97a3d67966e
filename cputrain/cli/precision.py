"""Whether a training in float32 would be faster in bfloat16 on this machine, for `cputrain plan`."""

from affinity.planner.measured import BF16
from affinity.planner.plan import Plan
from cputrain.recipe.schema import Recipe
from cputrain.training.startup_lines import BF16_GAIN, bf16_line


def precision_lines(recipe: Recipe, plan: Plan) -> list[str]:
    """A line with the gain that a training's start has measured here, or that it may be worth measuring; else none."""
    flags = [flag for flag in plan.machine.isa if "bf16" in flag]
    if recipe.precision != "float32" or not flags:
        return []
    rate = plan.measured.rate(BF16)
    if rate is None:
        return [
            f"precision=bf16 may be faster: this processor has instructions for it ({', '.join(flags)}); the start of "
            "a training measures by how much"
        ]
    return [f"{bf16_line(rate.value)} (measured on {rate.date})"] if rate.value >= BF16_GAIN else []
