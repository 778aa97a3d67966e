"""What goes wrong without an error of its own: ranks that compute, read or run something else, and slow ones."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

from tests.faults.fault import GOES_ON, Fault, Seen
from tests.faults.place import SAVED_EVERY, Place, Running
from tests.support.injection import injected_faults

KIND = "silent"


def injected(rank: int, *settings: str, ppn: int = 2, **faults: str) -> Callable[[Place], Seen]:
    """A training in which a rank does what tests/faults/injected says."""

    def cause(place: Place) -> Seen:
        with (
            injected_faults(),
            place.training(*settings, ppn=ppn, real=True, FAULT_RANK=str(rank), **faults) as run,
        ):
            return to_its_end(place, run)

    return cause


def to_its_end(place: Place, run: Running) -> Seen:
    """What becomes of a training that ends by itself; seconds are from its first step."""
    try:
        run.wait_for(lambda: place.step > 0)
        run.begun = time.monotonic()
    except AssertionError:  # refused before
        pass
    status = run.end()
    return Seen(status=status, text=run.text, seconds=run.seconds, lost=place.lost if place.step else None)


def diverging(place: Place) -> Seen:
    with place.training("schedule.peak_rate=1e30", "schedule.start_rate=1e30") as run:
        return to_its_end(place, run)


def unequal(*settings: tuple[str, ...]) -> Callable[[Place], Seen]:
    """Ranks of other settings."""

    def cause(place: Place) -> Seen:
        other = shutil.copytree(place.folder / "images", place.folder / "newer")
        (other / "train/class0/000.jpg").rename(other / "train/class0/900.jpg")
        with place.ranks(*settings) as ranks:
            statuses = [rank.end() for rank in ranks]
            assert len(set(statuses)) == 1, [rank.text for rank in ranks]
            return Seen(status=statuses[0], text=ranks[0].text, seconds=ranks[0].seconds)

    return cause


def busy_neighbor(place: Place) -> Seen:
    """Four processes on the core of rank 1, from its 50th step on."""
    with place.training() as run:
        run.wait_for(lambda: place.step > 50)
        pus = sorted(os.sched_getaffinity(run.ranks()[1]))
        code = f"import os\nos.sched_setaffinity(0, {pus})\nwhile True: pass"
        neighbors = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
        run.begun = time.monotonic()
        try:
            run.wait_for(lambda: re.search("rank 1 on .* as the median rank: other processes use", run.text))
        finally:
            for neighbor in neighbors:
                neighbor.kill()
                neighbor.wait()
        return Seen(status=GOES_ON, text=run.text, seconds=run.seconds)


FLIPPED = ("compare_weights_every_steps=10", "checkpoint.every_steps=25")
FAULTS = (
    Fault(
        kind=KIND,
        name="a flipped bit in the memory of one of two ranks",
        cause=injected(1, *FLIPPED, FAULT_FLIP="40"),
        status=1,
        says=("ranks 0 on", "1 on", "have different weights after step 40 (equal after step 30)"),
        loses=25,
    ),
    Fault(
        kind=KIND,
        name="a flipped bit in the memory of one of three ranks",
        cause=injected(2, *FLIPPED, "plan.oversubscribe=true", ppn=3, FAULT_FLIP="40"),
        status=1,
        says=("rank 2 on", "differs from the 2 other ranks in its weights after step 40"),
        loses=25,
        nightly=True,
    ),
    Fault(
        kind=KIND,
        name="a rank with another version of cputrain",
        cause=injected(1, FAULT_VERSION="0.0.9"),
        status=2,
        says=("rank 1 on", "differs from rank 0 on", "in cputrain: 0.0.9 instead of"),
    ),
    Fault(
        kind=KIND,
        name="a rank with another version of torch",
        cause=injected(1, FAULT_TORCH="2.9.9"),
        status=2,
        says=("rank 1 on", "in torch: 2.9.9 instead of"),
        nightly=True,
    ),
    Fault(
        kind=KIND,
        name="a rank with another recipe",
        cause=unequal((), ("optim.momentum=0.8",)),
        status=2,
        says=("rank 1 on", "in optim.momentum: 0.8 instead of 0.9"),
        nightly=True,
    ),
    Fault(
        kind=KIND,
        name="a rank with another version of the images",
        cause=unequal((), ("data.path=newer",)),
        status=2,
        says=("rank 1 on", "in train images: 36 (checksum"),
        nightly=True,
    ),
    Fault(
        kind=KIND,
        name="other processes on a rank's cores",
        cause=busy_neighbor,
        status=GOES_ON,
        says=("warning: rank 1 on", "as long per step as the median rank", "other processes use"),
    ),
    Fault(
        kind=KIND,
        name="a learning rate with which the loss becomes NaN",
        cause=diverging,
        status=1,
        says=("loss nan at step", "first NaN or Inf in the output of"),
        loses=SAVED_EVERY,
    ),
)
