"""cputrain job kubernetes: a training or any command in pods, as manifests."""

import re

import click
import yaml

from affinity.errors import InputError
from affinity.planner.plan import Request, plan_machine
from affinity.topology.catalog import find_machine
from affinity.wording import either
from cputrain.cli.job import COMMAND, WithCommand
from cputrain.cli.options import hidden_options, planning_options, settings_argument
from cputrain.cli.sections import PLANNING
from cputrain.jobs.kubernetes import (
    KINDS,
    MOST_CPUS,
    MOST_PODS,
    MPI,
    RECIPE_FILE,
    RECIPE_FOLDER,
    PodJob,
    label_of,
    manifests,
)
from cputrain.jobs.work import in_job, planning_words
from cputrain.launch.options import PlanningOptions, request_of_options
from cputrain.launch.recipe_request import check_local_batch, request_of
from cputrain.recipe.loading import dump_recipe, load_recipe
from cputrain.recipe.schema import Recipe
from mpi.supervise.connection import new_token

TIME = re.compile("([0-9]{1,4}):([0-9]{2}):([0-9]{2})")


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, after a |, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """Write a value out wherever it occurs."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


SECTIONS = {
    "What to run": ("kind", "restarts", "time", "name", "namespace"),
    "The pods": ("image", "cpus", "memory", "volumes"),
    **PLANNING,
}
EXAMPLES = (
    "cputrain job kubernetes RECIPE --image IMAGE --nodes 4 --cpus 48 --memory 180Gi --volume CLAIM:/work",
    "cputrain job kubernetes --image IMAGE --nodes 2 --cpus 32 --memory 64Gi -- python train.py",
)


@click.command("job kubernetes", cls=WithCommand, sections=SECTIONS, examples=EXAMPLES)
@click.argument("recipe", required=False, metavar="[RECIPE | -- CMD...]")
@settings_argument
@click.option("--kind", type=click.Choice(KINDS), default="job", show_default=True, help="what controls the pods")
@click.option("--image", required=True, metavar="IMAGE", help="container image with python and cputrain")
@click.option(
    "--cpus",
    required=True,
    type=click.IntRange(1, MOST_CPUS),
    metavar="N",
    help="whole CPUs of each pod",
)
@click.option("--memory", required=True, metavar="SIZE", help="memory of each pod, as in 64Gi")
@click.option(
    "--volume", "volumes", multiple=True, metavar="CLAIM:PATH", help="claim to mount; the first is the working folder"
)
@click.option("--name", metavar="NAME", help="name of the job  [default: that of the recipe or command]")
@click.option("--namespace", metavar="NAME", help="namespace of the job")
@click.option("--time", metavar="HH:MM:SS", help="time limit of the job")
@click.option(
    "--restarts",
    type=click.IntRange(0, 1000),
    default=3,
    show_default=True,
    metavar="N",
    help="start again after a failure, N times at most",
)
@hidden_options("hosts", "hostfile", "machine", "share", "oversubscribe", "cores", "bind")
@planning_options
def command(
    options: PlanningOptions,
    recipe: str | None,
    settings: tuple[str, ...],
    kind: str,
    image: str,
    cpus: int,
    memory: str,
    volumes: tuple[str, ...],
    name: str | None,
    namespace: str | None,
    time: str | None,
    restarts: int,
) -> None:
    """Print the manifests of a job in --nodes pods that trains RECIPE or runs CMD; kubectl apply -f - takes them.

    \b
    cputrain job kubernetes resnet50-8k data.path=/data/shards --nodes 4 --cpus 32 --memory 96Gi \\
        --image registry/cputrain:1 --volume runs:/runs --volume imagenet:/data | kubectl apply -f -

    Each pod gets whole CPUs of its own where the kubelet's CPU manager is static, and plans them itself. A training
    continues from its last checkpoint when its pods start again.
    """
    cmd: tuple[str, ...] = click.get_current_context().meta.get(COMMAND, ())
    _check(options, recipe, cmd)
    _check_launcher(options, kind)
    training = None if recipe is None else load_recipe(recipe, (*settings, *options.recipe_settings))
    job = PodJob(
        name=label_of(training.name if training else cmd[0].rpartition("/")[2].removesuffix(".py"))
        if name is None
        else name,
        kind=kind,
        image=image,
        pods=len(options.hosts),
        cpus=cpus,
        memory=memory,
        ppn=_workers(options, training, cpus),
        launch=planning_words(options, training),
        command=_train(training) if training else in_job(cmd),
        recipe=dump_recipe(training) if training else None,
        output=str(training.folder) if training else None,
        volumes=tuple((claim, path) for claim, _, path in (text.partition(":") for text in volumes)),
        restarts=restarts,
        namespace=namespace,
        limit_s=None if time is None else _seconds(time),
        mpi="openmpi" if options.launcher == "auto" else options.launcher,
        token=new_token(),
    )
    click.echo(yaml.dump_all(manifests(job), Dumper=Dumper, sort_keys=False, width=120), nl=False)


def _check(options: PlanningOptions, recipe: str | None, cmd: tuple[str, ...]) -> None:
    """Raise InputError for what a job in pods cannot follow."""
    if (recipe is None) == (not cmd):
        raise InputError("a job runs one thing: name a RECIPE, or give -- CMD...")
    if options.real_hosts or options.machine != "this" or options.share or options.oversubscribe:
        raise InputError(
            "pods have the CPUs that --cpus says, on hosts that Kubernetes chooses: remove --hosts, --hostfile, "
            "--machine, --share and --oversubscribe"
        )
    if options.cores is not None:
        raise InputError("--cores: the kubelet chooses a pod's CPUs: give their number with --cpus")
    if options.bind == "launcher":
        raise InputError("--bind launcher: in a pod each rank binds itself, by the plan that is made there: remove it")
    if recipe is not None:
        check_local_batch(options.local_batch)
    if len(options.hosts) > MOST_PODS:
        raise InputError(f"--nodes {len(options.hosts)} is more than {MOST_PODS:,} pods: correct it")


def _check_launcher(options: PlanningOptions, kind: str) -> None:
    """Raise InputError for a launcher that does not start the ranks of such pods."""
    if options.launcher == "auto":
        return
    if kind != "mpijob":
        raise InputError(
            f"--launcher {options.launcher}: only an MPIJob has a launcher: remove it, or add --kind mpijob"
        )
    if options.launcher not in MPI:
        raise InputError(f"--launcher {options.launcher} cannot start an MPIJob: give {either(tuple(MPI))}")


def _workers(options: PlanningOptions, training: Recipe | None, cpus: int) -> int:
    """Workers per pod: as requested, or as planned on a machine of so many cores. All pods need the same."""
    base = Request() if training is None else request_of(training)
    request = request_of_options(options, base)
    if request.ppn is not None and request.ppn > cpus:
        raise InputError(f"--ppn {request.ppn} needs {request.ppn} CPUs: a pod has --cpus {cpus}")
    return request.ppn or len(plan_machine(find_machine(f"pack:1 core:{cpus} pu:1"), request).workers)


def _train(training: Recipe) -> tuple[str, ...]:
    file = f"{RECIPE_FOLDER}/{RECIPE_FILE}"
    return ("cputrain", "train", file, f"output={training.folder}")


def _seconds(text: str) -> int:
    match = TIME.fullmatch(text)
    if match is None:
        raise InputError(f"--time {text[:60]!r} is not a time limit: give HH:MM:SS")
    hours, minutes, seconds = map(int, match.groups())
    return 3600 * hours + 60 * minutes + seconds
