"""cputrain job: a training, an image preparation or any command as a script for Slurm or PBS."""

import subprocess
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from affinity.errors import InputError, RunError
from cputrain.cli.job_work import Wanted, any_command, preparation, training
from cputrain.cli.options import Asked, planning_options
from cputrain.jobs.directives import SCHEDULERS, Resources
from cputrain.jobs.script import RUNTIMES, Batch, Command, Container, job_script, parse_sweep
from mpi.launchers.table import LAUNCHERS, launchers_for

SUBMIT = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}
ONLY = {
    "partition": ("slurm", "PBS has queues: give --queue"),
    "qos": ("slurm", "give PBS a line of its own with --directive"),
    "constraint": ("slurm", "give PBS a line of its own with --directive"),
    "queue": ("pbs", "Slurm has partitions: give --partition"),
    "ncpus": ("pbs", "Slurm lends all CPUs of a host: leave it out"),
}
RESOURCES = (
    *("time", "partition", "queue", "account", "qos", "constraint"),
    *("mail", "output", "error", "directives"),
)
COMMAND = "command"  # where click keeps what stands after --


class _WithCommand(click.Command):
    """A command line of which all that stands after -- is another's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            args, ctx.meta[COMMAND] = args[:cut], tuple(args[cut + 1 :])
        return super().parse_args(ctx, args)


@click.command("job", cls=_WithCommand, context_settings={"ignore_unknown_options": True})
@click.argument("scheduler", type=click.Choice(SCHEDULERS))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RECIPE [KEY=VALUE]... | -- CMD...]")
@click.option("--prepare", nargs=3, metavar="KIND SRC OUT", help="cputrain prepare, whose own options may follow")
@click.option("--name", help="the job's name  [default: what it runs]")
@click.option("--time", required=True, metavar="HH:MM:SS", help="limit of the job's time")
@click.option("--partition", help="Slurm: where to run")
@click.option("--queue", help="PBS: where to run")
@click.option("--account", help="who pays")
@click.option("--qos", help="Slurm: quality of service")
@click.option("--constraint", metavar="FEATURES", help="Slurm: features that the hosts must have")
@click.option("--ncpus", type=click.IntRange(1), help="PBS: CPUs of a host, as pbsnodes -a shows, without --machine")
@click.option("--mail", metavar="ADDRESS", help="mail there when the job ends or fails")
@click.option("--output", metavar="FILE", help="the job's output, as the scheduler names it")
@click.option("--error", metavar="FILE", help="the job's errors  [default: with its output]")
@click.option("--directive", "directives", multiple=True, metavar="LINE", help="one more #SBATCH or #PBS line")
@click.option("--requeue/--no-requeue", default=None, help="run on in a new job  [default: unless it is a CMD]")
@click.option("--module-purge", is_flag=True, help="unload all modules first")
@click.option("--module", "modules", multiple=True, help="module to load first; may be given again")
@click.option("--venv", help="virtual environment to use on the hosts")
@click.option("--container", metavar="IMAGE", help="image that has cputrain: each rank runs inside")
@click.option("--container-runtime", type=click.Choice(["auto", *RUNTIMES]), help="auto: the first on PATH there")
@click.option("--container-arg", "container_args", multiple=True, metavar="ARG", help="one more option of the runtime")
@click.option("--stage", metavar="DIR", help="folder on each host that the recipe's data is copied to first")
@click.option("--array", metavar="KEY=A,B,C", help="a job of the recipe for each value")
@click.option("--chain", type=click.IntRange(1), default=1, help="jobs in a row, where one is not long enough")
@click.option("--submit", is_flag=True, help="submit it, too")
@planning_options
def command(
    asked: Asked,
    scheduler: str,
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
    **given: Any,
) -> None:
    """Print the script of a job that trains RECIPE, prepares images or runs CMD on --nodes hosts (--submit: submit it).

    \b
    cputrain job slurm RECIPE --nodes 16 --time 02:00:00
    cputrain job slurm --prepare imagenet SRC OUT --short-side 256 --time 08:00:00
    cputrain job slurm --nodes 2 --time 01:00:00 -- python train.py --epochs 3

    Workers, cores and network are planned on the job's first host, when it runs. With --machine the scheduler is told
    that machine's numbers. A recipe goes on from the last checkpoint where an earlier job had to stop; each rank of a
    CMD is bound by the plan and finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_* set.
    """
    _check(asked, scheduler, {"ncpus": ncpus, **given})
    if chain > 1 and not submit:
        raise InputError(f"--chain {chain} submits the job {chain} times: add --submit, or leave --chain out")
    wanted = _wanted(asked, words, prepare, array, stage)
    batch = Batch(
        resources=Resources(
            name=name or wanted.name,
            nodes=len(asked.hosts),
            ppn=wanted.ppn,
            cpus=ncpus or wanted.cpus,
            requeue=not isinstance(wanted.work, Command) if requeue is None else requeue,
            tasks=0 if array is None else len(parse_sweep(array)[1]),
            **{key: given[key] for key in RESOURCES},
        ),
        work=wanted.work,
        launcher=_launcher(asked, scheduler, wanted.ppn),
        fabric=asked.fabric,
        machine=None if asked.machine == "this" else asked.machine,
        modules=given["modules"],
        module_purge=given["module_purge"],
        venv=given["venv"],
        container=_container(container, container_runtime, container_args, given["venv"]),
    )
    script = job_script(batch, scheduler)
    click.echo(script, nl=False)
    for file in (given["output"], given["error"]):
        if file is not None and not (folder := _folder_of(file, scheduler)).is_dir():
            click.echo(f"note: no scheduler makes folders: mkdir -p {folder} before the job starts", err=True)
    if submit:
        _submit(script, scheduler, chain)


def _folder_of(file: str, scheduler: str) -> Path:
    """The folder of a job's output file, which PBS calls [HOST:]FILE."""
    return Path(file.rpartition(":")[2] if scheduler == "pbs" else file).parent


