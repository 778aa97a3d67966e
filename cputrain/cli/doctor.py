"""cputrain doctor: what is really the case, and what to do about it."""

import click

from affinity.errors import InputError
from affinity.running import look_at, planned_pids, report


@click.group("doctor")
def command() -> None:
    """Compare what was planned with what is."""


@command.command("affinity")
@click.argument("pids", nargs=-1, type=click.IntRange(1), metavar="[PID]...")
def affinity(pids: tuple[int, ...]) -> int:
    """Plan against fact of running processes: PUs of every thread, memory by NUMA node.

    Without PID: every process on this host that a plan has bound. Exit status 1 where one differs from its plan.
    """
    found = pids or planned_pids()
    if not found:
        raise InputError("no process here was bound by a plan: start one with cputrain launch, or name its pid")
    processes = [look_at(pid) for pid in found]
    click.echo(report(processes))
    return int(any(process.strays or process.remote_bytes for process in processes))
