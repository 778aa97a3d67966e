"""Two plans -> the differences between them, a line each."""

from dataclasses import fields

from affinity.errors import Wording, as_field
from affinity.planner.plan import Plan, WorkerPlan
from affinity.planner.reasons import Reason
from affinity.topology.cpuset import format_list


def plan_differences(a: Plan, b: Plan, *, wording: Wording = as_field) -> list[str]:
    """The changes from a to b, as lines to read; empty where the plans are the same."""
    a, b = a.worded(wording), b.worded(wording)
    lines = [
        f"machine {name}: {before} -> {after}"
        for name, before, after in (
            ("name", a.machine.name, b.machine.name),
            ("model", a.machine.model, b.machine.model),
            ("cores", len(a.machine.cores), len(b.machine.cores)),
            ("allowed CPUs", format_list(a.machine.allowed_pus), format_list(b.machine.allowed_pus)),
        )
        if before != after
    ]
    for rank in range(max(len(a.workers), len(b.workers))):
        if rank >= len(b.workers):
            lines.append(f"worker {rank}: removed")
        elif rank >= len(a.workers):
            worker = b.workers[rank]
            lines.append(f"worker {rank}: added on CPUs {format_list(worker.pus)} with {worker.intra_op} threads")
        else:
            lines += [f"worker {rank} {line}" for line in _worker_differences(a.workers[rank], b.workers[rank])]
    before_unused = {item.why: format_list(item.pus) for item in a.unused}
    after_unused = {item.why: format_list(item.pus) for item in b.unused}
    lines += [f"unused CPUs {line}" for line in _changes(before_unused, after_unused)]
    lines += _reason_differences(a.reasons, b.reasons)
    lines += [f"warning removed: {text}" for text in a.warnings if text not in b.warnings]
    lines += [f"warning added: {text}" for text in b.warnings if text not in a.warnings]
    return lines


def _worker_differences(a: WorkerPlan, b: WorkerPlan) -> list[str]:
    lines = []
    for field in fields(WorkerPlan):
        before, after = getattr(a, field.name), getattr(b, field.name)
        if field.name == "env":
            lines += _changes(dict(before), dict(after))
        elif before != after:
            shown = (format_list(v) or "none" if isinstance(v, tuple) else v for v in (before, after))
            lines.append("{}: {} -> {}".format(field.name, *shown))
    return lines


def _reason_differences(a: tuple[Reason, ...], b: tuple[Reason, ...]) -> list[str]:
    """The decisions that changed, and why."""
    before, after = _values(a), _values(b)
    why = {reason.what: reason.why for reason in b}
    changed = (what for what in dict.fromkeys((*before, *after)) if before.get(what) != after.get(what))
    return [
        f"{what}: {before.get(what, 'none')} -> {after.get(what, 'none')}" + (f" ({why[what]})" if what in why else "")
        for what in changed
    ]


def _values(reasons: tuple[Reason, ...]) -> dict[str, str]:
    """Each decision -> its values, those of several workers together."""
    values: dict[str, str] = {}
    for reason in reasons:
        values[reason.what] = f"{values[reason.what]}, {reason.value}" if reason.what in values else reason.value
    return values


def _changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [
        f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]
