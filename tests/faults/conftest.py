"""What the faults share: images, a finished training to copy, and the table of what was seen."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fault import Seen
from tests.faults.faults import FAULTS
from tests.faults.place import Place
from tests.faults.table import DOCUMENTED, table
from tests.support.images import write_images

SEEN = pytest.StashKey[dict[str, Seen | None]]()


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("shared") / "images", train=12, val=40)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Path:
    """A training of one rank that has done 20 steps and has the checkpoints of steps 10 and 20."""
    place = Place(tmp_path_factory.mktemp("template"), Path)
    shutil.copytree(images, place.folder / "images")
    with place.training("max_steps=20", ppn=1) as run:
        assert run.end() == 0, run.text
    return place.run


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, images: Path) -> Place:
    shutil.copytree(images, tmp_path / "images")
    return Place(tmp_path, lambda: request.getfixturevalue("template"))


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest) -> Iterator[dict[str, Seen | None]]:
    """What became of the runs, by the fault's name; None where it was not what is expected. At the end the table is
    rewritten, if --update-golden is given."""
    found = request.config.stash[SEEN] = {}
    yield found
    if request.config.getoption("--update-golden"):
        DOCUMENTED.write_text(table(FAULTS, found, DOCUMENTED.read_text() if DOCUMENTED.is_file() else ""))


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of what was seen."""
    if found := config.stash.get(SEEN, {}):
        terminalreporter.section("faults and what became of the runs")
        terminalreporter.write(table(FAULTS, found, ""))
