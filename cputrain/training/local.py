"""Plan a recipe's training on this machine, and run it in local processes. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cputrain.affinity.bound_plan import plan_beside
from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.records import plan_this_machine
from cputrain.affinity.start import isolated_command
from cputrain.data.formats.source import DatasetSummary
from cputrain.data.from_settings import survey_data
from cputrain.data.settings import SYNTHETIC
from cputrain.files import RECIPE
from cputrain.launch.local import local_job
from cputrain.launch.rank_process import run_on_ranks
from cputrain.manifest import ScaleRecord
from cputrain.mpi.launchers import Job
from cputrain.mpi.supervise.processes import JobFailedError
from cputrain.mpi.supervise.run import run_local
from cputrain.predict.next_best import compare_plan
from cputrain.recipe.derivation import TrainingSizes, derive
from cputrain.recipe.loading import load_recipe, recipe_of
from cputrain.recipe.request import for_evaluation, for_measurement, remedy, request_of
from cputrain.recipe.resume import load_training, recipe_text
from cputrain.recipe.schema import PlanSection, Recipe, SweepSection
from cputrain.runs.folder import locked, make_folder
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
    survey = survey_data(recipe.data, classes=recipe.model.classes)
    plan = plan_recipe(recipe, env, images=survey.train)
    sizes = derive(recipe, ppn=len(plan.workers), nodes=1, images=survey.train)
    return PlannedTraining(recipe=recipe, plan=plan, survey=survey, sizes=sizes)


def plan_named(name: str, settings: Sequence[str], env: Mapping[str, str]) -> PlannedTraining:
    """Load a recipe with settings, without its sweep, and plan its training."""
    return plan_training(load_recipe(name, settings).model_copy(update={"sweep": SweepSection()}), env)


def plan_steps(
    name: str, settings: Sequence[str], env: Mapping[str, str], *, needs_data: bool = True
) -> PlannedTraining:
    """Load a recipe with settings, reduced to training steps, and plan its training; unless it `needs_data`, with
    generated images if its data are not here."""
    recipe = load_recipe(name, settings)
    is_here = recipe.data.generated or (recipe.data.path is not None and Path(recipe.data.path).exists())
    if not (needs_data or is_here):
        recipe = load_recipe(name, (*settings, f"data.path={SYNTHETIC}"))
    return plan_training(for_measurement(recipe), env)


def replanned(planned: PlannedTraining, settings: Sequence[str], env: Mapping[str, str]) -> PlannedTraining:
    """Return the training with other settings. Raises InputError if they do not fit."""
    images = planned.survey.train
    recipe = recipe_of(planned.recipe.model_dump(by_alias=True), Path("the recipe"), settings=settings)
    plan = plan_recipe(recipe, env, images=images)
    sizes = derive(recipe, ppn=len(plan.workers), nodes=1, images=images)
    return replace(planned, recipe=recipe, plan=plan, sizes=sizes)


def call_in_ranks(
    planned: PlannedTraining, target: str, asked: Mapping[str, Any], env: Mapping[str, str], *, what: str | None = None
) -> list[Any]:
    """Replace the run in the recipe's folder, and call a function in the planned ranks, with `asked` and the recipe
    that `asked_recipe` loads there. Returns and raises as `run_on_ranks` does."""
    folder = planned.recipe.folder
    make_folder(folder, recipe_text(planned.recipe), overwrite=True)
    return run_on_ranks(planned.plan, target, {**asked, "recipe": str(folder / RECIPE)}, folder, env, what=what)


def asked_recipe(asked: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a function that `call_in_ranks` calls."""
    return load_recipe(asked["recipe"])


def plan_recipe(recipe: Recipe, env: Mapping[str, str], *, images: int | None = None) -> Plan:
    """Return this machine's plan for a recipe; `images` is the number of training images, if known."""
    request = request_of(recipe, images=images)
    return plan_beside(request, env, share=recipe.plan.share, compare=compare_plan)


def plan_inference(checkpoint: Path, env: Mapping[str, str]) -> Plan:
    """Return the plan of one worker on all cores of this machine for a checkpoint's network."""
    recipe = for_evaluation(load_training(str(checkpoint))).model_copy(update={"plan": PlanSection(ppn=1)})
    return plan_this_machine(request_of(recipe), env, compare=compare_plan)


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
            make_folder(folder, recipe_text(recipe), overwrite=overwrite, resume=resume)
            job = local_job(planned.plan, command, folder, verify=verify, plain_rank=0)
            return run_local(job, env, save_first=True)
    except JobFailedError as error:
        if error.shortage is None:
            raise
        advice = remedy(recipe, ppn=planned.ppn, nodes=1, shortage=error.shortage)
        raise error.advised(advice) from None


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
