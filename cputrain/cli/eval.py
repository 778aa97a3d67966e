"""cputrain eval: exact accuracy of checkpoints."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from affinity.errors import InputError
from affinity.ranks.rank import discover
from affinity.start import own_program
from cputrain.checkpoints.manifest import is_checkpoint
from cputrain.cli.json_output import format_option
from cputrain.cli.options import no_verify_option, settings_argument
from cputrain.cli.streams import shows_bars
from cputrain.data.from_recipe import survey_recipe
from cputrain.launch.local import local_job, plan_recipe
from cputrain.launch.rank_process import bind_rank, run_rank
from cputrain.launch.recipe_request import for_evaluation
from cputrain.launch.startup import startup_of
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.data import SYNTHETIC
from cputrain.runs.folder import PLAN, checkpoints_of, load_training, run_of, write_plan
from mpi.supervise.local import run_local


@click.command("eval")
@click.argument("recipe", metavar="RECIPE|RUN|CHECKPOINT")
@settings_argument
@click.option(
    "--checkpoint",
    "named",
    multiple=True,
    type=click.Path(path_type=Path),
    help="a checkpoint, or a folder of them; may be repeated  [default: the best one of RUN]",
)
@click.option("--last", is_flag=True, help="the newest checkpoint of RUN, not the best one")
@format_option
@click.option(
    "--report",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="also write a page with the accuracy of each class, the confusion matrix and the most wrong images, and "
    "beside it FILE.csv with the prediction for each image",
)
@no_verify_option
@click.option("--bar", is_flag=True, hidden=True)
def command(
    recipe: str,
    settings: tuple[str, ...],
    named: tuple[Path, ...],
    last: bool,
    output_format: str,
    page: Path | None,
    no_verify: bool,
    bar: bool,
) -> int:
    """Compute top-1, top-5 and loss of checkpoints, over every validation image once.

    RUN is the folder of a training and stands for its recipe and its best checkpoint; a CHECKPOINT has its recipe in
    it; a RECIPE needs --checkpoint.
    KEY=VALUE sets a key of the recipe, as in evaluate.batch=200 plan.ppn=1 plan.threads=46.
    """
    as_json = output_format == "json"
    training = for_evaluation(load_training(recipe, settings))
    if training.data.path == SYNTHETIC:
        raise InputError(
            f"data.path={SYNTHETIC} has random labels, so there is no accuracy to compute: set data.path=DIR"
        )
    alone = (Path(recipe),) if is_checkpoint(Path(recipe)) and not named else named
    checkpoints = checkpoints_of(run_of(recipe), alone, last=last)
    check_page(page, len(checkpoints))
    env = os.environ
    rank = discover(env)
    if rank is not None:
        worker, observed = bind_rank(training, rank, env, check=not no_verify)
        startup = startup_of(rank, env, shown=not as_json)
        startup.phase("importing PyTorch")
        from cputrain.training.eval_entry import eval_rank  # torch: after the binding is read back

        switches = {"check": not no_verify, "as_json": as_json, "bar": bar or shows_bars()}
        run_rank(
            rank,
            lambda: eval_rank(
                training, rank, worker, observed, env, checkpoints, **switches, page=page, startup=startup
            ),
        )
        return 0
    paths = (word for path in checkpoints for word in ("--checkpoint", str(path)))
    flags = {"--format=json": as_json, "--no-verify": no_verify, "--bar": shows_bars()}
    given = (flag for flag, wanted in flags.items() if wanted)
    pages = ("--report", str(page)) if page else ()
    arguments = (*paths, *pages, *given, "--", recipe, *settings)
    return _evaluate_here(training, checkpoints, arguments, env, verify=not no_verify)


def check_page(page: Path | None, checkpoints: int) -> None:
    """Raise InputError for a page that is not one of HTML, or not of one checkpoint."""
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--report {page} does not end in .html: the page is HTML, the predictions get .csv")
    if page is not None and checkpoints > 1:
        raise InputError(f"--report is the page of one checkpoint, and {checkpoints} are evaluated: name one")


def _evaluate_here(
    training: Recipe, checkpoints: tuple[Path, ...], arguments: tuple[str, ...], env: Mapping[str, str], *, verify: bool
) -> int:
    """Evaluate in the planned workers of this machine; `arguments` are those of each worker's `cputrain eval`."""
    plan = plan_recipe(training, env)
    from cputrain.training.eval_entry import check_checkpoints  # torch: after everything that is refused without it

    check_checkpoints(checkpoints, training, survey_recipe(training))
    scratch = Path(tempfile.mkdtemp(prefix="cputrain-eval-"))
    write_plan(scratch / PLAN, plan)
    command = (*own_program("cputrain"), "eval", *arguments)
    status = run_local(local_job(plan, command, scratch, verify=verify, plain_rank=0), env)
    shutil.rmtree(scratch)  # not reached where a rank has failed: its log stays
    return status
