"""`cputrain job`: Slurm and PBS scripts, and Kubernetes manifests."""

import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import yaml

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import Request, plan_machine
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.wording import join_or
from cputrain.cli.options import PLANNING, SectionedCommand, hidden_options, planning_options, settings_argument
from cputrain.cli.output import number_option, parse_clock, print_file, print_json
from cputrain.cli.words import (
    FullSummaryGroup,
    complete_recipe,
    complete_recipe_or_setting,
    complete_setting,
    refuse_options_as_keys,
)
from cputrain.data.settings import DataSettings
from cputrain.files import recipe_names
from cputrain.jobs.kubernetes import (
    KINDS,
    MAX_CPUS,
    MAX_PODS,
    MPI,
    RECIPE_FILE,
    RECIPE_FOLDER,
    PodJob,
    label_of,
    manifests,
)
from cputrain.jobs.script import (
    RUNTIMES,
    SCHEDULERS,
    BatchJob,
    Command,
    Container,
    Resources,
    SizedWork,
    Training,
    command_work,
    in_job,
    job_script,
    link_words,
    parse_array,
    planning_words,
    preparation_work,
    tasks_and_cpus,
)
from cputrain.jobs.script import submit as submit_job
from cputrain.launch.command import is_python
from cputrain.launch.local import check_local_batch
from cputrain.launch.options import THIS_MACHINE, PlanningOptions, request_of_options
from cputrain.mpi.launchers import LAUNCHERS, launchers_for
from cputrain.mpi.supervise.wire import new_token
from cputrain.other_launchers.parsing import binder_in
from cputrain.predict.next_best import compare_plan
from cputrain.recipe.derivation import derive
from cputrain.recipe.loading import Dumper, dump_recipe, load_recipe
from cputrain.recipe.request import request_of

ONLY = {
    "partition": ("slurm", "PBS has queues: give --queue"),
    "qos": ("slurm", "give PBS the line with --directive"),
    "constraint": ("slurm", "give PBS the line with --directive"),
    "queue": ("pbs", "Slurm has partitions: give --partition"),
    "ncpus": ("pbs", "Slurm gives a job all CPUs of its hosts: remove it"),
}
TITLES = {"slurm": "Slurm", "pbs": "PBS"}
RESOURCES = (
    *("time", "partition", "queue", "account", "qos", "constraint"),
    *("mail", "output", "error", "directives"),
)
MAX_CHAIN = 1000
COMMAND = "command"  # click.Context.meta key of the words after --


SECTIONS = {
    "What to run": ("prepare", "array", "stage", "chain", "submit", "output_format"),
    "The scheduler": (
        *("name", "time", "partition", "queue", "account", "qos", "constraint", "ncpus"),
        *("mail", "output", "error", "directives", "requeue"),
    ),
    "Software on the hosts": (
        *("module_purge", "modules", "venv"),
        *("container", "container_runtime", "container_args"),
    ),
    **PLANNING,
}
EXAMPLES = (
    "cputrain job slurm RECIPE --nodes 16 --time 02:00:00",
    "cputrain job slurm RECIPE --nodes 4 --time 01:00:00 --chain 8 --submit",
    "cputrain job pbs RECIPE --nodes 2 --time 12:00:00 --queue workq --machine skx-8160-2s",
    "cputrain job pbs --nodes 4 --ncpus 40 --time 01:00:00 -- python train.py --epochs 3",
    "cputrain job slurm --prepare imagenet SRC OUT --short-side 256 --time 08:00:00",
    "cputrain job slurm --nodes 2 --time 01:00:00 -- python train.py --epochs 3",
)

SCRIPT_HELP = """Print the script of a {title} job that trains RECIPE, prepares images or runs CMD on --nodes hosts.

Workers, cores and network are planned on the job's first host when it runs. --machine requests that machine's tasks
and CPUs from the scheduler. A recipe continues from the last checkpoint of an earlier job; each rank of a CMD is
bound according to the plan, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_* set.
"""

