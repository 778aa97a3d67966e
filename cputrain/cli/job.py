"""cputrain job: a training as a script for Slurm or PBS."""

import subprocess

import click

from affinity.errors import InputError, RunError
from cputrain.cli.options import Asked, make_plan, planning_options
from cputrain.planning import request_of
from cputrain.recipe import dump_recipe, load_recipe
from mpi.batch import SCHEDULERS, Batch, job_script, parse_sweep
from mpi.launcher import newest

SUBMIT = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}
AFTER = {"slurm": "--dependency=afterany:{}", "pbs": "-Wdepend=afterany:{}"}


@click.command("job")
@click.argument("scheduler", type=click.Choice(SCHEDULERS))
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--time", required=True, metavar="HH:MM:SS", help="limit of the job's time")
@click.option("--partition", help="Slurm's partition, PBS's queue")
@click.option("--account", help="who pays")
@click.option("--module", "modules", multiple=True, help="module to load first; may be given again")
@click.option("--venv", help="virtual environment to use on the hosts")
@click.option("--container", metavar="IMAGE", help="Apptainer or Singularity image that has cputrain")
@click.option("--stage", metavar="DIR", help="folder on each host that the data is copied to first")
@click.option("--array", metavar="KEY=A,B,C", help="a job for each value")
@click.option("--chain", type=click.IntRange(1), default=1, help="jobs in a row, where one is not long enough")
@click.option("--submit", is_flag=True, help="submit it, too")
@planning_options
def command(
    asked: Asked,
    scheduler: str,
    recipe: str,
    settings: tuple[str, ...],
    array: str | None,
    chain: int,
    submit: bool,
    **given: str | int | tuple[str, ...] | None,
) -> None:
    """Print the whole script of a job that trains RECIPE on --nodes hosts (or submit it, --submit).

    The script holds the recipe, makes the plan on its first host, and goes on from the last checkpoint where an
    earlier job had to stop.
    """
    if asked.bind == "launcher":
        raise InputError("--bind launcher: in a job the ranks bind themselves, by the plan made there: leave it out")
    if asked.launcher not in ("auto", "srun" if scheduler == "slurm" else asked.launcher):
        raise InputError(f"--launcher {asked.launcher}: Slurm's jobs are started by srun: leave it out")
    if asked.local_batch is not None:
        raise InputError(f"--local-batch beside a recipe: set batch.local={asked.local_batch} in the recipe")
    training = load_recipe(recipe, settings)
    plan = make_plan(asked, request_of(training))
    launcher = "srun" if scheduler == "slurm" else "intelmpi" if asked.launcher == "auto" else asked.launcher
    batch = Batch(
        name=training.name,
        recipe=dump_recipe(training.model_copy(update={"output": ""})),
        settings=_planned(asked),
        output=str(training.folder),
        data=None if training.data.generated else training.data.path,
        nodes=len(asked.hosts),
        ppn=len(plan.workers),
        pus_per_node=len(plan.machine.allowed_pus),
        launcher=launcher,
        launch=_launch(launcher, asked, len(asked.hosts) * len(plan.workers)),
        plan_options=_plan_options(asked, len(plan.workers)),
        fabric=asked.network.settings if len(asked.hosts) > 1 else (),
        sweep=None if array is None else parse_sweep(array),
        **given,  # type: ignore[arg-type]  # click has checked each
    )
    script = job_script(batch, scheduler)
    click.echo(script, nl=False)
    if submit:
        _submit(script, scheduler, chain)


def _planned(asked: Asked) -> tuple[str, ...]:
    """The planning options, said as settings of the recipe, for the plan that is made on the first host."""
    names = ("threads", "inter_op", "comm_cores", "loader_cores", "smt", "profile", "balance")
    return tuple(f"plan.{name}={value}" for name in names if (value := getattr(asked, name)) is not None)


def _plan_options(asked: Asked, ppn: int) -> tuple[str, ...]:
    """How the plan that is made on the first host is asked for, beside the recipe."""
    link = () if asked.link_gbit is None else ("--link-gbit", f"{asked.link_gbit:g}")
    return ("--ppn", str(ppn), "--nodes", str(len(asked.hosts)), "--fabric", asked.network.name, *link)


def _launch(launcher: str, asked: Asked, ranks: int) -> tuple[str, ...]:
    """mpirun's tokens before the rank's own, for a hostfile that the script makes."""
    if launcher == "srun":
        return ()
    if launcher not in ("intelmpi", "openmpi", "mpich"):
        raise InputError(f"--launcher {launcher} starts no job under PBS: give intelmpi, openmpi or mpich")
    program = newest(launcher).program
    exports = ("MASTER_ADDR", "MASTER_PORT", *(name for name, _, _ in asked.network.settings))
    if launcher == "openmpi":
        passed = tuple(word for name in exports for word in ("-x", name))
        return (program, "-np", str(ranks), "--map-by", "slot", "--bind-to", "none", *passed, "--hostfile")
    if launcher == "mpich":
        return (program, "-n", str(ranks), "-bind-to", "none", "-f")
    # Intel's mpirun is a shell script, which a signal for the ranks would end.
    return ("mpiexec.hydra", "-np", str(ranks), "-genv", "I_MPI_PIN", "0", "-machinefile")


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
