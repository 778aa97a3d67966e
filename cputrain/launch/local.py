"""Convert a recipe to the planner's request; plan and run its training on this machine; advise after a shortage of
memory."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.kernel.bound_plan import plan_beside
from cputrain.affinity.planner.memory import USABLE
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.request import RECIPE_OPTIONS, Request
from cputrain.affinity.planner.workload import largest_batch
from cputrain.affinity.start import isolated_command
from cputrain.data.formats.source import DatasetSummary
from cputrain.data.from_recipe import survey_recipe
from cputrain.files import LOGS, PLAN, RECIPE
from cputrain.launch.options import THIS_HOST
from cputrain.manifest import ScaleRecord
from cputrain.mpi.hosts.hostfile import HostGroup
from cputrain.mpi.launchers.programs import Job
from cputrain.mpi.supervise.processes import JobFailedError, OutOfMemory
from cputrain.mpi.supervise.run import run_local
from cputrain.native_build import COMPILING
from cputrain.predict.next_best import compare_plan
from cputrain.recipe.derivation import TrainingSizes, derive, images_per_step, largest_local_batch
from cputrain.recipe.schema import BatchSection, Recipe
from cputrain.recipe.workload import workload_of
from cputrain.runs.folder import load_training, locked, make_folder
from cputrain.variables import is_restarted, lock_name_in


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTraining:
    """A recipe, this machine's plan for it, the summary of its data, and the sizes derived from them."""

    recipe: Recipe
    plan: Plan
    survey: DatasetSummary
    sizes: TrainingSizes

    @property
    def ppn(self) -> int:
        """Number of workers."""
        return len(self.plan.workers)

    @property
    def scale(self) -> ScaleRecord:
        """The sizes that a resumed run compares with its earlier starts."""
        return ScaleRecord(
            workers=self.ppn,
            global_batch=self.sizes.global_batch,
            train_images=self.survey.train,
            classes=len(self.survey.classes),
        )


def plan_training(recipe: Recipe, env: Mapping[str, str], *, resume: bool = False) -> PlannedTraining:
    """Plan this machine for a recipe and count its images. Raises InputError if they do not fit.

    A resumed run restores its weights from a checkpoint, so the initial weights need not exist any more.
    """
    weights = recipe.model.weights
    if weights is not None and not resume and not Path(weights).exists():
        raise InputError(
            f"model.weights={weights} does not exist: give a checkpoint or a state dict, or set it to null"
        )
    survey = survey_recipe(recipe)
    plan = plan_recipe(recipe, env, images=survey.train)
    sizes = derive(recipe, ppn=len(plan.workers), nodes=1, images=survey.train)
    return PlannedTraining(recipe=recipe, plan=plan, survey=survey, sizes=sizes)


def plan_recipe(recipe: Recipe, env: Mapping[str, str], *, images: int | None = None) -> Plan:
    """Return this machine's plan for a recipe; `images` is the number of training images, if known."""
    request = request_of(recipe, images=images)
    return plan_beside(request, env, share=recipe.plan.share, compare=compare_plan)


def train_here(
    planned: PlannedTraining,
    env: Mapping[str, str],
    *,
    resume: bool,
    overwrite: bool,
    verify: bool,
    quiet: bool = False,
) -> int:
    """Train to the end, in a folder that `check_folder` permits; return the exit status.

    Raises JobFailedError naming the rank that failed; if memory ran out, with a batch that fits.
    """
    recipe, folder = planned.recipe, planned.recipe.folder
    named = (str(folder / RECIPE), f"output={json.dumps(str(folder))}")  # messages show the folder as the user wrote it
    given = {"--resume": resume, "--no-verify": not verify, "--quiet": quiet}
    flags = tuple(flag for flag, is_set in given.items() if is_set)
    command = (*isolated_command("cputrain"), "train", *named, "--prepared", *flags)
    try:
        with locked(folder, restarted=is_restarted(env), job=lock_name_in(env)):
            make_folder(recipe, overwrite=overwrite, resume=resume)
            job = local_job(planned.plan, command, folder, verify=verify, plain_rank=0)
            return run_local(job, env, save_first=True)
    except JobFailedError as error:
        if error.shortage is None:
            raise
        advice = remedy(recipe, ppn=planned.ppn, nodes=1, shortage=error.shortage)
        raise error.advised(advice) from None


def local_job(
    plan: Plan, command: tuple[str, ...], folder: Path, *, verify: bool = True, plain_rank: int | None = None
) -> Job:
    """Return the job that runs a command as each planned worker of this host, with the plan and logs in `folder`.

    The output of `plain_rank` is shown without a label.
    """
    return Job(
        groups=(HostGroup(hosts=THIS_HOST, plan=plan),),
        command=command,
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
        verify=verify,
        plain_rank=plain_rank,
        names_errors=True,
        starting=COMPILING,
    )


def run_in_scratch(plan: Plan, words: tuple[str, ...], env: Mapping[str, str], *, verify: bool) -> int:
    """Run the cputrain command `words` as each planned worker of this host, with the plan and logs in a temporary
    folder; return the exit status. If a rank fails, the folder is kept for its log, and JobFailedError is raised."""
    scratch = Path(tempfile.mkdtemp(prefix=f"cputrain-{words[0]}-"))
    command = (*isolated_command("cputrain"), *words)
    status = run_local(local_job(plan, command, scratch, verify=verify, plain_rank=0), env)
    shutil.rmtree(scratch)
    return status


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


def check_local_batch(local_batch: int | None) -> None:
    """Raise InputError if --local-batch is given together with a recipe, which sets its own batch."""
    if local_batch is not None:
        raise InputError(f"--local-batch cannot be combined with a recipe: set batch.local={local_batch} instead")


def for_evaluation(recipe: Recipe) -> Recipe:
    """Adapt a recipe to an evaluation, whose images need not fill a global batch or come in blocks."""
    changes = {
        "batch": BatchSection(local=1),
        "evaluate": recipe.evaluate.model_copy(update={"batch": recipe.evaluate.batch or recipe.batch.local}),
        "data": recipe.data.model_copy(update={"images_per_epoch": None, "last_batch": "drop", "block_mib": 0.0}),
        "plan": recipe.plan.model_copy(update={"balance": "equal"}),
    }
    return recipe.model_copy(update=changes)


def with_memory_advice(error: JobFailedError, job: Job, arguments: tuple[str, ...]) -> JobFailedError:
    """Add a batch that fits to the error of a job that ran out of memory; `arguments` are those of `cputrain train`.
    Errors in the training's recipe, which may be gone by now, do not replace the original one."""
    recipe, *settings = [word for word in arguments if not word.startswith("-")] or [""]
    if error.shortage is None or not recipe:
        return error
    try:
        training = load_training(recipe, settings)
    except (InputError, OSError):
        return error
    advice = remedy(training, ppn=job.ppn, nodes=len(job.hosts), shortage=error.shortage, workers="--ppn ")
    return error.advised(advice)


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
