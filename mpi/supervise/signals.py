"""Signals in the process that holds a job: SIGINT and SIGTERM as an exception, SIGUSR1 passed on to the ranks."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PREEMPTION_SIGNAL = signal.SIGUSR1  # sent by a batch system when the job's time is nearly up


_stops: list[int] = []  # stop signals since the start of the surrounding `interruptible`


class InterruptedBySignalError(Exception):
    """This process has received a stop signal (its number is in args[0])."""


@contextmanager
def interruptible(preempt: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise InterruptedBySignalError at the first stop signal, wherever the process is, and call `preempt` at a
    preemption signal; the handlers are restored afterwards."""
    _stops.clear()
    before = {number: signal.signal(number, _interrupt) for number in STOP_SIGNALS}
    before[PREEMPTION_SIGNAL] = signal.signal(PREEMPTION_SIGNAL, lambda _number, _frame: preempt())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """Ignore further stop signals, until the end of the surrounding `interruptible`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stopped_again() -> bool:
    """Whether a second stop signal has come: what the first one has begun is to be ended at once."""
    return len(_stops) > 1


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _stops.append(number)
    if len(_stops) == 1:  # raised again while the process stops its ranks, it would leave some of them
        raise InterruptedBySignalError(number)
