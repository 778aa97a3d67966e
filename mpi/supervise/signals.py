"""Signals in the process that holds a job: SIGINT and SIGTERM as an exception, SIGUSR1 passed on to the ranks."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)
NOTICE = signal.SIGUSR1  # the time is nearly up: a training saves its state and stops


class InterruptedBySignalError(Exception):
    """The launcher was told to stop (signal number in args[0])."""


@contextmanager
def interruptible(pass_on: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise InterruptedBySignalError at each stop signal, wherever the process is, and call `pass_on` at a notice;
    afterwards as it was before."""
    before = {number: signal.signal(number, _interrupt) for number in STOPS}
    before[NOTICE] = signal.signal(NOTICE, lambda _number, _frame: pass_on())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise InterruptedBySignalError(number)
