"""What to do after the workers of a training ran out of memory."""

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.memory import USABLE
from cputrain.affinity.planner.request import largest_batch
from cputrain.launch.training_command import training_arguments
from cputrain.models.sizes import workload_of
from cputrain.mpi.launchers.launcher import Job
from cputrain.mpi.supervise.processes import JobFailedError, Shortage
from cputrain.recipe.derivation import images_per_step, largest_local_batch
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import load_training


def with_remedy(error: JobFailedError, job: Job) -> JobFailedError:
    """The error of a launched job, with a batch that fits where it is a training that ran out of memory. Nothing about
    the training's recipe takes the error's place: it may be gone by now."""
    arguments = training_arguments(job.command)
    recipe, *settings = [word for word in arguments or () if not word.startswith("-")] or [""]
    if error.shortage is None or not recipe or job.instances is not None:
        return error
    try:
        training = load_training(recipe, settings)
    except (InputError, OSError):
        return error
    advice = remedy(training, ppn=job.ppn, nodes=len(job.hosts), shortage=error.shortage, workers="--ppn ")
    return error.advised(advice)


def remedy(recipe: Recipe, *, ppn: int, nodes: int, shortage: Shortage, workers: str = "plan.ppn=") -> str:
    """A local batch that fits by the planner's estimate, with the same global batch, or half of one that should have
    fitted; and how to measure the largest one. `ppn` workers ran on each of so many hosts; `workers` sets that number.
    """
    workload, batch = workload_of(recipe), largest_local_batch(recipe.batch, ppn * nodes)
    measure = f"cputrain sweep {recipe.name} --find-batch measures the largest that trains"
    fits = largest_batch(workload, int(USABLE * shortage.limit_bytes / ppn)) if workload else batch
    smaller = fits if fits < batch else batch // 2
    if smaller < 1:
        return f"use fewer workers ({workers}{max(1, ppn // 2)}), or a smaller data.crop"
    same = images_per_step(recipe.batch, ppn * nodes)
    return f"set batch.local={smaller} batch.global={same}, which keeps the global batch: {measure}"
