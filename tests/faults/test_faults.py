"""Every fault, and what must become of the run."""

import pytest

from tests.faults.fault import Fault, Seen, problems
from tests.faults.faults import FAULTS
from tests.faults.place import Place

CASES = [
    pytest.param(fault, id=f"{fault.kind}: {fault.name}", marks=(pytest.mark.nightly,) if fault.nightly else ())
    for fault in FAULTS
]


@pytest.mark.parametrize("fault", CASES)
def test_what_becomes_of_the_run(fault: Fault, place: Place, seen: dict[str, Seen | None]) -> None:
    try:
        found = fault.cause(place)
        wrong = problems(fault, found)
    except (Exception, pytest.fail.Exception):
        seen[fault.name] = None
        raise
    seen[fault.name] = None if wrong else found
    assert wrong == [], found.text
