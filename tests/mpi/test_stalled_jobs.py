"""Real jobs in which one rank is held up: the message names it, its host and its line of code within 14 seconds.

Each row is held up in another way, at another moment, under another backend, transport, number of ranks and kind of
program (tests/support/stalls.py). Three of them are in `make test`, with less patience; all combinations are nightly.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

import pytest

from _cputrain_autoload import STACK_SIGNAL
from tests.support.ccl_jobs import needs_ccl
from tests.support.commands import CORES, HANGS_S, mpi_path, needs_two_cores
from tests.support.forked import ROOT, Process, forked, printed, writing
from tests.support.stalls import WAYS

pytestmark = [pytest.mark.processes, needs_two_cores]
SAID = re.compile(r"^(?:cputrain: )?(.*(?:ha(?:s|ve) waited|has been stopped|ha(?:s|ve) been idle) .*)$", re.MULTILINE)
WITHIN_S = 14.0
Row = tuple[str, str, int, str, str]  # launcher, backend, number of ranks, phase, way
PHASES = ("start", "first", "step", "backward", "handle", "barrier", "data", "evaluation", "checkpoint")
QUICKLY: tuple[Row, ...] = (
    ("local", "gloo", 2, "step", "sleep"),
    ("local", "gloo", 2, "backward", "lock"),
    ("local", "ccl", 2, "barrier", "pipe"),
)
SOME: tuple[Row, ...] = (
    ("local", "ccl", 2, "step", "loop"),
    ("local", "ccl", 2, "backward", "page"),
    ("local", "ccl", 4, "barrier", "pipe"),
    ("local", "ccl", 2, "evaluation", "call-with-gil"),
    ("local", "gloo", 2, "start", "call"),
    ("local", "gloo", 4, "step", "stop"),
    ("local", "gloo", 2, "handle", "sleep"),
    ("local", "gloo", 2, "checkpoint", "pipe"),
    ("intelmpi", "ccl", 2, "step", "lock"),
    ("intelmpi", "ccl", 2, "data", "sleep"),
)
# A command of cputrain that does not wait as long as others before it names a rank.
IMPATIENT = """
import runpy, sys
from cputrain.mpi.supervise import activity, ranks, stalls
from tests.support.fork_server import fork_ranks
stalls.WAITING_S = 3.0
activity.READ_S = ranks.READ_S = 0.5
fork_ranks()
sys.argv[0] = "cputrain"
runpy.run_module("cputrain", run_name="__main__", alter_sys=True)
"""


def start(row: Row, place: Path, stack: ExitStack, *, at_once: bool) -> Process:
    """Start a job; its ranks are forked, except those of Intel MPI's agents, which ask their descendants for stacks."""
    launcher, backend, ranks, phase, way = row
    place.mkdir(parents=True)
    many = ("--oversubscribe",) if ranks > CORES else ()
    program = (sys.executable, "-m", "tests.support.stalls", backend, phase, way)
    words = ("launch", "--launcher", launcher, "--ppn", str(ranks), *many, "--output", "o", "--", *program)
    env = {"PYTHONPATH": str(ROOT)}
    if launcher == "local":
        command = ("-c", IMPATIENT) if at_once else ("-m", "cputrain")
        return stack.enter_context(forked(*command, *words, cwd=place, **env))
    whole, argv = {**os.environ, **env, **mpi_path(launcher)}, (sys.executable, "-m", "cputrain", *words)
    return stack.enter_context(writing(lambda out, err: Popen(argv, cwd=place, env=whole, stdout=out, stderr=err)))


def told(jobs: Sequence[Process]) -> dict[int, tuple[float, str]]:
    """Return for each job the seconds from the moment at which a rank is held up to the line about it, and the line; or
    all that it printed if it ends without such a line."""
    until, found = time.monotonic() + HANGS_S, dict[int, tuple[float, str]]()
    while len(found) < len(jobs):
        for number in [number for number in range(len(jobs)) if number not in found]:
            out, err = printed(jobs[number])
            held, said = re.search(r"held up ([\d.]+)", out), SAID.search(err)
            if held and said:
                found[number] = time.time() - float(held[1]), said[1]
            elif jobs[number].poll() is not None or time.monotonic() > until:
                found[number] = 0.0, f"{out}\n{err}"
        time.sleep(0.2)
    return found


