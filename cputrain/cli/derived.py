"""A recipe's derivation as text, with or without its data at hand."""

from pathlib import Path

from affinity.planner.reasons import Reason
from cputrain.cli.text_chart import curve, sampled
from cputrain.data.formats.survey import survey
from cputrain.data.from_recipe import survey_recipe
from cputrain.optim.schedules import lr_at
from cputrain.recipe.derivation import derive
from cputrain.recipe.explanation import explain
from cputrain.recipe.rates import rate_warning
from cputrain.recipe.schema import Recipe


def derivation(recipe: Recipe, *, ppn: int, nodes: int, drawn: bool) -> str:
    """How the recipe's numbers come about; images are counted, or taken from the recipe where it names them.

    With `drawn` also the learning rate's curve.
    """
    if recipe.data.generated:
        images = survey_recipe(recipe).train
    elif recipe.data.images_per_epoch:
        images = recipe.data.images_per_epoch
    elif recipe.data.path and Path(recipe.data.path).exists():
        images = survey(recipe.data.path).train
    elif recipe.data.train_images:
        images = recipe.data.train_images
    else:
        missing = "names no data.path" if recipe.data.path is None else f"has its data in {recipe.data.path}, not here"
        return f"recipe {recipe.name} {missing}: its steps are derived once there are images to count"
    numbers = derive(recipe, ppn=ppn, nodes=nodes, images=images)
    told = f"recipe {recipe.name}\n" + aligned(explain(recipe, numbers, ppn=ppn, nodes=nodes))
    if warning := rate_warning(recipe, global_batch=numbers.global_batch):
        told += f"\nwarning: {warning}"
    if drawn:
        rates = sampled(lambda step: lr_at(step, recipe, numbers), numbers.total_steps)
        told += "\n\nlearning rate\n" + curve(rates, f"{recipe.epochs} epochs")
    return told


def aligned(reasons: list[Reason]) -> str:
    """One line a reason."""
    width = max(len(reason.what) for reason in reasons)
    return "\n".join(f"  {r.what:<{width}}  {r.value}: {r.why}" for r in reasons)
