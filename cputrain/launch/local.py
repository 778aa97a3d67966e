"""A training on this machine: planned, then started with its own workers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cputrain.affinity.errors import InputError
from cputrain.affinity.kernel.running import plan_beside
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.start import own_program
from cputrain.checkpoints import ScaleRecord
from cputrain.data.formats.source import Survey
from cputrain.data.from_recipe import survey_recipe
from cputrain.files import LOGS, PLAN, RECIPE
from cputrain.launch.options import THIS_HOST
from cputrain.launch.recipe_request import request_of
from cputrain.launch.shortage import remedy
from cputrain.launch.training_command import COMPILING
from cputrain.mpi.hosts.groups import HostGroup
from cputrain.mpi.launchers.launcher import Job
from cputrain.mpi.supervise.processes import JobFailedError
from cputrain.mpi.supervise.run import run_local
from cputrain.recipe.derivation import TrainingSizes, derive
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import locked, make_folder
from cputrain.variables import is_restarted, lock_name_in


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTraining:
    """A recipe, this machine's plan for it, the survey of its data, and the sizes that follow from them."""

    recipe: Recipe
    plan: Plan
    survey: Survey
    sizes: TrainingSizes

    @property
    def ppn(self) -> int:
        """Workers."""
        return len(self.plan.workers)

    @property
    def scale(self) -> ScaleRecord:
        """What a resumed run compares with its earlier starts."""
        return ScaleRecord(
            workers=self.ppn,
            global_batch=self.sizes.global_batch,
            train_images=self.survey.train,
            classes=len(self.survey.classes),
        )


def plan_training(recipe: Recipe, env: Mapping[str, str], *, resume: bool = False) -> PlannedTraining:
    """Plan this machine for a recipe and count its images. Raises InputError where they do not fit.

    A resumed run has its weights from its checkpoint: the initial ones need not exist any more.
    """
    weights = recipe.model.weights
    if weights is not None and not resume and not Path(weights).exists():
        raise InputError(
            f"model.weights={weights} does not exist: name a checkpoint or a state dict, or set it to null"
        )
    survey = survey_recipe(recipe)
    plan = plan_recipe(recipe, env, images=survey.train)
    sizes = derive(recipe, ppn=len(plan.workers), nodes=1, images=survey.train)
    return PlannedTraining(recipe=recipe, plan=plan, survey=survey, sizes=sizes)


def plan_recipe(recipe: Recipe, env: Mapping[str, str], *, images: int | None = None) -> Plan:
    """This machine's plan for a recipe with this number of training images, if known."""
    return plan_beside(request_of(recipe, images=images), env, share=recipe.plan.share)


def train_here(
    planned: PlannedTraining,
    env: Mapping[str, str],
    *,
    resume: bool,
    overwrite: bool,
    verify: bool,
    quiet: bool = False,
) -> int:
    """Train to the end, in a folder that `check_folder` allows; returns the exit status.

    Raises JobFailedError naming the rank that failed, and where memory was short, a batch that fits.
    """
    recipe, folder = planned.recipe, planned.recipe.folder
    named = (str(folder / RECIPE), f"output={json.dumps(str(folder))}")  # messages name the folder as the user does
    given = {"--resume": resume, "--no-verify": not verify, "--quiet": quiet}
    flags = tuple(flag for flag, wanted in given.items() if wanted)
    command = (*own_program("cputrain"), "train", *named, "--prepared", *flags)
    try:
        with locked(folder, restarted=is_restarted(env), job=lock_name_in(env)):
            make_folder(recipe, planned.plan, overwrite=overwrite)
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
    """The job of one command for each planned worker of this host; the plan and logs are in `folder`.

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