KUBERNETES_SECTIONS = {
    "What to run": ("kind", "restarts", "time", "name", "namespace"),
    "The pods": ("image", "cpus", "memory", "volumes"),
    **PLANNING,
}
KUBERNETES_EXAMPLES = (
    "cputrain job kubernetes RECIPE --image IMAGE --nodes 4 --cpus 48 --memory 180Gi --volume CLAIM:/work",
    "cputrain job kubernetes --image IMAGE --nodes 2 --cpus 32 --memory 64Gi -- python train.py",
)


class WithCommand(SectionedCommand):
    """A command whose words after -- belong to another program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            split = args.index("--")
            args, ctx.meta[COMMAND] = args[:split], tuple(args[split + 1 :])
        return super().parse_args(ctx, args)


class FormatOfJob(click.Choice[str]):
    """text or json; with --prepare, which has its own --format, any value."""

    def __init__(self) -> None:
        super().__init__(["text", "json"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if ctx is not None and ctx.params.get("prepare") else super().convert(value, param, ctx)


SCRIPT_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument(
        "words",
        shell_complete=complete_recipe_or_setting,
        nargs=-1,
        type=click.UNPROCESSED,
        callback=refuse_options_as_keys,
        metavar="[RECIPE [KEY=VALUE]... | -- CMD...]",
    ),
    click.option(
        "--prepare",
        nargs=3,
        is_eager=True,  # before --format
        metavar="KIND SRC OUT",
        help="run cputrain prepare; its options may follow these three arguments",
    ),
    click.option("--name", metavar="NAME", help="name the job  [default: the recipe's or command's name]"),
    click.option("--time", required=True, metavar="HH:MM:SS", help="set the job's time limit"),
    click.option("--partition", metavar="NAME", help="submit to this partition"),
    click.option("--queue", metavar="NAME", help="submit to this queue"),
    click.option("--account", metavar="NAME", help="charge this account"),
    click.option("--qos", metavar="NAME", help="request this quality of service"),
    click.option("--constraint", metavar="FEATURES", help="require these features of the hosts"),
    number_option("--ncpus", most=1 << 16, help="request N CPUs per host (see pbsnodes -a) if --machine is not given"),
    click.option("--mail", metavar="ADDRESS", help="send mail to this address when the job ends or fails"),
    click.option(
        "--output",
        metavar="FILE",
        help="write the job's output to FILE; may contain the scheduler's patterns, as in %j",
    ),
    click.option("--error", metavar="FILE", help="write the job's errors to FILE  [default: same as --output]"),
    click.option(
        "--directive", "directives", multiple=True, metavar="LINE", help="add this #SBATCH or #PBS line; repeatable"
    ),
    click.option(
        "--requeue/--no-requeue",
        default=None,
        help="continue in a new job at the time limit  [default: except for a CMD]",
    ),
    click.option("--module-purge", is_flag=True, help="unload all modules first"),
    click.option("--module", "modules", multiple=True, metavar="NAME", help="load this module first; repeatable"),
    click.option("--venv", metavar="DIR", help="activate this virtual environment on the hosts"),
    click.option("--container", metavar="IMAGE", help="run each rank in this container image, which contains cputrain"),
    click.option(
        "--container-runtime",
        type=click.Choice(["auto", *RUNTIMES]),
        help="start the container with this program; auto: the first one on the host's PATH",
    ),
    click.option(
        "--container-arg",
        "container_args",
        multiple=True,
        metavar="ARG",
        help="add this option of the container runtime; repeatable",
    ),
    click.option("--stage", metavar="DIR", help="first copy the recipe's data to this folder on each host"),
    click.option(
        "--array",
        shell_complete=complete_setting,
        metavar="KEY=A,B,C",
        help="submit a job array: one job of the recipe for each value",
    ),
    click.option(
        "--chain",
        type=click.IntRange(1, MAX_CHAIN),
        default=1,
        metavar="N",
        help="submit N jobs, each continuing the one before; needs --submit",
    ),
    click.option("--submit", is_flag=True, help="submit the script as well as printing it"),
    click.option(
        "--format",
        "output_format",
        type=FormatOfJob(),
        default="text",
        metavar="[text|json]",
        help="choose the output; json: one object on stdout, everything else on stderr; other formats go to --prepare",
    ),
    planning_options,
)


@click.group("job", cls=FullSummaryGroup)
def job_command() -> None:
    """Write a job's script for Slurm or PBS, or its manifests for Kubernetes.

    A job trains a recipe, prepares images or runs any command on several hosts.
    """


def _script_command(scheduler: str) -> click.Command:
    """Return the command that prints a scheduler's script."""

    def printed(**given: Any) -> None:
        print_script(scheduler, **given)

    for decorate in reversed(SCRIPT_OPTIONS):
        printed = decorate(printed)
    others = [option for option, (only, _) in ONLY.items() if only != scheduler]
    return click.command(
        scheduler,
        cls=WithCommand,
        sections=SECTIONS,
        examples=[line for line in EXAMPLES if f" {scheduler} " in line],
        context_settings={"ignore_unknown_options": True},
        help=SCRIPT_HELP.format(title=TITLES[scheduler]),
    )(hidden_options("hosts", "hostfile", "share", "oversubscribe", "bind", *others)(printed))


