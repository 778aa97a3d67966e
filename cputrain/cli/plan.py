"""cputrain plan: Machine -> Plan, printed."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml

from affinity.errors import InputError
from affinity.filesystem import check_writable
from affinity.planner.plan import Request
from affinity.planner.plan_file import dumps, plan_to_json, read_plan
from affinity.planner.workload import RESNET50, USUAL_BATCH
from affinity.ranks.rank import MASTER_PORT
from affinity.views.diff import plan_differences
from affinity.views.svg import plan_to_svg
from affinity.views.text import plan_to_text
from cputrain.cli.options import Asked, cluster_of, planned_launcher, planning_options, tell_format, with_kinds
from cputrain.files import write_atomic
from mpi.fabric import Setting
from mpi.hosts.groups import Cluster, cluster_to_dict, job_plan_json
from mpi.hosts.nodelist import fold
from mpi.launchers.command import launch_command
from mpi.launchers.job import Job, bound_command
from mpi.launchers.script import HERE, launch_script, shell_line, workers_line


def _json(cluster: Cluster) -> str:
    return plan_to_json(cluster.groups[0].plan) if len(cluster.groups) == 1 else dumps(cluster_to_dict(cluster))


def _yaml(cluster: Cluster) -> str:
    return str(yaml.safe_dump(json.loads(_json(cluster)), sort_keys=False)).rstrip()


def _svg(cluster: Cluster) -> str:
    return plan_to_svg(cluster.groups[0].plan)


def _env(cluster: Cluster) -> str:
    """Shell assignments, one block a worker."""
    blocks = (
        f"# worker {worker.local_rank}\n" + "\n".join(f"export {k}={shlex.quote(v)}" for k, v in worker.env)
        for worker in cluster.groups[0].plan.workers
    )
    return "\n".join(blocks)


FORMS: dict[str, Callable[[Cluster], str]] = {"json": _json, "yaml": _yaml, "svg": _svg, "env": _env}


if TYPE_CHECKING:
    from cputrain.recipe.schema import Recipe


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
@click.option("--curve", "drawn", is_flag=True, help="also RECIPE's learning rate as a curve")
@click.option(
    "--diff", nargs=2, type=click.Path(path_type=Path), metavar="A.json B.json", help="only what B changes against A"
)
@click.option("--write", type=click.Path(path_type=Path), metavar="DIR", help="write plan, hostfile, launch.sh")
@click.option("--kind", "kinds", multiple=True, metavar="HOSTS=MACHINE", help="a kind of host, once for each")
@planning_options
def command(
    asked: Asked,
    recipe: str | None,
    settings: tuple[str, ...],
    form: str,
    explained: bool,
    drawn: bool,
    diff: tuple[Path, Path] | None,
    write: Path | None,
    kinds: tuple[str, ...],
) -> None:
    """Decide and explain who runs where, for this machine or any other.

    With RECIPE (a file or a shipped name) also derive its batch, steps and learning rate, and the command line.
    Hosts of several kinds get a plan for each: --kind 'n[001-128]=skx-8160-2s' --kind 'k[01-16]=knl-7250-snc4-flat'.
    """
    if diff is not None:
        click.echo("\n".join(plan_differences(*map(read_plan, diff))) or "the same plan")
        return
    if drawn and (recipe is None or form != "text"):
        raise InputError("--curve draws a recipe's learning rate as text: name a RECIPE, and no --format")
    base, training = Request(local_batch=USUAL_BATCH, workload=RESNET50), None
    if recipe is not None:
        from cputrain.launch.planning import request_of  # pydantic: only where there is a recipe
        from cputrain.recipe.loading import load_recipe

        if asked.local_batch is not None:
            raise InputError(f"--local-batch beside a recipe: set batch.local={asked.local_batch} in the recipe")
        training = load_recipe(recipe, settings)
        base = request_of(training)
        asked = replace(asked, share=asked.share or training.plan.share)
    asked = with_kinds(asked, kinds)
    cluster = cluster_of(asked, base)
    job = Job(
        groups=cluster.groups,
        command=_train(asked, recipe, settings, training) if recipe else ("CMD...",),
        plan_path=Path("plan.json"),
        log_dir=Path("logs"),
        binder=asked.bind,
        variables=tuple((name, value) for name, value, _ in _settings(asked)),
    )
    if write is not None:
        check_writable(write, "--write")
        _write(job, asked, write, training)
    elif form == "command":
        command, hint = _command(job, asked)
        click.echo(command)
        if hint:
            click.echo(hint, err=True)
    elif form in FORMS and (form == "json" or len(cluster.groups) == 1):
        click.echo(FORMS[form](cluster))
    elif form != "text":
        raise InputError(f"--format {form} shows one kind of host: ask for text, json or command, or plan each alone")
    else:
        started = _command(job, asked) if recipe is not None or len(job.hosts) > 1 else None
        _show(cluster, job, asked, explained=explained)
        if training is not None and len(cluster.groups) == 1:  # its rules count equal hosts
            from cputrain.cli.derived import derivation

            click.echo("\n" + derivation(training, ppn=job.ppn, nodes=len(job.hosts), drawn=drawn))
        if started is not None:
            command, hint = started
            click.echo("\n".join(("\ncommand", f"  {command}", *([f"  {hint}"] if hint else []))))


def _settings(asked: Asked) -> tuple[Setting, ...]:
    """What the fabric wants set, where there is one."""
    return asked.network.settings if len(asked.hosts) > 1 else ()


def _train(asked: Asked, name: str, settings: tuple[str, ...], recipe: "Recipe | None") -> tuple[str, ...]:
    """The trainer's command; for this machine one that finds the recipe and its data from any folder."""
    command = (sys.executable, "-m", "cputrain", "train")
    if recipe is None or asked.machine != "this":
        return (*command, name, *settings)
    from cputrain.recipe.loading import input_settings

    paths = input_settings(recipe)
    replaced = {setting.partition("=")[0] for setting in paths}
    kept = (setting for setting in settings if setting.partition("=")[0] not in replaced)
    return (*command, str(Path(name).absolute()) if Path(name).is_file() else name, *kept, *paths)


