"""What a recipe asks of the planner, the recipe of an evaluation or a measurement, and advice after a shortage of
memory."""

from cputrain.affinity.planner.memory import USABLE
from cputrain.affinity.planner.request import RECIPE_OPTIONS, Request
from cputrain.affinity.planner.workload import largest_batch
from cputrain.mpi.supervise.processes import OutOfMemory
from cputrain.recipe.derivation import images_per_step, largest_local_batch
from cputrain.recipe.schema import BatchSection, EvaluateSection, Recipe, SweepSection
from cputrain.recipe.workload import workload_of


def request_of(recipe: Recipe, images: int | None = None) -> Request:
    """Return a recipe's request for the planner on one host, with its number of training images if known."""
    fields = {
        option.name: option.requested(getattr(recipe.plan, option.name))
        for option in RECIPE_OPTIONS
        if option.name in Request.__slots__
    }
    return Request(
        **fields,
        local_batch=recipe.batch.local,
        global_batch=recipe.batch.global_,
        accumulation=recipe.batch.accumulation,
        most_workers=_most_workers(recipe, images),
        workload=workload_of(recipe),
    )


def _most_workers(recipe: Recipe, images: int | None) -> int | None:
    """Return the most workers that each get an image in every step and an epoch a full step; None if unlimited."""
    batch = recipe.batch
    if batch.global_ is not None:
        return batch.global_
    epoch = recipe.data.images_per_epoch or images or recipe.data.train_images
    return None if epoch is None else max(1, epoch // (batch.local * batch.accumulation))


def for_evaluation(recipe: Recipe) -> Recipe:
    """Adapt a recipe to an evaluation, whose images need not fill a global batch or come in blocks."""
    changes: dict[str, object] = {
        "batch": BatchSection(local=1),
        "evaluate": recipe.evaluate.model_copy(update={"batch": recipe.evaluate.batch or recipe.batch.local}),
        "data": recipe.data.model_copy(update={"images_per_epoch": None, "last_batch": "drop", "block_mib": 0.0}),
        "plan": recipe.plan.model_copy(update={"balance": "equal"}),
    }
    if recipe.engine == "ipex":  # only affects training steps, and may not be installed where runs are evaluated
        changes["engine"] = "auto"
    return recipe.model_copy(update=changes)


def for_measurement(recipe: Recipe) -> Recipe:
    """Return the recipe without evaluation, sweep and weight averaging, so that only steps take time."""
    return recipe.model_copy(update={"evaluate": EvaluateSection(), "sweep": SweepSection(), "ema_decay": None})


def remedy(recipe: Recipe, *, ppn: int, nodes: int, shortage: OutOfMemory, workers: str = "plan.ppn=") -> str:
    """Advise a local batch that fits by the planner's estimate, with the same global batch; if the current one should
    have fitted, half of it. Also name the command that measures the largest. `ppn` workers ran on each of `nodes`
    hosts; `workers` is the option that sets their number.
    """
    workload, batch = workload_of(recipe), largest_local_batch(recipe.batch, ppn * nodes)
    measure = f"cputrain sweep {recipe.name} --find-batch measures the largest that trains"
    fits = largest_batch(workload, int(USABLE * shortage.limit_bytes / ppn)) if workload else batch
    smaller = fits if fits < batch else batch // 2
    if smaller < 1:
        return f"use fewer workers ({workers}{max(1, ppn // 2)}), or a smaller data.crop"
    same = images_per_step(recipe.batch, ppn * nodes)
    return f"set batch.local={smaller} batch.global={same}, which keeps the global batch: {measure}"