for each in SCHEDULERS:
    job_command.add_command(_script_command(each))


def print_script(
    scheduler: str,
    options: PlanningOptions,
    words: tuple[str, ...],
    prepare: tuple[str, str, str] | None,
    name: str | None,
    array: str | None,
    stage: str | None,
    requeue: bool | None,
    ncpus: int | None,
    container: str | None,
    container_runtime: str | None,
    container_args: tuple[str, ...],
    chain: int,
    submit: bool,
    output_format: str,
    **given: Any,
) -> None:
    """Print a scheduler's job script, and submit it if `submit` is set."""
    _check(options, scheduler, {"ncpus": ncpus, **given})
    if chain > 1 and not submit:
        raise InputError(
            f"--chain {chain} needs --submit, which submits the job {chain} times: add it, or remove --chain"
        )
    if output_format not in ("text", "json"):
        words, output_format = (*words, "--format", output_format), "text"
    sized = _work(options, words, prepare, array, stage)
    job = BatchJob(
        resources=Resources(
            name=name or sized.name,
            nodes=len(options.hosts),
            ppn=sized.ppn,
            cpus=ncpus or sized.cpus,
            requeue=not isinstance(sized.work, Command) if requeue is None else requeue,
            tasks=0 if array is None else len(parse_array(array)[1]),
            **{key: given[key] for key in RESOURCES},
        ),
        work=sized.work,
        launcher=_launcher(options, scheduler, sized.ppn),
        fabric=options.fabric,
        machine=None if options.machine == "this" else options.machine,
        modules=given["modules"],
        module_purge=given["module_purge"],
        venv=given["venv"],
        container=_container(container, container_runtime, container_args, given["venv"]),
    )
    script = job_script(job, scheduler)
    if output_format == "text":
        print_file(script)
    _note_missing_folders((given["output"], given["error"]), scheduler)
    if sized.note:
        click.echo(f"note: {sized.note}", err=True)
    submitted = []
    for job_id in submit_job(script, scheduler, chain) if submit else ():
        click.echo(f"submitted {job_id}", err=True)
        submitted.append(job_id)
    if output_format == "json":
        print_json({"scheduler": scheduler, "name": job.resources.name, "script": script, "submitted": submitted})


def _note_missing_folders(files: tuple[str | None, ...], scheduler: str) -> None:
    """Print a note for each missing folder of the job's output; PBS names a file as [HOST:]FILE."""
    for file in filter(None, files):
        folder = Path(file.rpartition(":")[2] if scheduler == "pbs" else file).parent
        if not folder.is_dir():
            click.echo(
                f"note: the scheduler does not create folders: run mkdir -p {folder} before the job starts", err=True
            )


