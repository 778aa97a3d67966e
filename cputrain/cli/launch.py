"""cputrain launch: run any command under a plan."""

import os
import shutil
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NoReturn

import click
from click.core import ParameterSource

from affinity.errors import InputError, RunError
from affinity.filesystem import check_writable
from affinity.kernel.bound_plan import plan_in_memory
from affinity.kernel.exec_bound import exec_bound
from affinity.kernel.rank_plan import plan_for_rank
from affinity.planner.plan import Request
from affinity.ranks.rank import MASTER_PORT, Rank, discover
from affinity.ranks.rendezvous import port_of
from affinity.views.text import plan_to_text
from cputrain.cli.options import Asked, cluster_of, planning_options, request, tell_format, with_kinds
from cputrain.runs.folder import LOGS, PLAN, write_plan
from mpi.hosts.groups import Cluster
from mpi.hosts.hostfile import allocated_hosts
from mpi.launchers.detect import find_launcher
from mpi.launchers.job import Job
from mpi.launchers.launcher import InstalledLauncher
from mpi.launchers.local import local_commands
from mpi.launchers.script import shell_line, workers_line
from mpi.launchers.table import LAUNCHERS
from mpi.preflight.run import run_preflight
from mpi.supervise.local import free_port, run_local
from mpi.supervise.remote import remote_command, run_remote

# Options that say something of all hosts and ranks, which one rank of another launcher's job cannot decide.
OF_A_WHOLE_JOB = (
    *("hosts", "hostfile", "nodes", "machine", "kinds", "launcher", "fabric", "bind"),
    *("plan_on_host", "preflight", "output", "dry_run", "share"),
)


def _with_real_hosts(asked: Asked) -> Asked:
    """Inside a Slurm or PBS job its hosts, where none are named."""
    if asked.named or asked.launcher == "local":
        return asked
    found = allocated_hosts(os.environ)
    if found is not None and len(found.hosts) > 1:
        hosts = tuple(host.name for host in found.hosts)
        if len(asked.hosts) not in (1, len(hosts)):
            raise InputError(f"--nodes {len(asked.hosts)} but this job has {len(hosts)} hosts: leave --nodes out")
        return replace(asked, hosts=hosts, named=True)
    if len(asked.hosts) > 1:
        raise InputError("launch needs its hosts' names: give --hosts or --hostfile, or call it in a Slurm or PBS job")
    return asked


def _preflight(job: Job, launcher: InstalledLauncher, folder: Path) -> None:
    """Say what is doubtful about the hosts. Raises RunError with all that is wrong."""
    started = time.monotonic()
    verdict = run_preflight(job, launcher, folder / "preflight", os.environ)
    for doubt in verdict.doubtful:
        click.echo(f"pre-flight: {doubt}", err=True)
    if verdict.wrong:
        more = "".join(f"\n  {wrong}" for wrong in verdict.wrong[1:])
        raise RunError(f"pre-flight: {verdict.wrong[0]}{more}\n  (--no-preflight starts all the same)")
    click.echo(
        f"pre-flight: {len(job.hosts)} hosts are alike and answer ({time.monotonic() - started:.1f} s)", err=True
    )


