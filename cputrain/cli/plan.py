"""cputrain plan: Machine -> Plan, printed."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import click
import yaml

from affinity.catalog import find_machine
from affinity.diff import plan_differences
from affinity.errors import InputError
from affinity.picture import picture
from affinity.plan import Plan, Request
from affinity.plan_file import dumps, plan_to_json, read_plan
from affinity.split import USUAL_BATCH
from affinity.svg import picture_svg
from affinity.workload import RESNET50
from cputrain.cli.options import Asked, make_plan, planning_options, request
from mpi.cluster import Cluster, cluster_to_dict, plan_cluster
from mpi.hosts import expand, fold
from mpi.job import Job
from mpi.launch import bound, intelmpi


def _yaml(plan: Plan) -> str:
    return str(yaml.safe_dump(json.loads(plan_to_json(plan)), sort_keys=False)).rstrip()


def _env(plan: Plan) -> str:
    """Shell assignments, one block a worker."""
    blocks = (
        f"# worker {worker.local_rank}\n" + "\n".join(f"export {k}={shlex.quote(v)}" for k, v in worker.env)
        for worker in plan.workers
    )
    return "\n".join(blocks)


FORMS: dict[str, Callable[[Plan], str]] = {"json": plan_to_json, "yaml": _yaml, "svg": picture_svg, "env": _env}


@click.command("plan")
@click.argument("recipe", required=False)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "yaml", "svg", "env", "command"]),
    default="text",
    show_default=True,
)
@click.option("--explain", "explained", is_flag=True, help="also the plans not taken, and what the rules assume")
@click.option(
    "--diff", nargs=2, type=click.Path(path_type=Path), metavar="A.json B.json", help="only what B changes against A"
)
@click.option("--kind", "kinds", multiple=True, metavar="HOSTS=MACHINE", help="a kind of host, once for each")
@planning_options
def command(
    asked: Asked,
    recipe: str | None,
    settings: tuple[str, ...],
    form: str,
    explained: bool,
    diff: tuple[Path, Path] | None,
    kinds: tuple[str, ...],
) -> None:
    """Decide and explain who runs where, for this machine or any other.

    With RECIPE (a file or a shipped name) also derive its batch, steps and learning rate, and the command line.
    Hosts of several kinds get a plan for each: --kind 'n[001-128]=skx-8160-2s' --kind 'k[01-16]=knl-7250-snc4-flat'.
    """
    if diff is not None:
        click.echo("\n".join(plan_differences(*map(read_plan, diff))) or "the same plan")
        return
    base, training = Request(local_batch=USUAL_BATCH, workload=RESNET50), None
    if recipe is not None:
        from cputrain.planning import request_of  # pydantic: only where there is a recipe
        from cputrain.recipe import load_recipe

        if asked.local_batch is not None:
            raise InputError(f"--local-batch beside a recipe: set batch.local={asked.local_batch} in the recipe")
        training = load_recipe(recipe, settings)
        base = request_of(training)
    if kinds:
        _show_cluster(_cluster(kinds, asked, base), form, explained=explained)
        return
    plan = make_plan(asked, base)
    train = ("python", "-m", "cputrain", "train", recipe, *settings) if recipe else ("CMD...",)
    job = Job(plan=plan, hosts=asked.hosts, command=train, plan_path=Path("plan.json"), log_dir=Path("logs"))
    tokens = intelmpi(job) if len(asked.hosts) > 1 else bound(job, python="python")
    if form != "text":
        click.echo(FORMS[form](plan) if form in FORMS else shlex.join(tokens))
        return
    click.echo(picture(plan, coloured=_coloured(), explained=explained))
    if training is not None:
        from cputrain.cli.derived import derivation

        click.echo("\n" + derivation(training, ppn=job.ppn, nodes=len(job.hosts)))
    if recipe is not None or len(asked.hosts) > 1:
        click.echo("\ncommand" + (" (hosts: one name a line)" if len(asked.hosts) > 1 else ", for each worker"))
        click.echo("  " + shlex.join(tokens))


def _cluster(kinds: tuple[str, ...], asked: Asked, base: Request) -> Cluster:
    if len(asked.hosts) > 1 or asked.machine != "this":
        raise InputError("--kind names hosts and machines: leave out --hosts, --nodes and --machine")
    pairs = [kind.partition("=") for kind in kinds]
    bad = next(
        (kind for kind, (_, equals, machine) in zip(kinds, pairs, strict=True) if not (equals and machine)), None
    )
    if bad is not None:
        raise InputError(f"--kind {bad!r} is not HOSTS=MACHINE, as in n[001-128]=skx-8160-2s")
    return plan_cluster([(expand(hosts), find_machine(spec)) for hosts, _, spec in pairs], request(asked, base))


def _show_cluster(cluster: Cluster, form: str, *, explained: bool) -> None:
    if form == "json":
        click.echo(dumps(cluster_to_dict(cluster)))
        return
    if form != "text":
        raise InputError(f"--format {form} shows one kind of host: ask for text or json, or plan each kind alone")
    for kind in cluster.kinds:
        click.echo(f"{len(kind.hosts):,} host(s) {fold(kind.hosts)}")
        click.echo(picture(kind.plan, coloured=_coloured(), explained=explained) + "\n")
    hosts = sum(len(kind.hosts) for kind in cluster.kinds)
    click.echo(f"{hosts:,} hosts, {cluster.world_size:,} workers")
    for warning in cluster.warnings:
        click.echo(f"warning: {warning}")


def _coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
