"""Signals in the process that holds a job: SIGINT and SIGTERM as an exception, SIGUSR1 passed on to the ranks."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PREEMPTION_SIGNAL = signal.SIGUSR1  # sent by a batch system when the job's time is nearly up


class InterruptedBySignalError(Exception):
    """This process has received a stop signal (its number is in args[0])."""


@contextmanager
def interruptible(
    preempt: Callable[[], None] = lambda: None, first_stop: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Raise InterruptedBySignalError at each stop signal, wherever the process is, and call `preempt` at a preemption
    signal; the handlers are restored afterwards. With `first_stop`, that is called at the first stop signal instead."""
    calls = [first_stop] if first_stop is not None else []

    def stop(number: int, _frame: FrameType | None) -> None:
        if not calls:
            raise InterruptedBySignalError(number)
        calls.pop()(number)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
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
