"""`cputrain launch`."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from cputrain.affinity.binding import OTHER_LAYOUT_VARIABLE
from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import Request
from cputrain.affinity.rank import Rank, rank_from_env
from cputrain.affinity.terminal import redraws
from cputrain.cli.options import (
    PLANNING,
    SectionedCommand,
    WordOrNumber,
    host_groups_option,
    no_verify_option,
    planning_options,
    restarts_option,
)
from cputrain.cli.output import path_option, print_file
from cputrain.launch.command import (
    BindingOptions,
    become_rank,
    is_python,
    make_launch,
    program,
    request_of_rank,
    run_launch,
    with_kernels,
)
from cputrain.launch.options import LATENCY, THROUGHPUT, PlanningOptions, allocation_notes, converted_hostfile
from cputrain.launch.plan_files import launch_text
from cputrain.mpi.launchers import Job
from cputrain.mpi.supervise.processes import JobFailedError
from cputrain.variables import KERNELS_VARIABLE

# Options about all hosts and ranks; one rank of another launcher's job cannot apply them.
OF_A_WHOLE_JOB = (
    *("hosts", "hostfile", "nodes", "machine", "host_groups", "launcher", "fabric", "bind"),
    *("plan_on_host", "preflight", "output", "restarts", "instances", "dry_run", "share"),
)


SECTIONS = {
    "The launch": (
        *("module", "instances", "instance", "output", "dry_run", "restarts", "preflight", "plan_on_host"),
        *("no_verify", "allow_other_layout", "kernels"),
    ),
    **PLANNING,
}
EXAMPLES = (
    "cputrain launch -- python train.py --epochs 3",
    "cputrain launch --dry-run --ppn 2 -- python train.py",
    "cputrain launch --hosts n1,n2 --ppn 2 --launcher openmpi -- python train.py",
    "cputrain launch --hostfile hosts --restarts 3 -- python train.py",
)


@click.command(
    "launch",
    cls=SectionedCommand,
    sections=SECTIONS,
    examples=EXAMPLES,
    context_settings={"allow_interspersed_args": False},
)
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
@path_option("--output", metavar="DIR", help="write plan.json and logs/ into DIR  [default: runs/launch-TIME]")
@no_verify_option
@click.option(
    "--allow-other-layout",
    is_flag=True,
    envvar=OTHER_LAYOUT_VARIABLE,
    help="continue even if a host's cores, caches or NUMA nodes differ from the plan's",
)
@click.option(
    "--pin-threads", is_flag=True, help="bind each OpenMP thread to one CPU (data-loader processes then share one CPU)"
)
@click.option(
    "--keep-env", is_flag=True, help="keep inherited OMP_*, KMP_* and GOMP_* variables that contradict the plan"
)
@click.option(
    "--kernels",
    type=click.Choice(("auto", "off")),
    help="auto: register fast kernels, as exact as torch's, below torch's operators; off: none, nor in cputrain train"
    f"  [default: ${KERNELS_VARIABLE}, else auto]",
)
@host_groups_option
@click.option("--plan-on-host", is_flag=True, help="plan each host separately for --ppn workers; hosts may differ")
@click.option(
    "--preflight/--no-preflight", default=None, help="check all hosts before the start  [default: if there are several]"
)
@restarts_option
@click.option("--module", "-m", is_flag=True, help="run CMD as a Python module, as with python -m")
@click.option(
    "--instances",
    type=WordOrNumber(LATENCY, THROUGHPUT, least=1),
    metavar="N|latency|throughput",
    help="start N independent copies of CMD instead of ranks; latency: one for every 4 cores, throughput: one for each "
    "NUMA node",
)
@click.option("--instance", metavar="LIST", help="start only these copies of --instances, as in 0,2-3")
@click.option("--dry-run", is_flag=True, help="print the plan and the command; start nothing")
@planning_options
def launch_command(
    options: PlanningOptions,
    cmd: tuple[str, ...],
    output: Path | None,
    no_verify: bool,
    allow_other_layout: bool,
    pin_threads: bool,
    keep_env: bool,
    kernels: str | None,
    host_groups: tuple[str, ...],
    plan_on_host: bool,
    preflight: bool | None,
    restarts: int,
    module: bool,
    instances: int | str | None,
    instance: str | None,
    dry_run: bool,
) -> int:
    """Run CMD once per planned worker, bound to its cores, with RANK, WORLD_SIZE, MASTER_ADDR and the rest set.

    A .py file runs with this Python. A script that calls torch.distributed.init_process_group() runs unchanged.
    Started by mpirun, srun or torchrun, launch acts as one rank of that job: it binds itself to its share of the host
    and then executes CMD.
    """
    cmd = program(cmd, module=module)
    base = Request(pin_threads=pin_threads)
    if instance is not None and instances is None:
        raise InputError("--instance selects some of several copies: give their number with --instances")
    env, report = with_kernels(cmd, os.environ, kernels), partial(click.echo, err=True)
    rank = rank_from_env(env)
    if (rank is None or rank.rank == 0) and (binder := _binder(cmd)):
        report(f"warning: {binder}")
    if rank is not None:
        _check_options_of_rank(rank)
        request = request_of_rank(options, base, rank)
        become_rank(rank, request, cmd, env, check=not no_verify, keep_env=keep_env, report=report)
    launch = make_launch(
        cmd,
        options,
        base,
        BindingOptions(
            verify=not no_verify, allow_other_layout=allow_other_layout, keep_env=keep_env, plan_on_host=plan_on_host
        ),
        env,
        host_groups=host_groups,
        instances=instances,
        instance=instance,
        folder=output or Path(f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}"),
        dry_run=dry_run,
        report=report,
    )
    if launch.launcher is not None and (note := converted_hostfile(launch.options, launch.launcher)):
        report(note)
    job, cluster = launch.planned()
    for note in allocation_notes(launch.options, launch.allocation, cluster):
        report(f"note: {note}")
    if dry_run:
        print_file(f"{launch_text(job, launch.launcher, launch.folder, live=redraws(sys.stdout, env))}\n")
        return 0
    return run_launch(
        launch,
        job,
        cluster,
        named=output is not None,
        restarts=restarts,
        preflight=preflight,
        report=report,
        advise=_with_memory_advice,
    )


def _with_memory_advice(error: JobFailedError, job: Job, arguments: tuple[str, ...]) -> JobFailedError:
    from cputrain.training.local import with_memory_advice  # imports the recipes: only if a training has failed

    return with_memory_advice(error, job, arguments)


def _binder(command: tuple[str, ...]) -> str:
    """Return a note if the command binds its processes again, or starts ranks itself; "" if it does not."""
    if is_python(command[0]) and "-m" not in command[1:]:
        return ""
    from cputrain.other_launchers.parsing import binder_in  # reads a file: only if the command is no script

    return binder_in(command)


def _check_options_of_rank(rank: Rank) -> None:
    """Raise InputError for a command-line option that one rank cannot apply."""
    context = click.get_current_context()
    for name in OF_A_WHOLE_JOB:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(param.opts[0] for param in context.command.params if param.name == name)
            raise InputError(
                f"{option} applies to a whole job, but this launch is rank {rank.rank} of {rank.world_size} of another "
                f"launcher's job: remove {option}, or run cputrain launch without that launcher"
            )
