"""A training on this machine: planned, then started with its own workers."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError
from affinity.kernel.neighbors import plan_beside
from affinity.planner.plan import Plan
from affinity.planner.runtime import find_runtime, target_of
from cputrain.data.formats.survey import Survey
from cputrain.data.from_recipe import survey_recipe
from cputrain.launch.planning import request_of
from cputrain.recipe.derivation import TrainingSizes, derive
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import LOGS, PLAN, RECIPE, check_folder, make_folder
from cputrain.runs.resume import Facts
from mpi.hosts.groups import HostGroup
from mpi.launchers.job import Job
from mpi.supervise.local import run_local


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A recipe with the plan of this machine for it, its data as found, and the numbers that follow."""

    recipe: Recipe
    plan: Plan
    found: Survey
    numbers: TrainingSizes

    @property
    def ppn(self) -> int:
        """Workers."""
        return len(self.plan.workers)

    @property
    def facts(self) -> Facts:
        """What a run's earlier starts are compared with."""
        return Facts(
            workers=self.ppn,
            global_batch=self.numbers.global_batch,
            train_images=self.found.train,
            classes=len(self.found.classes),
        )


def planned_here(recipe: Recipe, *, resume: bool = False) -> Planned:
    """Plan this machine for a recipe and count its images. Raises InputError where they do not fit.

    A resumed run has its weights from its checkpoint: those that it began with need not be there any more.
    """
    weights = recipe.model.weights
    if weights is not None and not resume and not Path(weights).is_file():
        raise InputError(f"model.weights={weights} is not there: name a checkpoint or a state dict, or set it to null")
    plan = plan_here(recipe)
    found = survey_recipe(recipe)
    numbers = derive(recipe, ppn=len(plan.workers), nodes=1, images=found.train)
    return Planned(recipe=recipe, plan=plan, found=found, numbers=numbers)


def plan_here(recipe: Recipe) -> Plan:
    """This machine's plan for a recipe."""
    runtime = find_runtime(target_of(()), os.environ, openmp=recipe.plan.openmp)
    return plan_beside(request_of(recipe), runtime, os.environ, share=recipe.plan.share)


def train_here(planned: Planned, *, resume: bool, overwrite: bool, verify: bool) -> int:
    """Train to the end; the exit status. Raises RunError naming the rank that failed.

    Raises InputError where the recipe's folder may not be written to.
    """
    recipe, folder = planned.recipe, planned.recipe.folder
    check_folder(recipe, planned.facts, resume=resume, overwrite=overwrite)
    make_folder(recipe, planned.plan, overwrite=overwrite)
    named = (str(folder / RECIPE), f"output={json.dumps(str(folder))}")  # messages name the folder as the user does
    flags = (*(("--resume",) if resume else ()), *(() if verify else ("--no-verify",)))
    job = Job(
        groups=(HostGroup(hosts=("localhost",), plan=planned.plan),),
        command=(sys.executable, "-m", "cputrain", "train", *named, "--prepared", *flags),
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
        verify=verify,
        plain_rank=0,
    )
    return run_local(job, os.environ)
