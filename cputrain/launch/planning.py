"""Recipe -> what is asked of the planner; never torch."""

from affinity.planner.plan import Request
from cputrain.models.sizes import workload_of
from cputrain.recipe.derivation import largest_local_batch
from cputrain.recipe.schema import BatchSection, Recipe


def request_of(recipe: Recipe, nodes: int = 1) -> Request:
    """The planner's request that a recipe makes."""
    section = recipe.plan
    workers = nodes * (section.ppn if isinstance(section.ppn, int) else 1)

    def asked(value: int | str) -> int | None:
        return value if isinstance(value, int) else None

    return Request(
        ppn=asked(section.ppn),
        threads=asked(section.threads),
        inter_op=asked(section.inter_op),
        comm_cores=asked(section.comm_cores),
        loader_cores=asked(section.loader_cores),
        smt=section.smt == "on",
        nodes=nodes,
        profile=section.profile,
        openmp=section.openmp,
        oversubscribe=section.oversubscribe,
        balance=section.balance,
        local_batch=recipe.batch.local if section.balance == "batch" else largest_local_batch(recipe.batch, workers),
        workload=workload_of(recipe),
    )


def for_evaluation(recipe: Recipe) -> Recipe:
    """The recipe without what a training asks of its images: to fill a global batch, to come in blocks."""
    changes = {
        "batch": BatchSection(local=1),
        "evaluate": recipe.evaluate.model_copy(update={"batch": recipe.evaluate.batch or recipe.batch.local}),
        "data": recipe.data.model_copy(update={"images_per_epoch": None, "last_batch": "drop", "block_mib": 0.0}),
        "plan": recipe.plan.model_copy(update={"balance": "equal"}),
    }
    return recipe.model_copy(update=changes)
