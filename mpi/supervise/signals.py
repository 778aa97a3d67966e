"""Signals in the process that holds a job: SIGINT and SIGTERM as an exception, SIGUSR1 passed on to the ranks."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PREEMPTION_SIGNAL = signal.SIGUSR1  # sent by a batch system when the job's time is nearly up

_interruptions: list[int] = []  # stop signals that ended the work of the surrounding `interruptible`


class InterruptedBySignalError(Exception):
    """This process has received a stop signal (its number is in args[0])."""


@contextmanager
def interruptible(
    preempt: Callable[[], None] = lambda: None, first_stop: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Raise InterruptedBySignalError at a stop signal, wherever the process is, and call `preempt` at a preemption
    signal; the handlers are restored afterwards. With `first_stop`, that is called at the first stop signal, and the
    second one raises. Later ones raise nothing: `stopped_again` tells of them."""
    _interruptions.clear()
    calls = [first_stop] if first_stop is not None else []

    def stop(number: int, _frame: FrameType | None) -> None:
        if calls:
            calls.pop()(number)
        else:
            interrupt(number)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    before[PREEMPTION_SIGNAL] = signal.signal(PREEMPTION_SIGNAL, lambda _number, _frame: preempt())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(number: int) -> None:
    """Raise InterruptedBySignalError, but once: raised again while the process stops its ranks, it would leave some."""
    _interruptions.append(number)
    if len(_interruptions) == 1:
        raise InterruptedBySignalError(number)


def stopped_again() -> bool:
    """Whether a stop signal has come since the one that interrupted: what that began is to be ended at once."""
    return len(_interruptions) > 1


def ignore_stop_signals() -> None:
    """Ignore further stop signals, until the end of the surrounding `interruptible`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
