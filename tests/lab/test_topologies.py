"""Every check on every emulated machine, on an old and on a newer kernel."""

import pytest

from tests.lab import boot
from tests.lab.conftest import KERNELS, Lab
from tests.lab.guest.main import CHECKS
from tests.lab.table import merged, table
from tests.lab.topologies import SLOW_TO_BOOT, TOPOLOGIES

SLOW = {name: [pytest.mark.slow] if name in SLOW_TO_BOOT else [] for name in TOPOLOGIES}
# .ci/run boots each machine with the newer kernel, except those of which others have all: the host of the tests itself,
# and snc2. With the older one it boots the machine with all kinds of memory.
BOTH, COVERED = ("hbm-cxl",), ("one-node", "two-sockets")
RARELY = {name: [] if name in BOTH else [pytest.mark.nightly] for name in TOPOLOGIES}


def rarely(topology: str, kernel: str) -> list[pytest.MarkDecorator]:
    return RARELY[topology] if kernel == KERNELS[0] or topology in COVERED else []


CASES = [
    pytest.param(name, kernel, id=f"{name}-{kernel}", marks=[*marks, *rarely(name, kernel)])
    for name, marks in SLOW.items()
    for kernel in KERNELS
]
DOCUMENTED = boot.ROOT / "tests/golden/lab-table.md"


@pytest.mark.parametrize(("topology", "kernel"), CASES)
def test_every_check_holds(lab: Lab, topology: str, kernel: str) -> None:
    problems = lab.results(topology, kernel)["problems"]
    assert problems.keys() == CHECKS.keys()
    assert {name: problem for name, problem in problems.items() if problem} == {}


@pytest.mark.parametrize("topology", [pytest.param(name, marks=[*SLOW[name], *RARELY[name]]) for name in SLOW])
def test_both_kernels_have_the_same_plan(lab: Lab, topology: str) -> None:
    old, new = (lab.results(topology, kernel)["plan"] for kernel in KERNELS)
    assert old["workers"] == new["workers"]
    assert old["warnings"] == new["warnings"]


@pytest.mark.parametrize(("topology", "kernel"), CASES)
def test_the_documentation_says_what_was_found(
    lab: Lab, topology: str, kernel: str, pytestconfig: pytest.Config
) -> None:
    """A machine that the documented table lacks is added by --update-golden."""
    documented = DOCUMENTED.read_text()
    updated = merged(documented, table({(topology, kernel): lab.results(topology, kernel)["problems"]}))
    if pytestconfig.getoption("--update-golden"):
        DOCUMENTED.write_text(updated)
        return
    assert {*documented.splitlines()} <= {*updated.splitlines()}
