"""cputrain find-lr: a learning rate for a recipe, by a range test."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from affinity.errors import InputError
from affinity.ranks.rank import Rank, discover
from affinity.start import own_program
from cputrain.cli.numbers import FiniteRange
from cputrain.cli.options import no_verify_option, settings_argument
from cputrain.launch.local import local_job, plan_training
from cputrain.launch.rank_process import bind_rank, run_rank
from cputrain.launch.startup import startup_of
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import PLAN, load_training, write_plan
from mpi.supervise.local import run_local

SVG_HEAD = '<?xml version="1.0" encoding="utf-8"?>\n'


@click.command("find-lr")
@click.argument("recipe")
@settings_argument
@click.option(
    "--steps",
    type=click.IntRange(10, 100_000),
    default=100,
    show_default=True,
    metavar="N",
    help="steps of the test",
)
@click.option(
    "--from",
    "low",
    type=FiniteRange(min=0, min_open=True),
    default=1e-5,
    show_default=True,
    metavar="RATE",
    help="learning rate of the first step",
)
@click.option(
    "--to",
    "high",
    type=FiniteRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="RATE",
    help="learning rate of the last step",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.svg",
    help="draw the loss over the rate",
)
@click.option(
    "--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="output format"
)
@no_verify_option
def command(
    recipe: str,
    settings: tuple[str, ...],
    steps: int,
    low: float,
    high: float,
    picture: Path | None,
    output: str,
    no_verify: bool,
) -> int:
    """Suggest schedule.peak_rate for RECIPE by a learning-rate range test (learning rate finder).

    RECIPE is a file, a shipped name or the folder of a run. The rate grows by the same factor from step to step until
    the loss diverges. The suggestion is where the smoothed loss falls fastest. It holds for the recipe's global batch
    and optimizer, with a warm-up. Nothing is saved: the recipe's output folder stays as it is.
    """
    if not low < high < math.inf:
        raise InputError(f"--from {low:g} --to {high:g}: the first rate has to be lower than the last")
    if picture is not None and picture.suffix.lower() != ".svg":
        raise InputError(f"--picture {picture} does not end in .svg: the picture is SVG")
    training = load_training(recipe, settings)
    env = os.environ
    rank = discover(env)
    if rank is not None:
        how = {"steps": steps, "low": low, "high": high}
        _be_rank(training, rank, env, how, check=not no_verify, picture=picture, as_json=output == "json")
        return 0
    planned = plan_training(training, env)
    scratch = Path(tempfile.mkdtemp(prefix="cputrain-find-lr-"))
    write_plan(scratch / PLAN, planned.plan)
    options = ("--steps", str(steps), "--from", repr(low), "--to", repr(high), "--format", output)
    drawn = () if picture is None else ("--picture", str(picture))
    flags = ("--no-verify",) if no_verify else ()
    arguments = (*options, *drawn, *flags, "--", recipe, *settings)
    job = local_job(
        planned.plan,
        (*own_program("cputrain"), "find-lr", *arguments),
        scratch,
        verify=not no_verify,
        plain_rank=0,
    )
    status = run_local(job, env)
    shutil.rmtree(scratch)  # not reached where a rank has failed: its log stays
    return status


def _be_rank(
    recipe: Recipe,
    rank: Rank,
    env: Mapping[str, str],
    how: dict[str, float],
    *,
    check: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    worker, observed = bind_rank(recipe, rank, env, check=check)
    startup = startup_of(rank, env, shown=not as_json)
    startup.phase("importing PyTorch")
    from cputrain.rate_finder.curve import suggest  # torch: after the binding is read back
    from cputrain.rate_finder.rank import range_test

    def work() -> None:
        test, batch = range_test(
            recipe,
            rank,
            worker,
            observed,
            env,
            steps=int(how["steps"]),
            low=how["low"],
            high=how["high"],
            check=check,
            startup=startup,
        )
        if rank.rank > 0:
            return
        found = suggest(test)
        if picture is not None:
            from cputrain.files import write_text
            from cputrain.rate_finder.picture import range_test_svg

            title = f"{recipe.name}: {recipe.optim.name}, global batch {batch:,}"
            write_text(picture, SVG_HEAD + range_test_svg(title, test, found))
        if as_json:
            losses = [loss if math.isfinite(loss) else None for loss in test.losses]
            smoothed = [loss if math.isfinite(loss) else None for loss in test.smoothed]
            points = zip(test.rates, losses, smoothed, strict=True)
            steps = [{"rate": rate, "loss": loss, "smoothed": mean} for rate, loss, mean in points]
            head = {"recipe": recipe.name, "optimizer": recipe.optim.name, "global_batch": batch}
            print(json.dumps({**head, "rate": found.rate, "why": found.why, "steps": steps}, indent=1), flush=True)
            return
        suggested = "no rate" if found.rate is None else f"schedule.peak_rate={found.rate:.3g}"
        print(f"{suggested}: {found.why}", flush=True)
        print(f"{len(test.rates):,} steps with a global batch of {batch:,}, {recipe.optim.name}", flush=True)
        if picture is not None:
            print(picture, flush=True)

    run_rank(rank, work)
