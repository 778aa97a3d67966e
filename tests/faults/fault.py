"""A fault: what is done to a run, and what must become of it."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.place import Place

GOES_ON = None
KILLED = -9
OUTCOMES = {
    KILLED: "is gone, with all its processes",
    GOES_ON: "goes on",
    0: "goes on to its end",
    1: "ends with status 1",
    2: "is refused with status 2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What became of a run: its exit status (None: it goes on), what it printed, the seconds from the fault until then.

    `lost` counts the steps that a resumed run does again; None where there is nothing to lose.
    """

    status: int | None
    text: str
    seconds: float
    lost: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a kind, and the function that causes it in a folder of its own.

    The run has to end with `status`, print `says` (all of these texts), and lose at most `loses` steps; within
    `within_s` seconds, where it is a matter of seconds that the fault is found.

    `nightly` cases are left out by .ci/run, as others exercise the same code.
    """

    kind: str
    name: str
    cause: Callable[[Place], Seen]
    status: int | None
    says: tuple[str, ...] = ()
    within_s: float | None = None
    loses: int | None = None
    nightly: bool = False

    @property
    def outcome(self) -> str:
        """What becomes of the run, in words."""
        if self.status is not None and self.status > 128:
            return f"saves and ends with status {self.status}"
        return OUTCOMES[self.status]


def problems(fault: Fault, seen: Seen) -> list[str]:
    """What is not as it has to be; none where all is."""
    text = " ".join(seen.text.split())
    found = [f"it does not say {part!r}" for part in fault.says if part not in text]
    found += [
        f"it prints {noise!r}" for noise in ("Traceback (most recent call last)", "frame #0: ") if noise in seen.text
    ]
    if seen.status != fault.status:
        found.append(f"status {seen.status} instead of {fault.status}")
    if fault.within_s is not None and seen.seconds > fault.within_s:
        found.append(f"it took {seen.seconds:.1f} s instead of {fault.within_s:g} s at most")
    if (seen.lost is None) != (fault.loses is None) or (seen.lost or 0) > (fault.loses or 0):
        found.append(f"{seen.lost} steps lost instead of {fault.loses} at most")
    return found
