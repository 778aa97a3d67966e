"""SIGINT and SIGTERM as an exception in the process that holds a job."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)


class InterruptedBySignalError(Exception):
    """The launcher was told to stop (signal number in args[0])."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise InterruptedBySignalError at each stop signal, wherever the process is; afterwards as it was before."""
    before = {number: signal.signal(number, _interrupt) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise InterruptedBySignalError(number)
