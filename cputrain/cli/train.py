"""cputrain train: plan, launch and train; or be one rank of a training."""

import os

import click

from affinity.ranks.rank import discover
from affinity.views.text import plan_to_text
from affinity.wording import counted
from cputrain.cli.derived import aligned
from cputrain.cli.options import no_verify_option, settings_argument
from cputrain.cli.setting_names import as_recipe_key
from cputrain.launch.local import PlannedTraining, plan_training, train_here
from cputrain.launch.rank_process import bind_rank, run_rank
from cputrain.recipe.explanation import explain
from cputrain.recipe.rates import rate_warning
from cputrain.runs.folder import check_folder, finished, load_training


@click.command("train")
@click.argument("recipe")
@settings_argument
@click.option("--resume", is_flag=True, help="continue from the last checkpoint in the output folder")
@click.option("--overwrite", is_flag=True, help="delete the run in the output folder and start again")
@no_verify_option
@click.option("--dry-run", is_flag=True, help="print the plan and the derived sizes; start and write nothing")
@click.option("--prepared", is_flag=True, hidden=True)
def command(
    recipe: str,
    settings: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    no_verify: bool,
    dry_run: bool,
    prepared: bool,
) -> int:
    """Train RECIPE: a file, a shipped name or, with --resume, the folder of a run. KEY=VALUE sets a key of the recipe.

    Started alone, train plans this machine and starts its workers; started by mpirun, srun or torchrun, it is one rank.
    """
    training = load_training(recipe, settings)
    rank = discover(os.environ)
    if rank is not None:
        worker, observed = bind_rank(training, rank, os.environ, check=not no_verify)
        from cputrain.training.entry import train_rank  # torch: after the binding is read back

        switches = {"resume": resume, "overwrite": overwrite, "prepared": prepared, "check": not no_verify}
        run_rank(rank, lambda: train_rank(training, rank, worker, observed, os.environ, **switches))
        return 0
    planned = plan_training(training, os.environ, resume=resume)
    resumption = check_folder(training, planned.scale, resume=resume, overwrite=overwrite)
    if resume and (message := finished(training.folder, planned.sizes.last_step(training.max_steps))):
        click.echo(message)
        return 0
    _show_sizes(planned)
    if resumption:
        click.echo(resumption)
    if dry_run:
        _show_plan(planned)
        return 0
    for warning in planned.plan.worded(as_recipe_key).warnings:
        click.echo(f"warning: {warning}")
    return train_here(planned, os.environ, resume=resume, overwrite=overwrite, verify=not no_verify)


def _show_sizes(planned: PlannedTraining) -> None:
    recipe = planned.recipe
    threads = " + ".join(str(worker.intra_op) for worker in planned.plan.workers)
    click.echo(
        f"{recipe.name}: {recipe.model.name}, {planned.survey.summary}; "
        f"{counted(planned.ppn, 'worker')} of {threads} threads"
    )
    click.echo(aligned(explain(recipe, planned.sizes, ppn=planned.ppn, nodes=1)))


def _show_plan(planned: PlannedTraining) -> None:
    if warning := rate_warning(planned.recipe, global_batch=planned.sizes.global_batch):
        click.echo(f"warning: {warning}")
    click.echo("\n" + plan_to_text(planned.plan))
