"""cputrain launch: run any command under a plan."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from affinity.errors import InputError, RunError, as_option
from affinity.filesystem import check_writable
from affinity.kernel.bound_plan import plan_in_memory
from affinity.kernel.exec_bound import exec_bound
from affinity.kernel.layout import OTHER_LAYOUT_VARIABLE
from affinity.kernel.rank_plan import plan_for_rank
from affinity.planner.plan import Request
from affinity.ranks.rank import MASTER_PORT, Rank, discover
from affinity.views.text import plan_to_text
from affinity.wording import counted
from cputrain.cli.options import host_groups_option, no_verify_option, planning_options
from cputrain.launch.command import check_launch, command_job, new_folder
from cputrain.launch.hosts import converted_hostfile, uses_launcher, with_allocated_hosts, with_host_groups
from cputrain.launch.options import PlanningOptions, plan_hosts, request_of_options
from cputrain.runs.folder import LOGS, PLAN, write_plan
from mpi.hosts.address import own_address
from mpi.hosts.groups import Cluster
from mpi.launchers.detect import find_launcher
from mpi.launchers.job import Job
from mpi.launchers.launcher import InstalledLauncher
from mpi.launchers.local import local_commands
from mpi.launchers.script import shell_line, workers_line
from mpi.preflight.run import run_preflight
from mpi.supervise.local import run_local
from mpi.supervise.remote import remote_command, run_remote

# Options about all hosts and ranks, which one rank of another launcher's job cannot decide.
OF_A_WHOLE_JOB = (
    *("hosts", "hostfile", "nodes", "machine", "host_groups", "launcher", "fabric", "bind"),
    *("plan_on_host", "preflight", "output", "dry_run", "share"),
)


@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="folder for plan.json and logs/  [default: runs/launch-TIME]",
)
@no_verify_option
@click.option(
    "--allow-other-layout",
    is_flag=True,
    envvar=OTHER_LAYOUT_VARIABLE,
    help="continue if a host's cores, caches or NUMA nodes differ from the plan's",
)
@click.option(
    "--pin-threads", is_flag=True, help="bind each OpenMP thread to one CPU (data-loader processes then share one CPU)"
)
@click.option(
    "--keep-env", is_flag=True, help="keep inherited OMP_*, KMP_* and GOMP_* variables that contradict the plan"
)
@host_groups_option
@click.option("--plan-on-host", is_flag=True, help="plan each host by itself for --ppn workers; hosts may differ")
@click.option(
    "--preflight/--no-preflight", default=None, help="check all hosts before the start  [default: if there are several]"
)
@click.option("--dry-run", is_flag=True, help="print the plan and the command; start nothing")
@planning_options
def command(
    options: PlanningOptions,
    cmd: tuple[str, ...],
    output: Path | None,
    no_verify: bool,
    allow_other_layout: bool,
    pin_threads: bool,
    keep_env: bool,
    host_groups: tuple[str, ...],
    plan_on_host: bool,
    preflight: bool | None,
    dry_run: bool,
) -> int:
    """Run CMD once for each planned worker, bound to its cores, with RANK, WORLD_SIZE, MASTER_ADDR and the rest set.

    A script that calls torch.distributed.init_process_group() runs unchanged. Started by mpirun, srun or torchrun,
    launch is one rank of that job: it binds itself to its share of the host and becomes CMD.
    """
    base = Request(pin_threads=pin_threads)
    rank = discover(os.environ)
    if rank is not None:
        _become_rank(rank, options, base, cmd, check=not no_verify, keep_env=keep_env)
    options = with_allocated_hosts(with_host_groups(options, host_groups), os.environ)
    check_launch(options, plan_on_host=plan_on_host)
    launcher = find_launcher(options.launcher, os.environ) if uses_launcher(options) else None
    if launcher is not None and (note := converted_hostfile(options, launcher)):
        click.echo(note, err=True)
    folder = output or Path(f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}")
    switches = {
        "verify": not no_verify,
        "allow_other_layout": allow_other_layout,
        "keep_env": keep_env,
        "plan_on_host": plan_on_host,
    }
    cluster = plan_hosts(options, base, os.environ, cmd)
    job = command_job(options, cluster, cmd, folder, os.environ, **switches)
    if dry_run:
        _show(job, launcher, folder)
        return 0
    check_writable(folder, "--output")
    folder = new_folder(folder, named=output is not None)
    return _run(replace(job, plan_path=folder / PLAN, log_dir=folder / LOGS), cluster, launcher, folder, preflight)


def _run(job: Job, cluster: Cluster, launcher: InstalledLauncher | None, folder: Path, preflight: bool | None) -> int:
    """Print warnings, check the hosts where that is wanted, run the job; returns its exit status."""
    for warning in (
        *cluster.warnings,
        *(text for group in cluster.groups for text in group.plan.worded(as_option).warnings),
    ):
        click.echo(f"warning: {warning}", err=True)
    if launcher is None:
        write_plan(job.plan_path, job.plan)
        return run_local(job, os.environ)
    if preflight or (preflight is None and len(job.hosts) > 1):
        _preflight(job, launcher, folder)
    return run_remote(job, launcher, folder, os.environ)


def _preflight(job: Job, launcher: InstalledLauncher, folder: Path) -> None:
    """Check the hosts and print the warnings. Raises RunError with all errors."""
    started = time.monotonic()
    findings = run_preflight(job, launcher, folder / "preflight", os.environ)
    for warning in findings.warnings:
        click.echo(f"pre-flight: {warning}", err=True)
    if findings.errors:
        more = "".join(f"\n  {error}" for error in findings.errors[1:])
        raise RunError(f"pre-flight: {findings.errors[0]}{more}\n  (--no-preflight starts without this check)")
    seconds = time.monotonic() - started
    click.echo(f"pre-flight: {counted(len(job.hosts), 'host')} checked in {seconds:.1f} s", err=True)


def _become_rank(
    rank: Rank, options: PlanningOptions, base: Request, cmd: tuple[str, ...], *, check: bool, keep_env: bool
) -> NoReturn:
    """Be the rank that mpirun, srun or torchrun has started: bind to its share of this host and become the command."""
    context = click.get_current_context()
    for name in OF_A_WHOLE_JOB:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(param.opts[0] for param in context.command.params if param.name == name)
            raise InputError(
                f"{option}, but this launch is rank {rank.rank} of {rank.world_size} that another launcher has "
                f"started: remove {option}, or run cputrain launch without that launcher"
            )
    if options.ppn not in (None, "auto", rank.local_world_size):
        raise InputError(
            f"--ppn {options.ppn}, but {rank.local_world_size} ranks were started on this host: remove --ppn, or "
            f"set it to {rank.local_world_size}"
        )
    plan, index = plan_for_rank(request_of_options(options, base), rank, cmd, os.environ)
    for warning in plan.worded(as_option).warnings if rank.local_rank == 0 else ():
        click.echo(f"warning: {warning}", err=True)
    exec_bound(plan.workers[index], plan_in_memory(plan), cmd, os.environ, rank=rank, check=check, keep_env=keep_env)


def _show(job: Job, launcher: InstalledLauncher | None, folder: Path) -> None:
    """Print the plan, and the command that would run."""
    for group in job.groups:
        click.echo(plan_to_text(group.plan, wording=as_option) + "\n")
    if launcher is not None:
        start = remote_command(job, launcher, folder, own_address(job.hosts), "PORT", "TOKEN")
        click.echo(f"command\n  {shell_line(start)}")
        click.echo(
            "mpi.supervise.agent reports to this host at PORT, with the TOKEN of the launch. To start the ranks "
            "without it:\ncputrain plan --write DIR with the same planning options, then DIR/launch.sh CMD"
        )
        return
    port = job.master_port or MASTER_PORT
    more = "; the others differ in RANK and LOCAL_RANK" if job.ppn > 1 else ""
    click.echo(f"command of worker 0 of {job.ppn}{more}")
    click.echo(f"  {shell_line(local_commands(job, port)[0])}")
    click.echo("to start the workers by hand, without a folder for plan and logs")
    click.echo(f"  {workers_line(replace(job, plan_on_host=True), port)}")
