"""cputrain train: plan, launch and train; or be one rank of it."""

import click

from affinity.views.text import plan_to_text
from cputrain.cli.derived import aligned
from cputrain.launch.local import planned_here, train_here
from cputrain.launch.rank_process import bound_here, run_rank, this_rank
from cputrain.recipe.explanation import explain
from cputrain.recipe.rates import rate_warning
from cputrain.runs.folder import check_folder, finished, load_training


@click.command("train")
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="go on from the last checkpoint in the output folder")
@click.option("--overwrite", is_flag=True, help="start anew in an output folder that holds a run")
@click.option("--no-verify", is_flag=True, help="go on when the kernel gave a worker other PUs than planned")
@click.option("--dry-run", is_flag=True, help="print plan and derivation, start and write nothing")
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
    """Train RECIPE (a file or a shipped name; with --resume also a run's folder), any of its keys set by KEY=VALUE.

    Started alone it plans this machine and starts its workers; started by mpirun, srun or torchrun it is one rank.
    """
    training = load_training(recipe, settings)
    rank = this_rank()
    if rank is not None:
        worker, observed = bound_here(training, rank, check=not no_verify)
        from cputrain.training.entry import train_rank  # torch: after the binding is read back

        how = {"resume": resume, "overwrite": overwrite, "prepared": prepared, "check": not no_verify}
        run_rank(rank, lambda: train_rank(training, rank, worker, observed, **how))
        return 0
    planned = planned_here(training, resume=resume)
    resumption = check_folder(training, planned.facts, resume=resume, overwrite=overwrite)
    if resume and (said := finished(training.folder, planned.numbers.last_step(training.max_steps))):
        click.echo(said)
        return 0
    threads = " + ".join(str(worker.intra_op) for worker in planned.plan.workers)
    click.echo(
        f"{training.name}: {training.model.name}, {planned.found.summary}; {planned.ppn} worker(s) of {threads} threads"
    )
    click.echo(aligned(explain(training, planned.numbers, ppn=planned.ppn, nodes=1)))
    if resumption:
        click.echo(resumption)
    if dry_run:
        if warning := rate_warning(training, global_batch=planned.numbers.global_batch):
            click.echo(f"warning: {warning}")
        click.echo("\n" + plan_to_text(planned.plan))
        return 0
    for warning in planned.plan.warnings:
        click.echo(f"warning: {warning}")
    return train_here(planned, resume=resume, overwrite=overwrite, verify=not no_verify)