def _command(job: Job, asked: Asked) -> tuple[str, str]:
    """What starts the job, for a shell in any folder; and what it lacks, where it needs files of `plan --write`."""
    if job.hosts == ("localhost",) and asked.launcher in ("auto", "local"):
        if job.binder == "launcher":
            raise InputError("--bind launcher needs a launcher: name one with --launcher")
        if asked.machine == "this":
            return workers_line(replace(job, plan_on_host=True), MASTER_PORT), ""
        return workers_line(job, MASTER_PORT), "plan.json is what --format json prints"
    launcher = planned_launcher(asked.launcher, asked.machine)
    real = asked.machine == "this" and (asked.named or job.hosts == ("localhost",))
    if real and len(job.groups) == 1 and not (job.binder == "launcher" and launcher.launcher.binds_by_file):
        alone = replace(job, plan_on_host=True)
        return shell_line(launch_command(alone, launcher, bound_command(alone), None)), ""
    made = launch_command(job, launcher, bound_command(job), Path())
    hint = f"--write DIR writes plan.json{', hosts' if made.files else ''} and a launch.sh that starts this"
    return shell_line(made), hint


def _write(job: Job, asked: Asked, folder: Path, recipe: "Recipe | None") -> None:
    """plan.json, plan.svg, hostfile, rankfile where there is one, the recipe, and launch.sh, which starts it all.

    Without a recipe launch.sh takes the command to start as its arguments.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--write {folder} is there already: name another folder")
    if asked.launcher == "local":
        raise InputError("--write makes files for a launcher: name it with --launcher")
    files = {"plan.json": job_plan_json(job.groups)}
    command: tuple[str, ...] = ()
    if recipe is not None:
        from cputrain.recipe.loading import dump_recipe, with_absolute_paths

        files["recipe.yaml"] = dump_recipe(with_absolute_paths(recipe))
        command = (sys.executable, "-m", "cputrain", "train", str(HERE / "recipe.yaml"))
    job = replace(job, command=command, plan_path=HERE / "plan.json")
    launcher = planned_launcher(asked.launcher, asked.machine)
    tell_format(asked, launcher)
    made = launch_command(job, launcher, bound_command(job), HERE)
    about = f"{job.world_size:,} ranks on {len(job.hosts):,} host(s), as plan.json has them; written by cputrain plan"
    files |= {path.name: text for path, text in made.files}
    files["launch.sh"] = launch_script(made, about, open_end=recipe is None)
    for i, group in enumerate(job.groups):
        files["plan.svg" if len(job.groups) == 1 else f"plan-{i}.svg"] = plan_to_svg(group.plan)
    for name, text in files.items():
        write_atomic(folder / name, text.encode())
    (folder / "launch.sh").chmod(0o755)
    what = "" if recipe else " CMD..."
    click.echo(f"{folder}: {', '.join(sorted(files))}; start with {folder}/launch.sh{what}")


def _show(cluster: Cluster, job: Job, asked: Asked, *, explained: bool) -> None:
    for group in cluster.groups:
        if len(cluster.groups) > 1:
            click.echo(f"{len(group.hosts):,} host(s) {fold(group.hosts)}")
        click.echo(plan_to_text(group.plan, colored=_coloured(), explained=explained))
        if len(cluster.groups) > 1:
            click.echo()
    if len(cluster.groups) > 1:
        click.echo(f"{len(job.hosts):,} hosts, {job.world_size:,} workers")
    for warning in cluster.warnings:
        click.echo(f"warning: {warning}")
    settings = _settings(asked)
    if settings:
        click.echo(f"\nfabric {asked.network.name}")
        width = max(len(f"{name}={value}") for name, value, _ in settings)
        for name, value, why in settings:
            click.echo(f"  {f'{name}={value}':<{width}}  {why}")


def _coloured() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
