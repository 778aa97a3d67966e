"""The lab's guests: booted once for all tests, one for each core of this host at a time."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab import boot
from tests.lab.table import table
from tests.lab.topologies import TOPOLOGIES

BOOTS = pytest.StashKey[dict[tuple[str, str], Future[dict[str, Any]]]]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """The guests that the selected tests need, by topology and kernel: their results are read when they are needed."""

    boots: dict[tuple[str, str], Future[dict[str, Any]]]

    def results(self, topology: str, kernel: str) -> dict[str, Any]:
        """What tests.lab.guest.main has found there."""
        return self.boots[topology, kernel].result()


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Start all guests that the selected tests name as topology and kernel."""
    wanted = [getattr(item, "callspec", None) for item in request.session.items]
    cases = dict.fromkeys(
        (spec.params["topology"], spec.params["kernel"]) for spec in wanted if spec and "topology" in spec.params
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        boots = {case: pool.submit(_checked, *case, tmp_path_factory.mktemp("lab")) for case in cases}
        request.config.stash[BOOTS] = boots
        yield Lab(boots=boots)
        pool.shutdown(cancel_futures=True)


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of what was checked."""
    boots = config.stash.get(BOOTS, {})
    found = {case: boot.result()["problems"] for case, boot in boots.items() if boot.done() and not boot.exception()}
    if found:
        terminalreporter.section("plans and bindings on emulated machines")
        terminalreporter.write_line(table(found))


def _checked(topology: str, kernel: str, exchange: Path) -> dict[str, Any]:
    command = f"{shlex.quote(sys.executable)} -m tests.lab.guest.main {topology}"
    boot.run(boot.Guest(topology=TOPOLOGIES[topology], kernel=kernel, command=command, exchange=exchange))
    return json.loads((exchange / "results.json").read_text())
