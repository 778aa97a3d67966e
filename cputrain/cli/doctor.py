"""`cputrain doctor` and `cputrain env`, which work even if pydantic or torch is broken."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from cputrain.affinity.bound_plan import Running, binding_report, running_processes
from cputrain.affinity.errors import RunError
from cputrain.cli.output import format_option, only_results_on_stdout, print_json
from cputrain.cli.words import FullSummaryGroup
from cputrain.host_checks import ERROR, checks_text

DOCTOR_TIMEOUT_S = 60.0  # for imports from a slow disk
ENV_TIMEOUT_S = 2.0  # for imports: the command ends within 3 s


@click.group("doctor", cls=FullSummaryGroup, invoke_without_command=True)
@format_option
@click.pass_context
def doctor_command(context: click.Context, output_format: str) -> int:
    """Check this host: processor, clock, memory, limits, /dev/shm, libraries, MPI, network, running processes.

    Each line is ok, a warning (slower or less than possible) or an error (something does not work), with a fix. The
    exit status is 1 if there is an error. The commands check one thing thoroughly.
    """
    if context.invoked_subcommand is not None:
        return 0
    from cputrain.doctor import probe_results, software_checks, start_probe
    from cputrain.host_checks import current_limits, host_checks, shm_size

    env = os.environ
    Path.cwd()  # raises if it has been deleted: even an intact torch cannot be imported then
    probe = start_probe(env)
    of_host = tuple(host_checks(Path("/"), current_limits(), shm_size()))
    checks = (*of_host, *software_checks(probe_results(probe, DOCTOR_TIMEOUT_S), env))
    status = int(any(check.status == ERROR for check in checks))
    if output_format == "json":
        print_json({"status": status, "checks": [asdict(check) for check in checks]})
    else:
        click.echo(checks_text(checks))
    return status


@doctor_command.command("affinity")
@click.argument("pids", nargs=-1, type=click.IntRange(1), metavar="[PID]...")
@format_option
def affinity(pids: tuple[int, ...], output_format: str) -> int:
    """Compare running processes with their plan: the CPUs of every thread, memory by NUMA node.

    Without PID, compare every process on this host that a plan has bound. Exit with status 1 if one differs.
    """
    processes = running_processes(pids)
    if output_format == "json":
        print_json({"processes": list(map(_as_json, processes))})
    else:
        click.echo(binding_report(processes))
    return int(any(process.differs for process in processes))


def _as_json(process: Running) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "command": process.command,
        "worker": None if process.worker is None else process.worker.local_rank,
        "planned_cpus": None if process.worker is None else list(process.worker.pus),
        "cpus": sorted({pu for thread in process.threads for pu in thread.pus}),
        "threads": len(process.threads),
        "memory_bytes": {str(node): size for node, size in sorted(process.memory_bytes.items())},
        "misplaced_threads": [{"tid": each.tid, "cpus": list(each.pus)} for each in process.misplaced_threads],
        "remote_bytes": process.remote_bytes,
        "differs": process.differs,
        "differences": list(process.differences),
    }


@doctor_command.command("ccl")
@format_option
def ccl(output_format: str) -> None:
    """Find oneCCL, compile its backend if necessary, and time all-reduces between two ranks of this host.

    Both transports, libfabric and MPI, are measured and the results saved: if a launcher supports both, the ranks of
    one host use the faster one from then on. Run it once on a cluster's login host to compile for its jobs.
    """
    from statistics import median

    from cputrain.comm.ccl.check import records_of, time_transports
    from cputrain.comm.ccl.environment import ensure_extension, find_libraries
    from cputrain.measurements import TITLES, save_measurement

    env = os.environ
    with only_results_on_stdout(output_format):
        libraries = find_libraries(env)
        version = ".".join(map(str, libraries.version))
        click.echo(f"oneCCL {version}  {libraries.ccl}")
        click.echo(f"Intel MPI     {libraries.mpi}")
        click.echo(f"libfabric     {libraries.fabric}")
        backend = ensure_extension(libraries, env)
        click.echo(f"backend       {backend}")
        found, problems = time_transports(libraries, env)
        measured = [
            (transport, size, median(seconds)) for transport, times in found.items() for size, seconds in times.items()
        ]
        for transport, size, seconds in measured:
            figures = f"{size / 1024:>8,.0f} KiB over 2 ranks and {TITLES[transport]:9} {1000 * seconds:8.3f} ms"
            click.echo(f"all-reduce    {figures}")
        for problem in problems:
            click.echo(f"warning: {problem}", err=True)
        try:
            for record in records_of(found):
                click.echo(f"saved in      {save_measurement(record, env)}")
        except RunError as error:  # a cache that another user has written
            click.echo(f"warning: {error}", err=True)
    if output_format == "json":
        paths = {"oneccl": libraries.ccl, "mpi": libraries.mpi, "fabric": libraries.fabric, "backend": backend}
        print_json(
            {
                "version": version,
                **{name: str(path) for name, path in paths.items()},
                "all_reduce": [dict(zip(("transport", "bytes", "seconds"), each, strict=True)) for each in measured],
                "problems": problems,
            }
        )


@click.command("env")
@format_option
def env_command(output_format: str) -> None:
    """Print what a bug report needs: versions, processor, memory, libraries, relevant variables.

    This works even if torch or torchvision cannot be imported, and suggests a fix. Variables whose names suggest a
    secret (TOKEN, PASSWORD, KEY and the like) are listed without their values. `cputrain doctor` checks the host.
    """
    from cputrain.doctor import facts_text, host_facts, probe_results, start_probe, torch_check, torchvision_check

    env = os.environ
    probe = probe_results(start_probe(env), ENV_TIMEOUT_S)
    checks = (torch_check(probe["torch"]), torchvision_check(probe["torchvision"], probe["torch"]))
    found = host_facts(probe, checks, env)
    if output_format == "json":
        print_json(found)
    else:
        click.echo(facts_text(found))
