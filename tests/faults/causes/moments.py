"""When something is done to a training, and to which of its processes."""

import os
import time
from collections.abc import Callable, Iterable

from tests.faults.fault import Seen
from tests.faults.place import SAVED_EVERY, Place, Running, alive

Moment = Callable[[Place, Running], None]
Victims = Callable[[Running], Iterable[int]]
MAX_LOST_STEPS = 2 * SAVED_EVERY  # steps: one checkpoint may be in the making


def starting(place: Place, run: Running) -> None:
    run.wait_for(lambda: len(run.ranks()) == 2)


def after(step: int) -> Moment:
    def moment(place: Place, run: Running) -> None:
        run.wait_for(lambda: place.step >= step)

    return moment


def saving(place: Place, run: Running) -> None:
    run.wait_for(lambda: place.step > SAVED_EVERY and any((place.run / "checkpoints").glob(".step-*.partial")))


def evaluating(place: Place, run: Running) -> None:
    """The last step of an epoch is logged, and the epoch, which is evaluated first, is not."""
    run.wait_for(lambda: place.step >= 8 and place.events[-1:] == ["step"] and place.step % 4 == 0)


def at_the_end(place: Place, run: Running) -> None:
    """The last step is logged, and what follows it is not."""
    run.wait_for(lambda: place.step == 20 and place.events[-1:] == ["step"])


def rank(number: int) -> Victims:
    return lambda run: [run.ranks()[number]]


def launcher(run: Running) -> list[int]:
    return [run.process.pid]


def everything(run: Running) -> list[int]:
    return [run.process.pid, *run.ranks().values()]


def signaled(
    number: int, victims: Victims, moment: Moment, *settings: str, real: bool = False
) -> Callable[[Place], Seen]:
    """Send a signal at a moment, and wait until nothing is left of the run."""

    def cause(place: Place) -> Seen:
        with place.training(*settings, real=real) as run:
            moment(place, run)
            below = run.ranks().values()
            run.begun = time.monotonic()
            for pid in victims(run):
                os.kill(pid, number)
            status = run.end()
            while any(map(alive, below)):
                time.sleep(0.01)
            return Seen(status=status, text=run.text, seconds=run.seconds, lost=place.lost)

    return cause
