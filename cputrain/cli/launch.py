"""cputrain launch: run any command under a plan."""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

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
from affinity.terminal import redraws
from affinity.topology.sysfs import this_machine
from affinity.views.text import plan_to_text
from affinity.wording import counted
from cputrain.cli.options import Instances, host_groups_option, no_verify_option, planning_options, restarts_option
from cputrain.cli.planning_command import PlanningCommand
from cputrain.cli.sections import PLANNING
from cputrain.launch.command import check_launch, command_job, new_folder, program
from cputrain.launch.first_measurement import measure_transports
from cputrain.launch.hosts import converted_hostfile, uses_launcher, with_allocated_hosts, with_host_groups
from cputrain.launch.instances import chosen, with_instances
from cputrain.launch.options import PlanningOptions, plan_hosts, request_of_options
from cputrain.launch.pods import in_pods, wait_for_name, with_pods
from cputrain.launch.restarts import HostsLeft, keep_logs, on_hosts, with_restarts
from cputrain.runs.attempt import restart_variables
from cputrain.runs.folder import LOGS, PLAN, write_plan
from mpi.hosts.groups import Cluster
from mpi.launchers.detect import find_launcher
from mpi.launchers.job import Job
from mpi.launchers.launcher import InstalledLauncher
from mpi.launchers.local import local_commands
from mpi.launchers.script import shell_line, workers_line
from mpi.preflight.run import run_preflight
from mpi.supervise.exits import JobFailedError
from mpi.supervise.local import run_local
from mpi.supervise.remote import remote_command, run_remote

# Options about all hosts and ranks, which one rank of another launcher's job cannot decide.
OF_A_WHOLE_JOB = (
    *("hosts", "hostfile", "nodes", "machine", "host_groups", "launcher", "fabric", "bind"),
    *("plan_on_host", "preflight", "output", "restarts", "instances", "dry_run", "share"),
)


SECTIONS = {
    "The launch": (
        *("module", "instances", "instance", "output", "dry_run", "restarts", "preflight", "plan_on_host"),
        *("no_verify", "allow_other_layout"),
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
    cls=PlanningCommand,
    sections=SECTIONS,
    examples=EXAMPLES,
    context_settings={"allow_interspersed_args": False},
)
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
@restarts_option
@click.option("--module", "-m", is_flag=True, help="CMD is the name of a Python module, as in python -m")
@click.option(
    "--instances",
    type=Instances(),
    metavar="N|latency|throughput",
    help="start N independent copies of CMD without RANK and the rest; latency: one for every 4 cores, throughput: one "
    "for each NUMA node",
)
@click.option("--instance", metavar="LIST", help="with --instances: start only these copies, as in 0,2-3")
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
    restarts: int,
    module: bool,
    instances: int | str | None,
    instance: str | None,
    dry_run: bool,
) -> int:
    """Run CMD once for each planned worker, bound to its cores, with RANK, WORLD_SIZE, MASTER_ADDR and the rest set.

    A .py file runs under this Python. A script that calls torch.distributed.init_process_group() runs unchanged.
    Started by mpirun, srun or torchrun, launch is one rank of that job: it binds itself to its share of the host and
    becomes CMD.
    """
    cmd = program(cmd, module=module)
    base = Request(pin_threads=pin_threads)
    if instance is not None and instances is None:
        raise InputError("--instance chooses among several copies: give their number with --instances")
    env = os.environ
    rank = discover(env)
    if rank is not None:
        _become_rank(rank, options, base, cmd, env, check=not no_verify, keep_env=keep_env)
    options = with_allocated_hosts(with_host_groups(options, host_groups), env)
    options = with_pods(options, env)
    check_launch(options, plan_on_host=plan_on_host)
    if instances is not None:
        options = with_instances(options, instances, this_machine())
    launcher = find_launcher(options.launcher, env) if uses_launcher(options) else None
    if launcher is not None and (note := converted_hostfile(options, launcher)):
        click.echo(note, err=True)
    launch = _Launch(
        cmd=cmd,
        env=env,
        options=options,
        base=base,
        launcher=launcher,
        folder=output or Path(f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}"),
        instances=instances,
        instance=instance,
        switches={
            "verify": not no_verify,
            "allow_other_layout": allow_other_layout,
            "keep_env": keep_env,
            "plan_on_host": plan_on_host,
        },
    )
    job, cluster = launch.planned(options)
    if dry_run:
        _show(job, launcher, launch.folder, env)
        return 0
    check_writable(launch.folder, "--output")
    launch = replace(launch, folder=new_folder(launch.folder, named=output is not None))
    return launch.run(job, cluster, restarts=restarts, preflight=preflight)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """A command line's job, at its first start and at its restarts."""

    cmd: tuple[str, ...]
    env: Mapping[str, str]
    options: PlanningOptions
    base: Request
    launcher: InstalledLauncher | None
    folder: Path
    instances: int | str | None
    instance: str | None
    switches: dict[str, bool]

    def planned(self, options: PlanningOptions) -> tuple[Job, Cluster]:
        """The job and its hosts' plans."""
        cluster = plan_hosts(options, self.base, self.env, self.cmd)
        job = in_pods(command_job(options, cluster, self.cmd, self.folder, self.env, **self.switches), self.env)
        return (job if self.instances is None else replace(job, instances=chosen(self.instance, job.ppn))), cluster

    def run(self, first: Job, cluster: Cluster, *, restarts: int, preflight: bool | None) -> int:
        """Run the job, after failures again on the hosts that are left; returns its exit status."""
        name = uuid4().hex
        left = HostsLeft(hosts=self.options.hosts, command=self.cmd)

        def start(attempt: int, failure: JobFailedError | None) -> int:
            job, hosts = replace(first, plan_path=self.folder / PLAN, log_dir=self.folder / LOGS), cluster
            if failure is not None:
                keep_logs(self.folder / LOGS, attempt - 1)
                job, hosts = self.planned(on_hosts(self.options, left.after(failure)))
            variables = (*job.variables, *restart_variables(attempt, restarts, name))
            try:
                return _run(replace(job, variables=variables), hosts, self.launcher, self.folder, preflight, self.env)
            except JobFailedError as error:
                if error.shortage is None:
                    raise
                from cputrain.launch.shortage import with_remedy  # the recipes: only where one may have failed

                raise with_remedy(error, job) from None

        return with_restarts(start, restarts)


