"""The finding of one check."""

from collections.abc import Sequence
from dataclasses import dataclass

from affinity.wording import counted

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was checked, what was found, and what to do about it; "" where nothing is to be done.

    The status is OK, WARNING (slower or less than possible) or ERROR (something does not work).
    """

    name: str
    status: str
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Check:
    """A check without a finding."""
    return Check(name=name, status=OK, found=found)


def warning(name: str, found: str, remedy: str) -> Check:
    """Something is slower or less than it could be."""
    return Check(name=name, status=WARNING, found=found, remedy=remedy)


def error(name: str, found: str, remedy: str) -> Check:
    """Something does not work."""
    return Check(name=name, status=ERROR, found=found, remedy=remedy)


def checks_text(checks: Sequence[Check]) -> str:
    """A line for each check, and below it the remedy where there is one; a summary at the end."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<7}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    counts = [sum(check.status == status for check in checks) for status in (OK, WARNING, ERROR)]
    return "\n".join([*lines, f"\n{counts[0]} ok, {counted(counts[1], 'warning')}, {counted(counts[2], 'error')}"])