@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.argument("cmd", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
@click.option(
    "--output", type=click.Path(path_type=Path), help="folder of plan.json and logs/  [default: runs/launch-TIME]"
)
@click.option("--no-verify", is_flag=True, help="go on when the kernel gave something else than planned")
@click.option("--pin-threads", is_flag=True, help="bind each OpenMP thread to a PU; loader processes then share one PU")
@click.option("--keep-env", is_flag=True, help="inherited OMP_*, KMP_*, GOMP_* win over the plan's")
@click.option("--kind", "kinds", multiple=True, metavar="HOSTS=MACHINE", help="a kind of host, once for each")
@click.option("--plan-on-host", is_flag=True, help="each host plans itself for --ppn workers: hosts may differ")
@click.option("--preflight/--no-preflight", default=None, help="check all hosts first  [default: above one host]")
@click.option("--dry-run", is_flag=True, help="print plan and command, start nothing")
@planning_options
def command(
    asked: Asked,
    cmd: tuple[str, ...],
    output: Path | None,
    no_verify: bool,
    pin_threads: bool,
    keep_env: bool,
    kinds: tuple[str, ...],
    plan_on_host: bool,
    preflight: bool | None,
    dry_run: bool,
) -> int:
    """Run any command under a plan: bound workers with RANK, WORLD_SIZE, MASTER_ADDR and the rest set.

    A script that calls torch.distributed.init_process_group() runs as it is. Started by mpirun, srun or torchrun it
    is one rank of that job: it binds itself to its share of the host and becomes CMD.
    """
    base = Request(pin_threads=pin_threads)
    rank = discover(os.environ)
    if rank is not None:
        _become_rank(rank, asked, base, cmd, check=not no_verify, keep_env=keep_env)
    asked = _with_real_hosts(with_kinds(asked, kinds))
    here = asked.hosts == ("localhost",)
    remote = not here or asked.launcher not in ("auto", "local")
    _check(asked, here=here, remote=remote, plan_on_host=plan_on_host)
    launcher = find_launcher(asked.launcher, os.environ) if remote else None
    if launcher is not None:
        tell_format(asked, launcher)
    folder = output or Path(f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}")
    how = {"verify": not no_verify, "keep_env": keep_env, "plan_on_host": plan_on_host}
    cluster = cluster_of(asked, base, cmd)
    job = _job(asked, cluster, cmd, folder, **how)
    if dry_run:
        _show(job, launcher, folder)
        return 0
    check_writable(folder, "--output")
    folder = new_folder(folder, named=output is not None)
    job = replace(job, plan_path=folder / PLAN, log_dir=folder / LOGS)
    for warning in (*cluster.warnings, *(text for group in cluster.groups for text in group.plan.warnings)):
        click.echo(f"warning: {warning}", err=True)
    if launcher is not None:
        if preflight or (preflight is None and len(job.hosts) > 1):
            _preflight(job, launcher, folder)
        return run_remote(job, launcher, folder, os.environ)
    write_plan(job.plan_path, job.plan)
    return run_local(job, os.environ)


def _job(asked: Asked, cluster: Cluster, cmd: tuple[str, ...], folder: Path, **how: bool) -> Job:
    """What the user has set of the meeting place and the fabric wins, and has to reach the other hosts, too: not every
    launcher hands it on."""
    here = asked.hosts == ("localhost",)
    port = port_of(os.environ)
    fabric = () if here else asked.network.settings
    return Job(
        groups=cluster.groups,
        # By its path: Open MPI puts its own folder first on its ranks' PATH, and a Python may be there.
        command=(shutil.which(cmd[0]) or cmd[0], *cmd[1:]),
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
        binder=asked.bind,
        master_addr=None if here else os.environ.get("MASTER_ADDR") or None,
        master_port=free_port() if here and port is None else port,
        variables=tuple((name, os.environ.get(name, value)) for name, value, _ in fabric),
        **how,
    )


def _become_rank(
    rank: Rank, asked: Asked, base: Request, cmd: tuple[str, ...], *, check: bool, keep_env: bool
) -> NoReturn:
    """Be the rank that mpirun, srun or torchrun has started: bind to its share of this host and become the command."""
    context = click.get_current_context()
    for name in OF_A_WHOLE_JOB:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(param.opts[0] for param in context.command.params if param.name == name)
            raise InputError(
                f"{option}, but this launch is rank {rank.rank} of {rank.world_size} that another launcher has "
                f"started: leave {option} out, or call cputrain launch by itself"
            )
    if asked.ppn not in (None, "auto", rank.local_world_size):
        raise InputError(
            f"--ppn {asked.ppn}, but {rank.local_world_size} ranks were started on this host: leave --ppn out, or set "
            "it to that"
        )
    plan, index = plan_for_rank(request(asked, base), rank, cmd, os.environ)
    for warning in plan.warnings if rank.local_rank == 0 else ():
        click.echo(f"warning: {warning}", err=True)
    exec_bound(plan.workers[index], plan_in_memory(plan), cmd, os.environ, rank=rank, check=check, keep_env=keep_env)


def new_folder(folder: Path, *, named: bool) -> Path:
    """Make the job's folder, which no other launch has: another name for one that was not asked for by name."""
    for number in count(1):
        tried = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if tried.is_dir() and any(tried.iterdir()) and named:
            break
        try:
            (tried / LOGS).mkdir(parents=True)
        except FileExistsError:
            if named:
                break
            continue
        return tried
    raise InputError(f"output {folder} is there already: name another folder")


def _show(job: Job, launcher: InstalledLauncher | None, folder: Path) -> None:
    """Print the plan, and what would be run."""
    for group in job.groups:
        click.echo(plan_to_text(group.plan) + "\n")
    if launcher is not None:
        made = remote_command(job, launcher, folder, "PORT", "TOKEN")
        click.echo(f"command\n  {shell_line(made)}")
        click.echo(
            "PORT and TOKEN, new for each launch, are how it hears of its ranks through mpi.supervise.agent; without:"
        )
        click.echo("cputrain plan --write DIR with these same planning options, then DIR/launch.sh CMD")
        return
    port = job.master_port or MASTER_PORT
    click.echo(f"command of worker 0 of {job.ppn}; the others differ in RANK and LOCAL_RANK")
    click.echo(f"  {shell_line(local_commands(job, port)[0])}")
    click.echo("by hand, without the folder of plan and logs")
    click.echo(f"  {workers_line(replace(job, plan_on_host=True), port)}")


def _check(asked: Asked, *, here: bool, remote: bool, plan_on_host: bool) -> None:
    """Raise InputError where options exclude each other."""
    if asked.machine != "this" and here:
        raise InputError("launch runs on real hosts: leave --machine out, or name with --hosts those that are such")
    if asked.launcher == "local" and not here:
        raise InputError("--launcher local starts workers on this host only: leave it or --hosts out")
    if asked.launcher in LAUNCHERS and not LAUNCHERS[asked.launcher].reaches_hosts and not here:
        raise InputError(
            f"{asked.launcher} has to be started on each host: run there what cputrain plan prints, or use mpirun"
        )
    if asked.bind == "launcher" and not remote:
        raise InputError("--bind launcher needs a launcher: name one with --launcher")
    if plan_on_host and asked.share:
        raise InputError("--share and --plan-on-host exclude each other: leave one out")
    if plan_on_host and (not isinstance(asked.ppn, int) or asked.bind == "launcher"):
        raise InputError("--plan-on-host needs --ppn N, the same on every host, and no --bind launcher")
