"""`cputrain train`, `eval`, `find-lr`, `weights` and `demo`."""

import math
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import click

from cputrain.affinity.errors import InputError, as_recipe_key
from cputrain.affinity.rank import Rank, rank_from_env
from cputrain.affinity.start import isolated_command
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.views import plan_to_text
from cputrain.affinity.wording import MIB, plural, spread
from cputrain.checkpoint.files import is_checkpoint
from cputrain.cli.options import SectionedCommand, no_verify_option, restarts_option, settings_argument
from cputrain.cli.output import (
    amount_option,
    format_option,
    formats_option,
    number_option,
    path_option,
    print_line,
    shows_bars,
)
from cputrain.cli.recipes import aligned
from cputrain.cli.words import complete_recipe
from cputrain.data.from_settings import survey_data
from cputrain.data.settings import SYNTHETIC
from cputrain.files import LOGS
from cputrain.launch.command import keep_logs, with_restarts
from cputrain.launch.local import run_in_scratch
from cputrain.launch.rank_process import StartOptions, bind_rank, run_rank
from cputrain.measurements import auto_line
from cputrain.mpi.schedulers import scheduler_allocation
from cputrain.mpi.supervise.processes import JobFailedError
from cputrain.recipe.derivation import explain
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.request import for_evaluation, request_of
from cputrain.recipe.resume import check_folder, first_precision, load_training, with_same_global_batch
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import check_log_formats
from cputrain.runs.folder import checkpoints_of, continues_run, finished, run_of
from cputrain.training.ipex import check_ipex
from cputrain.training.local import PlannedTraining, plan_recipe, plan_training, train_here
from cputrain.variables import is_restarted, lock_name_in, restart_variables

EXAMPLES = (
    "cputrain train imagefolder data.path=DIR batch.local=32 epochs=5",
    "cputrain train runs/imagefolder --resume",
)

DEMO_RECIPE = "demo-digits"
DEMO_IMAGES = "data/digits-folder"  # data.path gets the shards


