"""The launch of a command: planned, its hosts checked, run, and run again after failures; or one rank of it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

from cputrain.affinity.errors import InputError, RunError, as_option
from cputrain.affinity.filesystem import check_writable
from cputrain.affinity.kernel.bound_plan import exec_bound, plan_for_rank, plan_in_memory
from cputrain.affinity.planner.plan import Plan, Request
from cputrain.affinity.ranks.rank import Rank
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import counted
from cputrain.files import LOGS, PLAN, write_plan
from cputrain.launch.command import (
    COMPARED_PACKAGES,
    HostsLeft,
    Switches,
    check_launch,
    check_program,
    command_job,
    keep_logs,
    measure_transports,
    new_folder,
    on_hosts,
    with_absent_module,
    with_restarts,
)
from cputrain.launch.options import (
    PlanningOptions,
    chosen,
    in_pods,
    plan_hosts,
    request_of_options,
    uses_launcher,
    wait_for_name,
    with_allocated_hosts,
    with_host_groups,
    with_instances,
    with_pods,
)
from cputrain.mpi.hosts.groups import Cluster
from cputrain.mpi.hosts.schedulers import Allocation, allocation
from cputrain.mpi.launchers.detect import find_launcher
from cputrain.mpi.launchers.launcher import InstalledLauncher, Job
from cputrain.mpi.preflight import run_preflight
from cputrain.mpi.supervise.processes import JobFailedError
from cputrain.mpi.supervise.run import run_local, run_remote
from cputrain.variables import restart_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command and what starts it, at its first start and at its restarts.

    `launcher` is None where this process starts the workers. `instances`: how many independent copies were requested,
    `instance` which of them are started. `allocation` is the scheduler's job around this process.
    """

    command: tuple[str, ...]
    options: PlanningOptions
    base: Request
    switches: Switches
    env: Mapping[str, str]
    launcher: InstalledLauncher | None
    folder: Path
    instances: int | str | None
    instance: str | None
    allocation: Allocation | None

    def planned(self) -> tuple[Job, Cluster]:
        """The job and its hosts' plans. Raises InputError where the request does not fit."""
        cluster = plan_hosts(self.options, self.base, self.env, self.command)
        job = command_job(self.options, cluster, self.command, self.folder, self.env, self.switches)
        job = in_pods(job, self.env)
        return (job if self.instances is None else replace(job, instances=chosen(self.instance, job.ppn))), cluster


def make_launch(
    command: tuple[str, ...],
    options: PlanningOptions,
    base: Request,
    switches: Switches,
    env: Mapping[str, str],
    *,
    host_groups: tuple[str, ...],
    instances: int | str | None,
    instance: str | None,
    folder: Path,
) -> Launch:
    """The launch of a command as requested, on the hosts of the batch job around this process where none are named.
    Raises InputError where options cannot be combined."""
    found = allocation(env)
    options = with_allocated_hosts(with_host_groups(options, host_groups), found)
    options = with_pods(options, env)
    check_launch(options, plan_on_host=switches.plan_on_host)
    if instances is not None:
        options = with_instances(options, instances, this_machine())
    return Launch(
        command=command,
        options=options,
        base=base,
        switches=switches,
        env=env,
        launcher=find_launcher(options.launcher, env) if uses_launcher(options) else None,
        folder=folder,
        instances=instances,
        instance=instance,
        allocation=found,
    )


def run_launch(
    launch: Launch,
    first: Job,
    cluster: Cluster,
    *,
    named: bool,
    restarts: int,
    preflight: bool | None,
    report: Callable[[str], None],
) -> int:
    """Run the job that was planned first, after failures again on the hosts that are left; its exit status.

    Makes the launch's folder, whose name the user has given where `named`. `preflight` checks the hosts before the
    start; None: where there are several. `report` shows a line to the user. Raises InputError, JobFailedError.
    """
    if launch.launcher is None:
        check_program(launch.command, launch.env)
    check_writable(launch.folder, "--output")
    launch = replace(launch, folder=new_folder(launch.folder, named=named))
    name = uuid4().hex
    left = HostsLeft(hosts=launch.options.hosts, command=launch.command)

    def start(attempt: int, failure: JobFailedError | None) -> int:
        job, hosts = replace(first, plan_path=launch.folder / PLAN, log_dir=launch.folder / LOGS), cluster
        if failure is not None:
            keep_logs(launch.folder / LOGS, attempt - 1)
            job, hosts = replace(launch, options=on_hosts(launch.options, left.after(failure))).planned()
        job = replace(job, variables=(*job.variables, *restart_variables(attempt, restarts, name)))
        for warning in (*hosts.warnings, *(text for group in hosts.groups for text in _warnings(group.plan))):
            report(f"warning: {warning}")
        try:
            return _run(job, launch, preflight, report)
        except JobFailedError as error:
            if error.shortage is None:
                raise with_absent_module(error) from None
            from cputrain.launch.local import with_remedy  # the recipes: only where one may have failed

            raise with_remedy(error, job) from None

    return with_restarts(start, restarts)


def become_rank(
    rank: Rank,
    request: Request,
    command: tuple[str, ...],
    env: Mapping[str, str],
    *,
    check: bool,
    keep_env: bool,
    report: Callable[[str], None],
) -> NoReturn:
    """Be the rank that mpirun, srun or torchrun has started: bind to its share of this host and become the command."""
    plan, index = plan_for_rank(request, rank, command, env)
    for warning in _warnings(plan) if rank.local_rank == 0 else ():
        report(f"warning: {warning}")
    exec_bound(plan.workers[index], plan_in_memory(plan), command, env, rank=rank, check=check, keep_env=keep_env)


def request_of_rank(options: PlanningOptions, base: Request, rank: Rank) -> Request:
    """The request of the host that a rank shares. Raises InputError for another number of workers than it has."""
    ppn = options.given["ppn"]
    if ppn not in (None, "auto", rank.local_world_size):
        raise InputError(
            f"--ppn {ppn}, but {rank.local_world_size} ranks were started on this host: remove --ppn, or "
            f"set it to {rank.local_world_size}"
        )
    return request_of_options(options, base)


def _warnings(plan: Plan) -> tuple[str, ...]:
    return tuple(plan.worded(as_option).warnings)


def _run(job: Job, launch: Launch, preflight: bool | None, report: Callable[[str], None]) -> int:
    """Check the hosts where that is wanted, run the job; its exit status."""
    if launch.launcher is None:
        wait_for_name(job.master_addr or "", job.pods)
        write_plan(job.plan_path, job.plan)
        return run_local(job, launch.env)
    if preflight or (preflight is None and len(job.hosts) > 1):
        _check_hosts(job, launch, launch.launcher, report)
    measure_transports(job, launch.launcher.launcher, launch.env, report)
    return run_remote(job, launch.launcher, launch.folder, launch.env)


def _check_hosts(job: Job, launch: Launch, launcher: InstalledLauncher, report: Callable[[str], None]) -> None:
    """Check the hosts and report the warnings. Raises RunError with all errors."""
    started = time.monotonic()
    findings = run_preflight(job, launcher, launch.folder / "preflight", launch.env, COMPARED_PACKAGES)
    for warning in findings.warnings:
        report(f"pre-flight: {warning}")
    if findings.errors:
        more = "".join(f"\n  {error}" for error in findings.errors[1:])
        raise RunError(f"pre-flight: {findings.errors[0]}{more}\n  (use --no-preflight to skip this check)")
    seconds = time.monotonic() - started
    report(f"pre-flight: {counted(len(job.hosts), 'host')} checked in {seconds:.1f} s")
