"""cputrain doctor: check the binding of running processes, and oneCCL."""

import os

import click

from affinity.kernel.running import compare_running


@click.group("doctor")
def command() -> None:
    """Check the binding of running processes, or oneCCL."""


@command.command("affinity")
@click.argument("pids", nargs=-1, type=click.IntRange(1), metavar="[PID]...")
def affinity(pids: tuple[int, ...]) -> int:
    """Compare running processes with their plan: the CPUs of every thread, memory by NUMA node.

    Without PID: every process on this host that a plan has bound. The exit status is 1 if one differs from its plan.
    """
    text, status = compare_running(pids)
    click.echo(text)
    return status


@command.command("ccl")
def ccl() -> None:
    """Find oneCCL, compile its backend if necessary, and time an all-reduce over two ranks of this host.

    Run this once on a cluster's login host: its jobs then use the compiled backend.
    """
    from cputrain.comm.ccl.build import ensure_built
    from cputrain.comm.ccl.check import time_two_ranks
    from cputrain.comm.ccl.libraries import find_libraries

    libraries = find_libraries(os.environ)
    click.echo(f"oneCCL {'.'.join(map(str, libraries.version))}  {libraries.ccl}")
    click.echo(f"Intel MPI     {libraries.mpi}")
    click.echo(f"libfabric     {libraries.fabric}")
    click.echo(f"backend       {ensure_built(libraries, os.environ)}")
    for size, seconds in time_two_ranks().items():
        click.echo(f"all-reduce    {size / 1024:>8,.0f} KiB over 2 ranks {1000 * seconds:8.3f} ms")
