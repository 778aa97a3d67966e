"""A recipe's derivation as text, with or without its data at hand."""

from pathlib import Path

from affinity.planner.reasons import Reason
from affinity.text_table import align_columns
from cputrain.cli.text_chart import curve, sampled
from cputrain.data.from_recipe import survey_recipe
from cputrain.optim.schedules import lr_at
from cputrain.recipe.derivation import derive
from cputrain.recipe.explanation import explain
from cputrain.recipe.rates import rate_warning
from cputrain.recipe.schema import Recipe


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
