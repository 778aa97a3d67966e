"""cputrain launch: run any command under a plan."""

import os
import shlex
import time
from dataclasses import replace
from pathlib import Path

import click

from affinity.errors import InputError, RunError
from affinity.filesystem import check_writable
from affinity.picture import picture
from affinity.plan import Request
from cputrain.cli.options import Asked, cluster_of, planning_options, tell_format, with_kinds
from cputrain.run_folder import LOGS, PLAN, write_plan
from mpi.hosts import allocated_hosts
from mpi.job import Job
from mpi.launch import bound, start
from mpi.launcher import Launcher, find_launcher
from mpi.preflight_run import run_preflight
from mpi.rank import MASTER_PORT
from mpi.remote import run_remote
from mpi.run import free_port, run_local


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


def _preflight(job: Job, launcher: Launcher, folder: Path) -> None:
    """Say what is doubtful about the hosts. Raises RunError with all that is wrong."""
    started = time.monotonic()
    verdict = run_preflight(job, launcher, folder / "preflight")
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

    A script that calls torch.distributed.init_process_group() runs as it is.
    """
    asked = _with_real_hosts(with_kinds(asked, kinds))
    here = asked.hosts == ("localhost",)
    remote = not here or asked.launcher not in ("auto", "local")
    _check(asked, here=here, remote=remote, plan_on_host=plan_on_host)
    launcher = find_launcher(asked.launcher, os.environ) if remote else None
    if launcher is not None:
        tell_format(asked, launcher)
    base = Request(pin_threads=pin_threads)
    cluster = cluster_of(asked, base, cmd)
    folder = output or Path(f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}")
    fabric = () if here else asked.network.settings
    job = Job(
        kinds=cluster.kinds,
        command=cmd,
        plan_path=folder / PLAN,
        log_dir=folder / LOGS,
        binder=asked.bind,
        verify=not no_verify,
        keep_env=keep_env,
        plan_on_host=plan_on_host,
        master_port=free_port() if here else MASTER_PORT,
        # What the user has set wins, and has to reach the other hosts, too: not every launcher hands it on.
        variables=tuple((name, os.environ.get(name, value)) for name, value, _ in fabric),
    )
    if dry_run:
        argv = bound(job) if launcher is None else start(job, launcher, bound(job), folder).argv
        for kind in job.kinds:
            click.echo(picture(kind.plan) + "\n")
        click.echo(f"command{', for each worker' if launcher is None else ''}\n  {shlex.join(argv)}")
        return 0
    check_writable(folder, "--output")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"output {folder} is there already: name another folder")
    for warning in (*cluster.warnings, *(text for kind in cluster.kinds for text in kind.plan.warnings)):
        click.echo(f"warning: {warning}", err=True)
    if launcher is not None:
        if preflight or (preflight is None and len(job.hosts) > 1):
            _preflight(job, launcher, folder)
        return run_remote(job, launcher, folder)
    write_plan(job.plan_path, job.plan)
    return run_local(job)


def _check(asked: Asked, *, here: bool, remote: bool, plan_on_host: bool) -> None:
    """Raise InputError where options exclude each other."""
    if asked.machine != "this" and here:
        raise InputError("launch runs on real hosts: leave --machine out, or name with --hosts those that are such")
    if asked.launcher == "local" and not here:
        raise InputError("--launcher local starts workers on this host only: leave it or --hosts out")
    if asked.launcher == "torchrun" and not here:
        raise InputError("torchrun has to be started on each host: run there what cputrain plan prints, or use mpirun")
    if asked.bind == "launcher" and not remote:
        raise InputError("--bind launcher needs a launcher: name one with --launcher")
    if plan_on_host and asked.share:
        raise InputError("--share and --plan-on-host exclude each other: leave one out")
    if plan_on_host and (not isinstance(asked.ppn, int) or asked.bind == "launcher"):
        raise InputError("--plan-on-host needs --ppn N, the same on every host, and no --bind launcher")
