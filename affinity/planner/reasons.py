"""What a plan records beside its values: the reason for each of them, and the CPUs that it leaves out."""

from dataclasses import dataclass

SET = "set by the recipe or an option"  # the reason for a value that neither a profile, a tuned plan nor a rule chose


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One decision, or a figure behind decisions: what it is, its value as shown, and why.

    Planner stages return their values together with these.
    """

    what: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Allowed PUs that no worker gets, and why."""

    pus: tuple[int, ...]
    why: str
