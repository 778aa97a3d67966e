"""cputrain eval: exact accuracy of a checkpoint."""

import shutil
import sys
import tempfile
from pathlib import Path

import click

from affinity.errors import InputError
from cputrain.cli.ranks import bound_here, run_rank, this_rank
from cputrain.local import planned_here
from cputrain.recipe import load_recipe
from cputrain.run_folder import write_plan
from cputrain.schema.data import SYNTHETIC
from mpi.cluster import Kind
from mpi.job import Job
from mpi.run import run_local


@click.command("eval")
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--checkpoint", required=True, type=click.Path(path_type=Path), help="a run's checkpoints/best.pt, say")
@click.option("--no-verify", is_flag=True, help="go on when the kernel gave a worker other PUs than planned")
def command(recipe: str, settings: tuple[str, ...], checkpoint: Path, no_verify: bool) -> int:
    """Top-1 and top-5 of a checkpoint over every validation image once."""
    training = load_recipe(recipe, settings)
    if training.data.path == SYNTHETIC:
        raise InputError(f"data.path={SYNTHETIC} has random labels, nothing to evaluate: set data.path=DIR")
    if not checkpoint.is_file():
        raise InputError(f"checkpoint {checkpoint} is not there: a run keeps its own in checkpoints/")
    rank = this_rank()
    if rank is not None:
        worker, observed = bound_here(training, rank, check=not no_verify)
        from cputrain.rank_main import eval_rank  # torch: after the binding is read back

        run_rank(rank, lambda: eval_rank(training, rank, worker, observed, checkpoint, check=not no_verify))
        return 0
    plan = planned_here(training).plan
    scratch = Path(tempfile.mkdtemp(prefix="cputrain-eval-"))
    write_plan(scratch / "plan.json", plan)
    job = Job(
        kinds=(Kind(hosts=("localhost",), plan=plan),),
        command=(sys.executable, "-m", "cputrain", *sys.argv[1:]),
        plan_path=scratch / "plan.json",
        log_dir=scratch / "logs",
        verify=not no_verify,
        plain_rank=0,
    )
    status = run_local(job)
    shutil.rmtree(scratch)  # not reached where a rank has failed: its log stays
    return status
