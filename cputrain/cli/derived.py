"""What a recipe gives in numbers, for `plan` and `train`."""

from pathlib import Path

from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.request import BF16, Reason
from cputrain.affinity.terminal import align_columns
from cputrain.cli.output import curve, sampled
from cputrain.data.from_recipe import survey_recipe
from cputrain.measurements import BF16_GAIN, bf16_line
from cputrain.optim.schedules import lr_at
from cputrain.recipe.derivation import derive, explain, rate_warning
from cputrain.recipe.schema import Recipe


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


def derivation(recipe: Recipe, *, ppn: int, nodes: int, with_curve: bool) -> str:
    """The recipe's sizes and how they follow from its settings, with a curve of the learning rate where wanted.

    Images are counted, or taken from the recipe where it names their number.
    """
    if recipe.data.images_per_epoch and not recipe.data.generated:
        images = recipe.data.images_per_epoch
    elif recipe.data.generated or (recipe.data.path and Path(recipe.data.path).exists()):
        images = survey_recipe(recipe).train
    elif recipe.data.train_images:
        images = recipe.data.train_images
    else:
        path = recipe.data.path
        missing = "has no data.path" if path is None else f"has its data in {path}, which does not exist here"
        return f"recipe {recipe.name} {missing}: the number of steps is known once there are images to count"
    sizes = derive(recipe, ppn=ppn, nodes=nodes, images=images)
    text = f"recipe {recipe.name}\n" + aligned(explain(recipe, sizes, ppn=ppn, nodes=nodes))
    if warning := rate_warning(recipe, global_batch=sizes.global_batch):
        text += f"\nwarning: {warning}"
    if with_curve:
        rates = sampled(lambda step: lr_at(step, recipe, sizes), sizes.total_steps)
        text += "\n\nlearning rate\n" + curve(rates, f"{recipe.epochs} epochs")
    return text


def aligned(reasons: list[Reason]) -> str:
    """One line for each value: its name, the value and the reason."""
    return align_columns([(f"  {r.what}", f"{r.value}: {r.why}") for r in reasons])