def _check(options: PlanningOptions, scheduler: str, given: dict[str, Any]) -> None:
    """Raise InputError for options that this scheduler, or any job script, does not support."""
    for option, (only, instead) in ONLY.items():
        if given[option] is not None and only != scheduler:
            raise InputError(f"--{option} is not for {scheduler}: {instead}")
    if options.real_hosts:
        raise InputError(
            "--hosts and --hostfile do not apply to a job, whose hosts the scheduler chooses: give --nodes N"
        )
    if options.given["share"]:
        raise InputError("--share does not apply to a job, which has its hosts to itself: remove it")
    if options.given["oversubscribe"]:
        raise InputError("--oversubscribe is for trying plans on one host: remove it for a job")
    if options.bind == "launcher":
        raise InputError("--bind launcher does not apply to a job, in which each rank binds itself: remove it")
    usable = [launcher.name for launcher in launchers_for(scheduler)]
    if options.launcher not in ("auto", *usable):
        raise InputError(
            f"--launcher {options.launcher} cannot start {scheduler} jobs: remove it, or give {join_or(usable)}"
        )


def _work(
    options: PlanningOptions,
    words: tuple[str, ...],
    prepare: tuple[str, str, str] | None,
    array: str | None,
    stage: str | None,
) -> SizedWork:
    """Return what the job runs. Raises InputError unless it is exactly one thing."""
    context = click.get_current_context()
    cmd: tuple[str, ...] = context.meta.get(COMMAND, ())
    if (array or stage) and (prepare or cmd):
        raise InputError(f"--{'array' if array else 'stage'} is for a recipe's job: remove it")
    if prepare:
        from cputrain.cli.data import prepare_command as prepare_command  # image libraries, only needed here

        work = preparation_work(options, (*prepare, *words, *cmd))
        prepare_command.make_context("cputrain job --prepare", [*prepare, *words, *cmd])  # raises for wrong arguments
        return work
    if unknown := [word for word in words if word.startswith("-")]:
        raise click.NoSuchOption(unknown[0].partition("=")[0], ctx=context)
    if words and not cmd and _is_program(words[0]):
        raise InputError(f"{words[0][:60]} is a program, not a recipe: put -- before it: -- {shlex.join(words)[:100]}")
    if bool(words) == bool(cmd):
        raise InputError("a job runs one thing: name a RECIPE, or give --prepare KIND SRC OUT, or -- CMD...")
    env = os.environ
    if not cmd:
        return _recipe_work(options, words, array, stage, env)
    return replace(command_work(options, cmd, env), note=binder_in(cmd))


def _recipe_work(
    options: PlanningOptions, words: tuple[str, ...], array: str | None, stage: str | None, env: Mapping[str, str]
) -> SizedWork:
    """Return the training of the recipe words[0] with the settings words[1:]. Raises InputError if the recipe knows its
    number of images and these do not suffice for a step of the workers."""
    check_local_batch(options.given["local_batch"])
    recipe = load_recipe(words[0], words[1:])
    if recipe.plan.share or recipe.plan.oversubscribe:
        raise InputError(
            "plan.share and plan.oversubscribe are for hosts shared with other programs: remove them for a job"
        )
    listed = None if array is None else parse_array(array)
    if stage is not None and (recipe.data.path is None or recipe.data.generated):
        raise InputError(
            "--stage copies the recipe's data.path, which is not a folder: set it to a folder, or remove --stage"
        )
    ppn, cpus = tasks_and_cpus(options, request_of(recipe), env)
    images = recipe.data.train_images or recipe.data.images_per_epoch
    if images and ppn is not None and listed is None:
        derive(recipe, ppn=ppn, nodes=len(options.hosts), images=images)  # fail now, not after a wait in the queue
    fixed_ppn = ppn if options.machine != THIS_MACHINE else options.given["ppn"]
    work = Training(
        recipe=dump_recipe(recipe.model_copy(update={"output": ""})),
        settings=options.recipe_settings,
        output=str(recipe.folder),
        plan_options=(
            *("--nodes", str(len(options.hosts)), "--fabric", options.fabric),
            *(("--ppn", str(fixed_ppn)) if fixed_ppn is not None else ()),
            *link_words(options),
        ),
        data=None if recipe.data.generated else recipe.data.path,
        stage=stage,
        array=listed,
        paths=tuple(path for path in (recipe.data.stage_dir, recipe.model.weights) if path is not None),
    )
    return SizedWork(
        work=work,
        name=recipe.name,
        ppn=ppn,
        cpus=cpus,
        note=_missing_data(recipe.name, recipe.data, "" if listed is None else listed[0]),
    )


