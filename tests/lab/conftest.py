"""The lab's guests: booted once for all tests, one for each core of this host at a time."""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab import boot
from tests.lab.table import table
from tests.lab.topologies import TOPOLOGIES

KERNELS = ("6.1", "newer")
STARTED = pytest.StashKey[dict[tuple[str, str], Future[dict[str, Any]]]]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """The guests that the selected tests need, by topology and kernel: their results are read when they are needed."""

    boots: dict[tuple[str, str], Future[dict[str, Any]]]

    def results(self, topology: str, kernel: str) -> dict[str, Any]:
        """What tests.lab.guest.main has found there."""
        return self.boots[topology, kernel].result()


@pytest.fixture(scope="session", autouse=True)
def _needs_qemu_and_kernels() -> None:
    """Name what is absent."""
    if lacking := boot.missing(KERNELS):
        pytest.skip(reason=lacking)


@pytest.fixture(scope="session")
def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _needs_qemu_and_kernels: None
) -> Iterator[Lab]:
    """Start all guests that the selected tests name as topology and kernel."""
    wanted = [getattr(item, "callspec", None) for item in request.session.items]
    cases = dict.fromkeys(
        (spec.params["topology"], kernel)
        for spec in wanted
        if spec and "topology" in spec.params
        for kernel in ([spec.params["kernel"]] if "kernel" in spec.params else KERNELS)
    )
    if cases:
        boot.compile_modules("tests.lab.guest.main", "tests.lab.guest.probe")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        boots = {case: pool.submit(_checked, *case, tmp_path_factory.mktemp("lab")) for case in cases}
        request.config.stash[STARTED] = boots
        yield Lab(boots=boots)
        pool.shutdown(cancel_futures=True)


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of what was checked, the kernels, and how long each guest took."""
    boots = config.stash.get(STARTED, {})
    found = {case: boot.result() for case, boot in boots.items() if boot.done() and not boot.exception()}
    if not found:
        return
    terminalreporter.section("plans and bindings on emulated machines")
    terminalreporter.write_line(table({case: results["problems"] for case, results in found.items()}))
    releases = {kernel: results["release"] for (_, kernel), results in found.items()}
    terminalreporter.write_line(f"kernels: {', '.join(f'{name} is {release}' for name, release in releases.items())}")
    seconds = sorted(((results["wall_s"], *case) for case, results in found.items()), reverse=True)
    terminalreporter.write_line(f"seconds: {', '.join(f'{t:.0f} {name} {kernel}' for t, name, kernel in seconds)}")


def _checked(topology: str, kernel: str, exchange: Path) -> dict[str, Any]:
    command = f"{shlex.quote(sys.executable)} -S -m tests.lab.guest.main {topology}"
    started = time.monotonic()
    boot.run(boot.Guest(topology=TOPOLOGIES[topology], kernel=kernel, command=command, exchange=exchange))
    return {**json.loads((exchange / "results.json").read_text()), "wall_s": time.monotonic() - started}