def _run(
    job: Job,
    cluster: Cluster,
    launcher: InstalledLauncher | None,
    folder: Path,
    preflight: bool | None,
    env: Mapping[str, str],
) -> int:
    """Print warnings, check the hosts where that is wanted, run the job; returns its exit status."""
    for warning in (
        *cluster.warnings,
        *(text for group in cluster.groups for text in group.plan.worded(as_option).warnings),
    ):
        click.echo(f"warning: {warning}", err=True)
    if launcher is None:
        wait_for_name(job.master_addr or "", job.pods)
        write_plan(job.plan_path, job.plan)
        return run_local(job, env)
    if preflight or (preflight is None and len(job.hosts) > 1):
        _preflight(job, launcher, folder, env)
    measure_transports(job, launcher.launcher, env, partial(click.echo, err=True))
    return run_remote(job, launcher, folder, env)


def _preflight(job: Job, launcher: InstalledLauncher, folder: Path, env: Mapping[str, str]) -> None:
    """Check the hosts and print the warnings. Raises RunError with all errors."""
    started = time.monotonic()
    findings = run_preflight(job, launcher, folder / "preflight", env)
    for warning in findings.warnings:
        click.echo(f"pre-flight: {warning}", err=True)
    if findings.errors:
        more = "".join(f"\n  {error}" for error in findings.errors[1:])
        raise RunError(f"pre-flight: {findings.errors[0]}{more}\n  (--no-preflight starts without this check)")
    seconds = time.monotonic() - started
    click.echo(f"pre-flight: {counted(len(job.hosts), 'host')} checked in {seconds:.1f} s", err=True)


def _become_rank(
    rank: Rank,
    options: PlanningOptions,
    base: Request,
    cmd: tuple[str, ...],
    env: Mapping[str, str],
    *,
    check: bool,
    keep_env: bool,
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
    plan, index = plan_for_rank(request_of_options(options, base), rank, cmd, env)
    for warning in plan.worded(as_option).warnings if rank.local_rank == 0 else ():
        click.echo(f"warning: {warning}", err=True)
    exec_bound(plan.workers[index], plan_in_memory(plan), cmd, env, rank=rank, check=check, keep_env=keep_env)


def _show(job: Job, launcher: InstalledLauncher | None, folder: Path, env: Mapping[str, str]) -> None:
    """Print the plan, and the command that would run."""
    for group in job.groups:
        click.echo(plan_to_text(group.plan, wording=as_option) + "\n")
    if launcher is not None:
        start = remote_command(job, launcher, folder, "ADDRESS", "PORT", "TOKEN", live=redraws(sys.stdout, env))
        click.echo(f"command\n  {shell_line(start)}")
        click.echo(
            "mpi.supervise.agent reports to this host's ADDRESS and PORT, with the TOKEN of the launch. To start the "
            "ranks without it:\ncputrain plan --write DIR with the same planning options, then DIR/launch.sh CMD"
        )
        return
    port = job.master_port or MASTER_PORT
    more = "; the others differ in RANK and LOCAL_RANK" if job.ppn > 1 else ""
    click.echo(f"command of worker 0 of {job.ppn}{more}")
    click.echo(f"  {shell_line(local_commands(job, port)[0])}")
    click.echo("to start the workers by hand, without a folder for plan and logs")
    click.echo(f"  {workers_line(replace(job, plan_on_host=True), port)}")