def _missing_data(name: str, data: DataSettings, listed: str = "") -> str:
    """Return a note if the recipe of this name has no data, or has it in a folder that is not here, with what to do; ""
    if neither, or if the job array lists this key."""
    path = data.path
    if listed == "data.path" or data.generated:
        return ""
    if path is None:
        return f"recipe {name} has no data.path: add data.path=DIR, a folder that the job's hosts have"
    if Path(path).exists():
        return ""
    prepare = data.prepare and f"prepare it with `{data.prepare.format(path=path)}`, or "
    return (
        f"data.path={path} does not exist here: {prepare or ''}set data.path=DIR to a folder that the job's hosts have"
    )


def _is_program(word: str) -> bool:
    """Whether a word given as a recipe is a script, Python, or a program on PATH."""
    if word.endswith((".py", ".sh")) or is_python(word):
        return True
    return word not in recipe_names() and not Path(word).exists() and shutil.which(word) is not None


def _launcher(options: PlanningOptions, scheduler: str, ppn: int | None) -> str:
    """Return the launcher of the job's ranks by name."""
    launcher = launchers_for(scheduler)[0] if options.launcher == "auto" else LAUNCHERS[options.launcher]
    if launcher.slots_of_scheduler and ppn is None:
        raise InputError(
            f"{launcher.title} takes the number of ranks per host from the scheduler: give --ppn N, or --machine NAME"
        )
    return launcher.name


def _container(
    image: str | None, runtime: str | None, arguments: tuple[str, ...], venv: str | None
) -> Container | None:
    if image is None:
        if runtime is not None or arguments:
            raise InputError("--container-runtime and --container-arg need an image: name it with --container")
        return None
    if venv is not None:
        raise InputError("--venv does not apply to --container, whose image has its own Python: remove --venv")
    return Container(image=image, runtime=runtime or "auto", arguments=arguments)