def _check(asked: Asked, scheduler: str, given: dict[str, Any]) -> None:
    """Raise InputError for what this scheduler, or any job, cannot heed."""
    for option, (only, instead) in ONLY.items():
        if given[option] is not None and only != scheduler:
            raise InputError(f"--{option} is not for {scheduler}: {instead}")
    if asked.named:
        raise InputError("--hosts and --hostfile: a job's hosts are the scheduler's choice: give --nodes N")
    if asked.share:
        raise InputError("--share: a job has its hosts to itself: leave it out")
    if asked.oversubscribe:
        raise InputError("--oversubscribe tries plans on one host: leave it out of a job")
    if asked.bind == "launcher":
        raise InputError("--bind launcher: in a job the ranks bind themselves, by the plan made there: leave it out")
    usable = [launcher.name for launcher in launchers_for(scheduler)]
    if asked.launcher not in ("auto", *usable):
        raise InputError(
            f"--launcher {asked.launcher} starts no {scheduler} job: leave it out, or give {' or '.join(usable)}"
        )


def _wanted(
    asked: Asked, words: tuple[str, ...], prepare: tuple[str, str, str] | None, array: str | None, stage: str | None
) -> Wanted:
    """The one thing that the job is to run. Raises InputError where there is none, or more."""
    context = click.get_current_context()
    cmd: tuple[str, ...] = context.meta.get(COMMAND, ())
    if (array or stage) and (prepare or cmd):
        raise InputError(f"--{'array' if array else 'stage'} is for a recipe's job: leave it out")
    if prepare:
        return preparation(asked, (*prepare, *words, *cmd))
    if strange := [word for word in words if word.startswith("-")]:
        known = [option for parameter in context.command.params for option in parameter.opts]
        near = get_close_matches(strange[0].partition("=")[0], known)
        raise click.NoSuchOption(strange[0], possibilities=near, ctx=context)
    if bool(words) == bool(cmd):
        raise InputError("a job runs one thing: name a RECIPE, or give --prepare KIND SRC OUT, or -- CMD...")
    return any_command(asked, cmd) if cmd else training(asked, words, array, stage)


def _launcher(asked: Asked, scheduler: str, ppn: int | None) -> str:
    """The launcher of the job's ranks."""
    launcher = launchers_for(scheduler)[0] if asked.launcher == "auto" else LAUNCHERS[asked.launcher]
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
            raise InputError("--container-runtime and --container-arg start an image: name it with --container")
        return None
    if venv is not None:
        raise InputError("--venv beside --container: the image has its own Python: leave --venv out")
    return Container(image=image, runtime=runtime or "auto", arguments=arguments)


def _submit(script: str, scheduler: str, chain: int) -> None:
    """Submit the script `chain` times, each after the one before; says the jobs' numbers."""
    before: str | None = None
    for _ in range(chain):
        argv = [*SUBMIT[scheduler]]
        if before is not None:
            argv += (
                ["--dependency", f"afterany:{before}"] if scheduler == "slurm" else ["-W", f"depend=afterany:{before}"]
            )
        try:
            done = subprocess.run(argv, input=script, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise InputError(f"--submit needs {argv[0]} on PATH: call this on a host of the cluster") from None
        if done.returncode:
            raise RunError(f"{argv[0]} refused the job: {' '.join(done.stderr.split())}")
        before = done.stdout.strip().partition(";")[0]
        click.echo(f"submitted {before}", err=True)
