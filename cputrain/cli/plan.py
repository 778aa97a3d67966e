"""cputrain plan: Machine -> Plan, printed."""

import os
import shlex
import sys
from pathlib import Path

import click

from affinity.picture import picture
from affinity.plan import Plan, Request
from affinity.plan_file import plan_to_json
from affinity.split import USUAL_BATCH
from affinity.svg import picture_svg
from affinity.workload import RESNET50
from cputrain.cli.options import Asked, make_plan, planning_options
from mpi.job import Job
from mpi.launch import bound, intelmpi


@click.command("plan")
@click.argument("recipe", required=False)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "svg", "env", "command"]), default="text", show_default=True
)
@click.option("--explain", "explained", is_flag=True, help="also the plans not taken, and what the rules assume")
@planning_options
def command(asked: Asked, recipe: str | None, settings: tuple[str, ...], form: str, explained: bool) -> None:
    """Decide and explain who runs where, for this machine or any other.

    With RECIPE (a file or a shipped name) also derive its batch, steps and learning rate, and the command line.
    """
    base, training = Request(local_batch=USUAL_BATCH, workload=RESNET50), None
    if recipe is not None:
        from cputrain.planning import request_of  # pydantic: only where there is a recipe
        from cputrain.recipe import load_recipe

        training = load_recipe(recipe, settings)
        base = request_of(training)
    plan = make_plan(asked, base)
    train = ("python", "-m", "cputrain", "train", recipe, *settings) if recipe else ("CMD...",)
    job = Job(plan=plan, hosts=asked.hosts, command=train, plan_path=Path("plan.json"), log_dir=Path("logs"))
    tokens = intelmpi(job) if len(asked.hosts) > 1 else bound(job, python="python")
    if form == "json":
        click.echo(plan_to_json(plan))
    elif form == "svg":
        click.echo(picture_svg(plan))
    elif form == "env":
        click.echo(_env(plan))
    elif form == "command":
        click.echo(shlex.join(tokens))
    else:
        click.echo(picture(plan, coloured=sys.stdout.isatty() and "NO_COLOR" not in os.environ, explained=explained))
        if training is not None:
            from cputrain.cli.derived import derivation

            click.echo("\n" + derivation(training, ppn=job.ppn, nodes=len(job.hosts)))
        if recipe is not None or len(asked.hosts) > 1:
            click.echo("\ncommand" + (" (hosts: one name a line)" if len(asked.hosts) > 1 else ", for each worker"))
            click.echo("  " + shlex.join(tokens))


def _env(plan: Plan) -> str:
    """Shell assignments, one block a worker."""
    blocks = (
        f"# worker {worker.local_rank}\n" + "\n".join(f"export {k}={shlex.quote(v)}" for k, v in worker.env)
        for worker in plan.workers
    )
    return "\n".join(blocks)