class ManifestDumper(Dumper):
    """YAML dumper that writes multi-line strings as literal blocks (|) and no aliases."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


ManifestDumper.add_representer(str, _text)


@job_command.command("kubernetes", cls=WithCommand, sections=KUBERNETES_SECTIONS, examples=KUBERNETES_EXAMPLES)
@click.argument("recipe", shell_complete=complete_recipe, required=False, metavar="[RECIPE | -- CMD...]")
@settings_argument
@click.option(
    "--kind", type=click.Choice(KINDS), default="job", show_default=True, help="choose the controller of the pods"
)
@click.option(
    "--image", required=True, metavar="IMAGE", help="run this container image, which contains python and cputrain"
)
@number_option("--cpus", most=MAX_CPUS, required=True, help="request N whole CPUs for each pod")
@click.option("--memory", required=True, metavar="SIZE", help="request this much memory for each pod, such as 64Gi")
@click.option(
    "--volume",
    "volumes",
    multiple=True,
    metavar="CLAIM:PATH",
    help="mount this claim; the first is the working directory",
)
@click.option("--name", metavar="NAME", help="name the job  [default: the recipe's or command's name]")
@click.option("--namespace", metavar="NAME", help="create the job in this namespace")
@click.option("--time", metavar="HH:MM:SS", help="set the job's time limit")
@number_option("--restarts", least=0, most=1000, default=3, help="restart after a failure, at most N times")
@hidden_options("hosts", "hostfile", "machine", "share", "oversubscribe", "cores", "bind")
@planning_options
def kubernetes_command(
    options: PlanningOptions,
    recipe: str | None,
    settings: tuple[str, ...],
    kind: str,
    cpus: int,
    volumes: tuple[str, ...],
    name: str | None,
    time: str | None,
    **given: Any,
) -> None:
    """Print the manifests of a job that trains RECIPE or runs CMD in --nodes pods, as input for kubectl apply -f -.

    \b
    cputrain job kubernetes resnet50-8k data.path=/data/shards --nodes 4 --cpus 32 --memory 96Gi \\
        --image registry/cputrain:1 --volume runs:/runs --volume imagenet:/data | kubectl apply -f -

    With the kubelet's static CPU manager each pod gets exclusive whole CPUs and plans them itself. A training continues
    from its last checkpoint when its pods restart.
    """
    cmd: tuple[str, ...] = click.get_current_context().meta.get(COMMAND, ())
    if (recipe is None) == (not cmd):
        raise InputError("a job runs one thing: name a RECIPE, or give -- CMD...")
    _check_kubernetes(options)
    if recipe is not None:
        check_local_batch(options.given["local_batch"])
    _check_launcher(options, kind)
    training = None if recipe is None else load_recipe(recipe, (*settings, *options.recipe_settings))
    job = PodJob(
        name=label_of(training.name if training else cmd[0].rpartition("/")[2].removesuffix(".py"))
        if name is None
        else name,
        kind=kind,
        pods=len(options.hosts),
        cpus=cpus,
        ppn=_workers(options, Request() if training is None else request_of(training), cpus),
        launch=planning_words(options, training.plan.model_dump(), training.batch.local)
        if training
        else planning_words(options, {}),
        command=("cputrain", "train", f"{RECIPE_FOLDER}/{RECIPE_FILE}", f"output={training.folder}")
        if training
        else in_job(cmd),
        recipe=dump_recipe(training) if training else None,
        output=str(training.folder) if training else None,
        volumes=tuple((claim, path) for claim, _, path in (text.partition(":") for text in volumes)),
        limit_s=None if time is None else parse_clock(time),
        mpi="openmpi" if options.launcher == "auto" else options.launcher,
        token=new_token(),
        **given,
    )
    click.echo(yaml.dump_all(manifests(job), Dumper=ManifestDumper, sort_keys=False, width=120), nl=False)
    # A path in a volume cannot be looked for here.
    note = (
        binder_in(cmd)
        if training is None
        else _missing_data(training.name, training.data)
        if training.data.path is None
        else ""
    )
    if note:
        click.echo(f"note: {note}", err=True)


def _check_kubernetes(options: PlanningOptions) -> None:
    """Raise InputError for options and combinations that a job in pods does not support."""
    if options.real_hosts or options.machine != "this" or options.given["share"] or options.given["oversubscribe"]:
        raise InputError(
            "Kubernetes chooses the hosts, and --cpus sets the CPUs of a pod: remove --hosts, --hostfile, "
            "--machine, --share and --oversubscribe"
        )
    if options.given["cores"] is not None:
        raise InputError(
            "--cores does not apply to pods, whose CPUs the kubelet chooses: give their number with --cpus"
        )
    if options.bind == "launcher":
        raise InputError("--bind launcher does not apply to pods, in which each rank binds itself: remove it")
    if len(options.hosts) > MAX_PODS:
        raise InputError(f"--nodes {len(options.hosts)} is more than {MAX_PODS:,} pods: correct it")


def _check_launcher(options: PlanningOptions, kind: str) -> None:
    """Raise InputError for a launcher that cannot start the ranks of this kind of job."""
    if options.launcher == "auto":
        return
    if kind != "mpijob":
        raise InputError(f"--launcher {options.launcher} needs an MPIJob: remove it, or add --kind mpijob")
    if options.launcher not in MPI:
        raise InputError(f"--launcher {options.launcher} cannot start an MPIJob: give {join_or(tuple(MPI))}")


def _workers(options: PlanningOptions, base: Request, cpus: int) -> int:
    """Return the workers per pod, as requested or as planned for a machine of `cpus` cores; equal in all pods."""
    request = request_of_options(options, base)
    if request.ppn is not None and request.ppn > cpus:
        raise InputError(f"--ppn {request.ppn} needs {request.ppn} CPUs, but a pod has --cpus {cpus}: lower --ppn")
    machine = find_machine(f"pack:1 core:{cpus} pu:1")
    return request.ppn or len(plan_machine(machine, request, compare=compare_plan).workers)
