"""cputrain eval: exact accuracy of checkpoints."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import click

from affinity.errors import InputError
from cputrain.data.from_recipe import survey_recipe
from cputrain.launch.local import plan_here
from cputrain.launch.planning import for_evaluation
from cputrain.launch.rank_process import bound_here, run_rank, this_rank
from cputrain.recipe.schema.data import SYNTHETIC
from cputrain.runs.folder import checkpoints_of, load_training, run_of, write_plan
from mpi.hosts.groups import HostGroup
from mpi.launchers.job import Job
from mpi.supervise.local import run_local


@click.command("eval")
@click.argument("recipe", metavar="RECIPE|RUN")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--checkpoint",
    "named",
    multiple=True,
    type=click.Path(path_type=Path),
    help="a checkpoint, or a folder of them; may be given again  [default: the RUN's best]",
)
@click.option("--last", is_flag=True, help="the RUN's newest checkpoint, not its best")
@click.option("--json", "as_json", is_flag=True, help="the result as JSON, progress on stderr")
@click.option("--no-verify", is_flag=True, help="go on when the kernel gave a worker other PUs than planned")
@click.option("--bar", is_flag=True, hidden=True)
def command(
    recipe: str,
    settings: tuple[str, ...],
    named: tuple[Path, ...],
    last: bool,
    as_json: bool,
    no_verify: bool,
    bar: bool,
) -> int:
    """Top-1, top-5 and loss of checkpoints over every validation image once.

    RUN is the folder of a training, whose recipe and best checkpoint are taken; a RECIPE needs --checkpoint. Any key
    is set by KEY=VALUE, as in evaluate.batch=200 plan.ppn=1 plan.threads=46.
    """
    training = for_evaluation(load_training(recipe, settings))
    if training.data.path == SYNTHETIC:
        raise InputError(f"data.path={SYNTHETIC} has random labels, nothing to evaluate: set data.path=DIR")
    checkpoints = checkpoints_of(run_of(recipe), named, last=last)
    rank = this_rank()
    if rank is not None:
        worker, observed = bound_here(training, rank, check=not no_verify)
        from cputrain.training.eval_entry import eval_rank  # torch: after the binding is read back

        how = {"check": not no_verify, "as_json": as_json, "bar": bar or sys.stderr.isatty()}
        run_rank(rank, lambda: eval_rank(training, rank, worker, observed, checkpoints, **how))
        return 0
    plan = plan_here(training)
    from cputrain.training.eval_entry import check_checkpoints  # torch: after what is refused sooner without

    check_checkpoints(checkpoints, training, survey_recipe(training))
    paths = (word for path in checkpoints for word in ("--checkpoint", str(path)))
    flags = {"--json": as_json, "--no-verify": no_verify, "--bar": sys.stderr.isatty()}
    given = (flag for flag, wanted in flags.items() if wanted)
    scratch = Path(tempfile.mkdtemp(prefix="cputrain-eval-"))
    write_plan(scratch / "plan.json", plan)
    job = Job(
        groups=(HostGroup(hosts=("localhost",), plan=plan),),
        command=(sys.executable, "-m", "cputrain", "eval", *paths, *given, "--", recipe, *settings),
        plan_path=scratch / "plan.json",
        log_dir=scratch / "logs",
        verify=not no_verify,
        plain_rank=0,
    )
    status = run_local(job, os.environ)
    shutil.rmtree(scratch)  # not reached where a rank has failed: its log stays
    return status