@click.command("train", cls=SectionedCommand, sections={}, examples=EXAMPLES)
@click.argument("recipe", shell_complete=complete_recipe)
@settings_argument
@click.option("--resume", is_flag=True, help="continue from the last checkpoint in the output folder")
@click.option("--overwrite", is_flag=True, help="delete the run in the output folder and start over")
@restarts_option
@no_verify_option
@click.option("--dry-run", is_flag=True, help="print the plan and the derived sizes; start and write nothing")
@click.option("--quiet", "-q", is_flag=True, help="print only warnings, errors and the summary")
# Set for ranks whose run folder and signals are their launcher's.
@click.option("--prepared", is_flag=True, hidden=True)
def train_command(
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
    """Train RECIPE: a file, a shipped recipe's name or, with --resume, a run folder. KEY=VALUE sets a recipe key.
    `cputrain recipes` lists the shipped recipes, `cputrain keys` the keys.

    Started directly, train plans this machine and starts its workers; started by mpirun, srun or torchrun, it acts as
    one rank. With --restarts N it continues from the last checkpoint after a failure.
    """
    training = load_training(recipe, settings)
    if training.engine == "ipex":
        check_ipex()
    env = os.environ
    check_log_formats(training.log, env)
    options = StartOptions(resume=resume, overwrite=overwrite, prepared=prepared, quiet=quiet)
    rank = rank_from_env(env)
    if rank is not None:
        return _be_rank(training, rank, env, options, check=not no_verify)
    if (found := scheduler_allocation(env)) is not None and (note := found.uses_one_host):
        click.echo(f"note: {note}", err=True)
    planned, name = plan_training(training, env, resume=resume), uuid4().hex
    if dry_run:
        return _show_start(planned, env, options)

    def train_attempt(attempt: int, failure: JobFailedError | None) -> int:
        of_attempt = options if attempt == 0 else replace(options, resume=True, overwrite=False)
        checked = _check_start(planned, env, of_attempt)
        if checked is None:
            return 0
        permitted, resumption = checked
        if failure is not None:
            keep_logs(planned.recipe.folder / LOGS, attempt - 1)
        elif not quiet:
            _show_sizes(planned)
        if resumption:
            print_line(resumption)
        for warning in planned.plan.render(as_recipe_key).warnings if failure is None else ():
            print_line(f"warning: {warning}")
        if (precision := permitted.recipe.precision) != planned.recipe.precision:
            print_line(auto_line(precision, "as this run began"))
        variables = {**env, **dict(restart_variables(attempt, restarts, name))}
        again, fresh = of_attempt.resume, of_attempt.overwrite
        return train_here(permitted, variables, resume=again, overwrite=fresh, verify=not no_verify, quiet=quiet)

    return with_restarts(train_attempt, restarts)


def _check_start(
    planned: PlannedTraining, env: Mapping[str, str], options: StartOptions
) -> tuple[PlannedTraining, str] | None:
    """Check the run folder for a start with these options. Return the training, in the precision that its run began
    with, and the line of `check_folder`; None, after a message, if the run is already finished."""
    again, fresh = options.resume, options.overwrite
    restarted, job = is_restarted(env), lock_name_in(env)
    first = first_precision(planned.recipe.folder) if again else None
    training = planned.recipe if first is None else planned.recipe.in_precision(first)
    resumption = check_folder(training, planned.scale, resume=again, overwrite=fresh, restarted=restarted, job=job)
    if again and (message := finished(training.folder, planned.sizes.last_step(training.max_steps))):
        print_line(message)
        return None
    return replace(planned, recipe=training), resumption


def _show_start(planned: PlannedTraining, env: Mapping[str, str], options: StartOptions) -> int:
    """Print what a start with these options would do; return the exit status."""
    checked = _check_start(planned, env, options)
    if checked is None:
        return 0
    _show_sizes(planned)
    if resumption := checked[1]:
        print_line(resumption)
    if warning := planned.sizes.rate_warning:
        click.echo(f"warning: {warning}")
    click.echo("\n" + plan_to_text(planned.plan, wording=as_recipe_key))
    return 0


def _be_rank(training: Recipe, rank: Rank, env: Mapping[str, str], options: StartOptions, *, check: bool) -> int:
    """Train as one rank started by mpirun, srun, torchrun or cputrain. After a restart of the whole job, continue from
    the last checkpoint with the same global batch on the remaining workers."""
    if not options.prepared and continues_run(training.folder, env, overwrite=options.overwrite):
        options = replace(options, resume=True, overwrite=False)
        training = with_same_global_batch(training, rank.world_size)
    context = bind_rank(
        request_of(training), rank, env, share=training.plan.share, check=check, shown=not options.quiet
    )
    context.startup.phase("importing PyTorch")
    from cputrain.training.session import start_session  # torch: after the binding is read back
    from cputrain.training.trainer import train_rank

    def train() -> None:
        train_rank(start_session(context, training, measured=True, resume=options.resume), options)

    run_rank(rank, train, as_recipe_key)
    return 0


def _show_sizes(planned: PlannedTraining) -> None:
    training = planned.recipe
    threads = spread([worker.intra_op for worker in planned.plan.workers], "thread")
    each = " each" if planned.ppn > 1 else ""
    print_line(
        f"{training.name}: {training.model.name}, {planned.survey.summary}; "
        f"{plural(planned.ppn, 'worker')} of {threads}{each}"
    )
    for note in planned.survey.notes:
        print_line(note)
    print_line(aligned(explain(training, planned.sizes, ppn=planned.ppn, nodes=1)))


@click.command("eval")
@click.argument("recipe", shell_complete=complete_recipe, metavar="RECIPE|RUN|CHECKPOINT")
@settings_argument
@path_option(
    "--checkpoint",
    "named",
    multiple=True,
    help="evaluate this checkpoint, or the checkpoints in this folder; repeatable  [default: the best one of RUN]",
)
@click.option("--last", is_flag=True, help="evaluate the newest checkpoint of RUN instead of the best one")
@format_option
@path_option(
    "--report",
    "page",
    dir_okay=False,
    suffixes=(".html", ".htm"),
    why="the page is HTML, the predictions get .csv",
    metavar="FILE.html",
    help="also write a page with the accuracy of each class, the confusion matrix and the most confident "
    "mistakes, and next to it FILE.csv with the prediction for each image",
)
@no_verify_option
@click.option("--bar", is_flag=True, hidden=True)
def eval_command(
    recipe: str,
    settings: tuple[str, ...],
    named: tuple[Path, ...],
    last: bool,
    output_format: str,
    page: Path | None,
    no_verify: bool,
    bar: bool,
) -> int:
    """Compute top-1, top-5 and loss of checkpoints over every validation image exactly once.

    RUN is a run folder and stands for its recipe and best checkpoint; a CHECKPOINT contains its recipe; a RECIPE needs
    --checkpoint. KEY=VALUE sets a recipe key, as in evaluate.batch=200 plan.ppn=1 plan.threads=46.
    """
    as_json = output_format == "json"
    training = for_evaluation(load_training(recipe, settings))
    if training.data.path == SYNTHETIC:
        raise InputError(
            f"data.path={SYNTHETIC} has random labels, so there is no accuracy to compute: set data.path=DIR"
        )
    alone = (Path(recipe),) if is_checkpoint(Path(recipe)) and not named else named
    checkpoints = checkpoints_of(run_of(recipe), alone, last=last)
    if training.precision == "auto":
        training = training.in_precision(load_training(str(checkpoints[0])).precision)
    if page is not None and len(checkpoints) > 1:
        raise InputError(f"--report shows one checkpoint, but {len(checkpoints)} are evaluated: name one")
    env = os.environ
    rank = rank_from_env(env)
    if rank is not None:
        context = bind_rank(
            request_of(training), rank, env, share=training.plan.share, check=not no_verify, shown=not as_json
        )
        context.startup.phase("importing PyTorch")
        from cputrain.training.evaluation import eval_rank  # torch: after the binding is read back
        from cputrain.training.session import start_session

        shows = {"as_json": as_json, "bar": bar or shows_bars()}

        def evaluate() -> None:
            eval_rank(start_session(context, training, splits=("val",)), checkpoints, **shows, page=page)

        run_rank(rank, evaluate, as_recipe_key)
        return 0
    paths = (word for path in checkpoints for word in ("--checkpoint", str(path)))
    flags = {"--format=json": as_json, "--no-verify": no_verify, "--bar": shows_bars()}
    given = (flag for flag, is_set in flags.items() if is_set)
    pages = ("--report", str(page)) if page else ()
    arguments = (*paths, *pages, *given, "--", recipe, *settings)
    plan = plan_recipe(training, env)
    from cputrain.training.evaluation import check_checkpoints  # torch, after the checks without it

    check_checkpoints(
        checkpoints, training.model, training.data.crop, survey_data(training.data, classes=training.model.classes)
    )
    return run_in_scratch(plan, ("eval", *arguments), env, verify=not no_verify)


@click.command("find-lr")
@click.argument("recipe", shell_complete=complete_recipe)
@settings_argument
@number_option("--steps", least=10, most=100_000, default=100, help="run this many steps")
@amount_option("--from", "low", above=0, default=1e-5, metavar="RATE", help="start with this learning rate")
@amount_option("--to", "high", above=0, default=10.0, metavar="RATE", help="end with this learning rate")
@path_option(
    "--picture",
    dir_okay=False,
    suffixes=(".svg",),
    why="the picture is SVG",
    metavar="FILE.svg",
    help="plot the loss over the learning rate",
)
@formats_option("json", help="choose the output format")
@no_verify_option
def find_lr_command(
    recipe: str,
    settings: tuple[str, ...],
    steps: int,
    low: float,
    high: float,
    picture: Path | None,
    output_format: str,
    no_verify: bool,
) -> int:
    """Suggest schedule.peak_rate for RECIPE with a learning-rate range test (learning rate finder).

    RECIPE is a file, a shipped recipe's name or a run folder. The learning rate grows by a constant factor per step
    until the loss diverges; the suggestion is where the smoothed loss falls fastest. It is valid for the recipe's
    global batch and optimizer, with a warm-up. Nothing is saved, and the recipe's output folder is not touched.
    """
    if not low < high < math.inf:
        raise InputError(f"--from {low:g} --to {high:g}: the first rate must be lower than the last")
    training = load_training(recipe, settings)
    env = os.environ
    rank = rank_from_env(env)
    if rank is not None:
        context = bind_rank(
            request_of(training),
            rank,
            env,
            share=training.plan.share,
            check=not no_verify,
            shown=output_format != "json",
        )
        context.startup.phase("importing PyTorch")
        from cputrain.studies.lr_finder import find_lr  # torch: after the binding is read back
        from cputrain.training.session import start_session

        ends = {"low": low, "high": high}
        as_json = output_format == "json"
        run_rank(
            rank,
            lambda: find_lr(start_session(context, training), steps, **ends, picture=picture, as_json=as_json),
            as_recipe_key,
        )
        return 0
    options = ("--steps", str(steps), "--from", repr(low), "--to", repr(high), "--format", output_format)
    drawn = () if picture is None else ("--picture", str(picture))
    flags = ("--no-verify",) if no_verify else ()
    arguments = (*options, *drawn, *flags, "--", recipe, *settings)
    return run_in_scratch(plan_training(training, env).plan, ("find-lr", *arguments), env, verify=not no_verify)


@click.command("weights")
@click.argument("network", metavar="NAME")
@click.option(
    "--version", "weights", metavar="NAME", help="choose the weights, as in IMAGENET1K_V1  [default: the best ones]"
)
@click.option("--mirror", metavar="URL", help="download from this server instead of PyTorch's")
def weights_command(network: str, weights: str | None, mirror: str | None) -> None:
    """Download the pretrained weights of a torchvision network (resnet50, vit_b_16, ...) into torch's cache.

    An existing file is only verified. Without network access, the error names the file to download and where to put
    it. Train from the weights with model.weights=PATH, the path printed here; $TORCH_HOME moves the cache.
    """
    from cputrain.models.weights import fetch, find_pretrained, normalization_of  # torch, only needed here

    pretrained = find_pretrained(network, weights, mirror)
    how = "downloaded" if fetch(pretrained) else "already there"
    published = "" if pretrained.accuracy is None else f", published top-1 {pretrained.accuracy:.2f} %"
    size = pretrained.path.stat().st_size / MIB
    click.echo(f"{pretrained.name} of {network}: {how}, {size:,.1f} MiB, SHA-256 {pretrained.digits}...{published}")
    click.echo(" ".join(filter(None, (f"model.weights={pretrained.path}", normalization_of(pretrained.path)))))


@click.command("demo")
@settings_argument
def demo_command(settings: tuple[str, ...]) -> None:
    """Plan this machine, pack scikit-learn's handwritten digits, train ResNet-50 with 2 workers, evaluate it and write
    the report.

    Everything is written to the working directory: data/, and runs/demo, which replaces an earlier demo's run. It takes
    minutes on two cores; KEY=VALUE sets a recipe key, as in max_steps=10 for a trial of a few seconds. The digits come
    with scikit-learn: pip install "cputrain[demo]".
    """
    from cputrain.cli.data import prepare_command  # the image libraries
    from cputrain.cli.plan import plan_command

    shards = str(load_recipe(DEMO_RECIPE, settings).data.path)
    for each, words in ((plan_command, ("plan",)), (prepare_command, ("prepare", "digits", DEMO_IMAGES, shards))):
        click.echo(f"cputrain {shlex.join(words)}")
        each.main(args=list(words[1:]), prog_name="cputrain", standalone_mode=False)
    both = len(this_machine().allowed_cores) > 1 and not any(each.startswith("plan.ppn=") for each in settings)
    command = ("train", DEMO_RECIPE, *(("plan.ppn=2",) if both else ()), *settings, "--overwrite")
    click.echo(f"cputrain {shlex.join(command)}")
    sys.stdout.flush()
    os.execv(sys.executable, (*isolated_command("cputrain"), *command))
