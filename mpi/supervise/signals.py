"""Signals that stop a job, and waiting that they interrupt."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

AWAY_S = 5.0  # loops look at the clock several times a second


class RunningClock:
    """A monotonic clock that stands still while its process does, so that the silence of others does not count then.

    To be read often: where more than AWAY_S lie between two readings, the process did not run.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._read = monotonic()
        self._away_s = 0.0

    def now(self) -> float:
        """Seconds, of which only differences mean something."""
        read = self._monotonic()
        if read - self._read > AWAY_S:
            self._away_s += read - self._read
        self._read = read
        return read - self._away_s


PREEMPTION_SIGNAL = signal.SIGUSR1  # sent by a batch system when the job's time is nearly up
# From a stop signal to SIGKILL: the ranks may end a step, which takes some ten seconds with large batches, and save
# gigabytes. Job scripts get their notice a little earlier before the time limit.
SAVE_S = 90.0
FAILURE_GRACE_S = 3.0  # the same after a failure, when the other ranks wait in vain for the one that is lost


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a job: those of Ctrl-C, of batch systems, and, but under nohup, of a terminal's end."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if nohup else (signal.SIGHUP,)))


class InterruptedBySignalError(Exception):
    """This process has received a stop signal (its number is in args[0])."""


@dataclass(slots=True)
class _StopSignals:
    """Stop signals that the surrounding `interruptible` has received, the number of the last one, and whether the next
    one raises, one has."""

    received: int = 0
    last: int = 0
    raises: bool = False
    raised: bool = False


_stop_signals = _StopSignals()


@contextmanager
def interruptible(
    preempt: Callable[[], None] = lambda: None, first_stop: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Take stop signals, for `until_interrupted` and `stopped_again`, and call `preempt` at a preemption signal; the
    handlers are restored afterwards. With `first_stop`, that is called at the first stop signal, which does not count.
    Nor does a SIGHUP after another stop signal: nobody repeats it to be heard.
    """
    _stop_signals.received, _stop_signals.raises, _stop_signals.raised = 0, False, False
    begun = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal begun
        again, begun = begun, True
        if again and number == signal.SIGHUP:
            return  # systemd ends sessions by SIGTERM and at once SIGHUP: systemd.kill(5), SendSIGHUP
        if first_stop is not None and not again:
            first_stop(number)
        else:
            interrupt(number)

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    before[PREEMPTION_SIGNAL] = signal.signal(PREEMPTION_SIGNAL, lambda _number, _frame: preempt())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Inside an `interruptible`: the first stop signal raises InterruptedBySignalError here, wherever the process is.

    No signal raises after that, or after this block: what ends the ranks then is not interrupted itself.
    """
    _stop_signals.raises = True
    try:
        yield
    finally:
        _stop_signals.raises = False


def interrupt(number: int) -> None:
    """Count a stop signal, which raises InterruptedBySignalError in `until_interrupted`."""
    _stop_signals.received += 1
    _stop_signals.last = number
    if _stop_signals.raises:
        _raise_last()


def _raise_last() -> NoReturn:
    _stop_signals.raises, _stop_signals.raised = False, True
    raise InterruptedBySignalError(_stop_signals.last)


@contextmanager
def undivided() -> Iterator[None]:
    """What is done inside is done as a whole: a stop signal that would raise InterruptedBySignalError does so at its
    end. For messages, for one: of half a message, or with one left out, a connection ends. Decorates functions too."""
    raises, received = _stop_signals.raises, _stop_signals.received
    _stop_signals.raises = False
    try:
        yield
    finally:
        _stop_signals.raises = raises
    if raises and _stop_signals.received > received:
        _raise_last()


def stopped_again() -> bool:
    """Whether a stop signal has come since `until_interrupted`: what goes on since then is to end at once."""
    return _stop_signals.received > _stop_signals.raised
