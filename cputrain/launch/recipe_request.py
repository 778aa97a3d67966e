"""Recipe -> the planner's request; never torch."""

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.request import RECIPE_OPTIONS, Request
from cputrain.models.sizes import workload_of
from cputrain.recipe.schema import BatchSection, Recipe


def request_of(recipe: Recipe, nodes: int = 1, images: int | None = None) -> Request:
    """What a recipe requests of the planner, as one of `nodes` hosts, with this number of training images if known."""
    fields = {
        option.name: option.requested(getattr(recipe.plan, option.name))
        for option in RECIPE_OPTIONS
        if option.name in Request.__slots__
    }
    return Request(
        **fields,
        nodes=nodes,
        local_batch=recipe.batch.local,
        global_batch=recipe.batch.global_,
        most_workers=_most_workers(recipe, images),
        workload=workload_of(recipe),
    )


def _most_workers(recipe: Recipe, images: int | None) -> int | None:
    """The most workers that have an image each in every step, and a whole step in an epoch; None: any number."""
    batch = recipe.batch
    if batch.global_ is not None:
        return batch.global_
    epoch = recipe.data.images_per_epoch or images or recipe.data.train_images
    return None if epoch is None else max(1, epoch // (batch.local * batch.accumulation))


def check_local_batch(local_batch: int | None) -> None:
    """Raise InputError where --local-batch is given beside a recipe, which has a batch of its own."""
    if local_batch is not None:
        raise InputError(f"--local-batch with a recipe: set batch.local={local_batch} in the recipe instead")


def for_evaluation(recipe: Recipe) -> Recipe:
    """The recipe for an evaluation: its images need not fill a global batch, nor come in blocks."""
    changes = {
        "batch": BatchSection(local=1),
        "evaluate": recipe.evaluate.model_copy(update={"batch": recipe.evaluate.batch or recipe.batch.local}),
        "data": recipe.data.model_copy(update={"images_per_epoch": None, "last_batch": "drop", "block_mib": 0.0}),
        "plan": recipe.plan.model_copy(update={"balance": "equal"}),
    }
    return recipe.model_copy(update=changes)
