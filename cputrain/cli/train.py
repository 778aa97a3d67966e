"""cputrain train: plan, launch and train; or be one rank of it."""

import os
import sys

import click

from affinity.picture import picture
from affinity.plan import plan_machine
from affinity.runtime import find_runtime, target_of
from affinity.sysfs import this_machine
from cputrain.cli.derived import aligned, counted
from cputrain.cli.ranks import bound_here, run_rank, this_rank
from cputrain.derivation import explain
from cputrain.planning import request_of
from cputrain.recipe import load_recipe
from cputrain.run_folder import LOGS, PLAN, RECIPE, check_folder, make_folder
from mpi.cluster import Kind
from mpi.job import Job
from mpi.run import run_local


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
    """Train RECIPE (a file or a shipped name), any of its keys set by KEY=VALUE.

    Started alone it plans this machine and starts its workers; started by mpirun, srun or torchrun it is one rank.
    """
    training = load_recipe(recipe, settings)
    rank = this_rank()
    if rank is not None:
        worker, observed = bound_here(training, rank, check=not no_verify)
        from cputrain.rank_main import train_rank  # torch: after the binding is read back

        how = {"resume": resume, "overwrite": overwrite, "prepared": prepared, "check": not no_verify}
        run_rank(rank, lambda: train_rank(training, rank, worker, observed, **how))
        return 0
    plan = plan_machine(this_machine(), request_of(training), find_runtime(target_of(()), os.environ))
    found, numbers = counted(training, ppn=len(plan.workers))
    check_folder(training, resume=resume, overwrite=overwrite)
    threads = " + ".join(str(worker.intra_op) for worker in plan.workers)
    click.echo(
        f"{training.name}: {training.model.name}, {found.train:,} training and {found.val:,} validation images, "
        f"{len(found.classes)} classes; {len(plan.workers)} worker(s) of {threads} threads"
    )
    click.echo(aligned(explain(training, numbers, ppn=len(plan.workers), nodes=1)))
    if dry_run:
        click.echo("\n" + picture(plan))
        return 0
    make_folder(training, plan, overwrite=overwrite)
    folder = training.folder
    flags = (*(("--resume",) if resume else ()), *(("--no-verify",) if no_verify else ()))
    job = Job(
        kinds=(Kind(hosts=("localhost",), plan=plan),),
        command=(sys.executable, "-m", "cputrain", "train", str(folder / RECIPE), "--prepared", *flags),
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
        verify=not no_verify,
        plain_rank=0,
    )
    return run_local(job)