def check(row: Row, seconds: float, line: str) -> None:
    _, _, ranks, phase, way = row
    rank = 0 if phase == "checkpoint" else ranks - 1
    assert 0.0 < seconds < WITHIN_S, (row, seconds, line)
    if way == "stop":
        assert line.startswith(f"rank {rank} on ") and "has been stopped for" in line, (row, line)
        return
    # How long a thread that is not the main thread waits for a core is unknown, so it may be slow on a busy host.
    busy = "(computes|is slow)" if phase == "data" else "computes"
    doing = {"loop": busy, "page": "(is blocked|is slow)"}.get(way, "is blocked")
    assert re.search(rf" ha(s|ve) waited \d+ s for rank {rank} on \S+, which {doing} ", line), (row, line)
    # In cputrain.train a thread reads the data, for which the main thread waits.
    at = "is at .*, its data thread at" if phase == "data" else "is at"
    assert re.search(rf"\(rank {rank} {at} .*tests/support/stalls.py:", line), (row, line)


def name_the_ranks(rows: Sequence[Row], place: Path, *, at_once: bool = False) -> None:
    """Run jobs at the same time, as they mostly wait, and check what is said of each."""
    with ExitStack() as stack:
        jobs = [start(row, place / str(number), stack, at_once=at_once) for number, row in enumerate(rows)]
        found = told(jobs)
        for job in jobs:
            job.send_signal(signal.SIGTERM)
    for number, row in enumerate(rows):
        check(row, *found[number])


@needs_ccl
def test_ranks_that_are_held_up_are_named(tmp_path: Path) -> None:
    name_the_ranks(QUICKLY, tmp_path, at_once=True)


HELD_UP = """
import faulthandler, os, sys
from _cputrain_autoload import STACK_SIGNAL
from tests.support.stalls import held_up
faulthandler.register(STACK_SIGNAL, all_threads=False)
held_up(sys.argv[1])
"""


def test_a_rank_is_still_held_up_after_its_stack_has_been_read() -> None:
    """Else the others go on, and what their stacks then show is not what they waited for."""
    idle = [way for way in WAYS if way not in ("stop", "page", "loop")]
    with ExitStack() as stack:
        jobs = [stack.enter_context(forked("-c", HELD_UP, way, RANK="0", WORLD_SIZE="1")) for way in idle]
        for job in jobs:
            until(lambda job=job: "held up" in printed(job)[0])
            time.sleep(0.2)
            job.send_signal(STACK_SIGNAL)
            until(lambda job=job: "stalls.py" in printed(job)[1])
        time.sleep(0.3)
        assert {way: job.poll() for way, job in zip(idle, jobs, strict=True)} == dict.fromkeys(idle)


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + HANGS_S
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.02)


@needs_ccl
@pytest.mark.long
@pytest.mark.parametrize("row", SOME, ids=lambda row: "-".join(map(str, row)))
def test_a_rank_that_is_held_up_is_named_in_time(row: Row, tmp_path: Path) -> None:
    name_the_ranks([row], tmp_path)


@needs_ccl
@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["ccl", "gloo"])
@pytest.mark.parametrize("launcher", ["local", "intelmpi"])
def test_a_rank_is_named_in_all_ways(launcher: str, backend: str, ranks: int, phase: str, tmp_path: Path) -> None:
    ways = list(WAYS)
    for first in range(0, len(ways), 2):  # more jobs at once would need more cores
        rows = [(launcher, backend, ranks, phase, way) for way in ways[first : first + 2]]
        name_the_ranks(rows, tmp_path / str(first))
