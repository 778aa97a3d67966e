"""Plans of many machines as a table: one row for each description in a folder."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import InputError, describe, worded
from affinity.planner.plan import Plan, Request, plan_machine
from affinity.planner.runtime import Runtime
from affinity.text_table import align_columns
from affinity.topology.catalog import described_machines, find_machine
from cputrain.cli.setting_names import wording_of

HEAD = ("machine", "sockets", "nodes", "cores", "PUs", "workers x threads", "comm", "loader", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """A description, by its path in the folder; its plan, or why there is none."""

    name: str
    plan: Plan | None
    error: str | None


def plan_folder(folder: Path, request: Request) -> tuple[MachineRow, ...]:
    """Plan every machine that is described under a folder. Raises InputError where there is none."""
    return tuple(_planned(path, str(path.relative_to(folder)), request) for path in described_machines(folder))


def machine_table(rows: Iterable[MachineRow]) -> str:
    """Cores and PUs are those that may be used, comm and loader count PUs of a worker; warnings and errors follow their
    row, indented."""
    rows, wording = tuple(rows), wording_of(["plan"])
    empty = ("-",) * (len(HEAD) - 1)
    head, *lines = align_columns(
        [HEAD, *((row.name, *(_cells(row.plan) if row.plan else empty)) for row in rows)]
    ).splitlines()
    shown = [head]
    for row, line in zip(rows, lines, strict=True):
        warnings = row.plan.warnings if row.plan else ()
        notes = [f"warning: {worded(text, wording)}" for text in warnings] if row.plan else [f"error: {row.error}"]
        shown += [line, *(f"  {note}" for note in notes)]
    return "\n".join(shown)


def _planned(path: Path, name: str, request: Request) -> MachineRow:
    try:
        return MachineRow(name=name, plan=plan_machine(find_machine(str(path)), request, Runtime()), error=None)
    except InputError as error:
        message = describe(error, wording_of(["plan"])).replace(str(path), path.name)
        return MachineRow(name=name, plan=None, error=message)


def _cells(plan: Plan) -> tuple[str, ...]:
    machine, cores = plan.machine, plan.machine.allowed_cores
    sizes = Counter(worker.intra_op for worker in plan.workers)
    return (
        str(len({core.package for core in cores})),
        str(len(machine.allowed_nodes)),
        str(len(cores)),
        str(len(machine.allowed_pus)),
        ", ".join(f"{workers} x {threads}" for threads, workers in sorted(sizes.items(), reverse=True)),
        _span(len(worker.comm_pus) for worker in plan.workers),
        _span(len(worker.loader_pus) for worker in plan.workers),
        ", ".join(sorted({worker.memory_policy for worker in plan.workers})),
    )


def _span(counts: Iterable[int]) -> str:
    found = sorted(counts)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]}-{found[-1]}"
