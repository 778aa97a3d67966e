"""cputrain train: plan, launch and train; or be one rank of a training."""

import os
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import click

from affinity.ranks.rank import Rank, discover
from affinity.views.text import plan_to_text
from affinity.wording import counted, spread
from cputrain.cli.derived import aligned
from cputrain.cli.options import no_verify_option, restarts_option, settings_argument
from cputrain.cli.setting_names import as_recipe_key
from cputrain.cli.streams import say
from cputrain.launch.local import PlannedTraining, plan_training, train_here
from cputrain.launch.rank_process import bind_rank, run_rank
from cputrain.launch.restarts import keep_logs, with_restarts
from cputrain.launch.startup import startup_of
from cputrain.recipe.explanation import explain
from cputrain.recipe.rates import rate_warning
from cputrain.recipe.schema import Recipe
from cputrain.runs.attempt import continues_run, is_restarted, lock_name_in, restart_variables
from cputrain.runs.folder import LOGS, check_folder, finished, load_training, with_same_global_batch
from cputrain.runs.metric_files import check_log_formats
from cputrain.training.ipex import check_ipex
from mpi.hosts.schedulers import allocation
from mpi.supervise.exits import JobFailedError


@click.command("train")
@click.argument("recipe")
@settings_argument
@click.option("--resume", is_flag=True, help="continue from the last checkpoint in the output folder")
@click.option("--overwrite", is_flag=True, help="delete the run in the output folder and start again")
@restarts_option
@no_verify_option
@click.option("--dry-run", is_flag=True, help="print the plan and the derived sizes; start and write nothing")
@click.option("--quiet", "-q", is_flag=True, help="print only warnings, errors and the summary")
@click.option("--prepared", is_flag=True, hidden=True)
def command(
    recipe: str,
    settings: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    restarts: int,
    no_verify: bool,
    dry_run: bool,
    quiet: bool,
    prepared: bool,
) -> int:
    """Train RECIPE: a file, a shipped name or, with --resume, the folder of a run. KEY=VALUE sets a key of the recipe.

    Started alone, train plans this machine and starts its workers; started by mpirun, srun or torchrun, it is one rank.
    After a failure --restarts N continues from the last checkpoint.
    """
    training = load_training(recipe, settings)
    check_log_formats(training)
    if training.engine == "ipex":
        check_ipex()
    env = os.environ
    rank = discover(env)
    if rank is not None:
        switches = {
            "resume": resume,
            "overwrite": overwrite,
            "prepared": prepared,
            "check": not no_verify,
            "quiet": quiet,
        }
        return _be_rank(training, rank, env, switches)
    if (found := allocation(env)) is not None and (note := found.uses_one_host):
        click.echo(f"note: {note}", err=True)
    planned, name = plan_training(training, env, resume=resume), uuid4().hex

    def start(attempt: int, failure: JobFailedError | None) -> int:
        again, fresh = resume or attempt > 0, overwrite and attempt == 0
        restarted, job = is_restarted(env), lock_name_in(env)
        resumption = check_folder(training, planned.scale, resume=again, overwrite=fresh, restarted=restarted, job=job)
        if again and (message := finished(training.folder, planned.sizes.last_step(training.max_steps))):
            say(message)
            return 0
        if failure is not None:
            keep_logs(training.folder / LOGS, attempt - 1)
        elif not quiet or dry_run:
            _show_sizes(planned)
        if resumption:
            say(resumption)
        if dry_run:
            _show_plan(planned)
            return 0
        for warning in planned.plan.worded(as_recipe_key).warnings if failure is None else ():
            say(f"warning: {warning}")
        of_attempt = {**env, **dict(restart_variables(attempt, restarts, name))}
        return train_here(planned, of_attempt, resume=again, overwrite=fresh, verify=not no_verify, quiet=quiet)

    return with_restarts(start, restarts)


def _be_rank(training: Recipe, rank: Rank, env: Mapping[str, str], switches: dict[str, Any]) -> int:
    """Train as the rank that mpirun, srun, torchrun or cputrain has started: after a restart of the whole job from the
    last checkpoint, with the same global batch on whatever workers are left."""
    if not switches["prepared"] and continues_run(training.folder, env, overwrite=switches["overwrite"]):
        switches = {**switches, "resume": True, "overwrite": False}
        training = with_same_global_batch(training, rank.world_size)
    worker, observed = bind_rank(training, rank, env, check=switches["check"])
    startup = startup_of(rank, env, shown=not switches["quiet"])
    startup.phase("importing PyTorch")
    from cputrain.training.entry import train_rank  # torch: after the binding is read back

    run_rank(rank, lambda: train_rank(training, rank, worker, observed, env, **switches, startup=startup))
    return 0


def _show_sizes(planned: PlannedTraining) -> None:
    recipe = planned.recipe
    threads = spread([worker.intra_op for worker in planned.plan.workers], "thread")
    say(
        f"{recipe.name}: {recipe.model.name}, {planned.survey.summary}; "
        f"{counted(planned.ppn, 'worker')} of {threads} each"
    )
    for note in planned.survey.notes:
        say(note)
    say(aligned(explain(recipe, planned.sizes, ppn=planned.ppn, nodes=1)))


def _show_plan(planned: PlannedTraining) -> None:
    if warning := rate_warning(planned.recipe, global_batch=planned.sizes.global_batch):
        click.echo(f"warning: {warning}")
    click.echo("\n" + plan_to_text(planned.plan))
