"""Every check on every emulated machine, on an old and on a newer kernel."""

from collections.abc import Callable

import pytest

from tests.lab import boot
from tests.lab.conftest import Lab
from tests.lab.guest.main import CHECKS
from tests.lab.table import table
from tests.lab.topologies import SLOW_TO_BOOT, TOPOLOGIES

KERNELS = ("6.1", "newer")
CASES = [
    pytest.param(name, kernel, id=f"{name}-{kernel}", marks=[pytest.mark.slow] if name in SLOW_TO_BOOT else [])
    for name in TOPOLOGIES
    for kernel in KERNELS
]


@pytest.fixture(autouse=True)
def _needs_qemu_and_kernels() -> None:
    """Name what is absent."""
    if lacking := boot.missing():
        pytest.skip(reason=lacking)


@pytest.mark.parametrize(("topology", "kernel"), CASES)
def test_every_check_holds(lab: Lab, topology: str, kernel: str) -> None:
    problems = lab.results(topology, kernel)["problems"]
    assert problems.keys() == CHECKS.keys()
    assert {name: problem for name, problem in problems.items() if problem} == {}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_both_kernels_have_the_same_plan(lab: Lab, topology: str) -> None:
    both = [lab.results(topology, kernel) for kernel in KERNELS if (topology, kernel) in lab.boots]
    plans = [result["plan"] for result in both]
    assert all(plan["workers"] == plans[0]["workers"] for plan in plans)
    assert all(plan["warnings"] == plans[0]["warnings"] for plan in plans)


def test_the_documented_table_is_what_was_found(lab: Lab, golden: Callable[[str, str], None]) -> None:
    if len(lab.boots) < len(CASES):
        pytest.skip(reason="only some of the guests were booted")
    golden("lab-table.md", table({case: lab.results(*case)["problems"] for case in lab.boots}))
