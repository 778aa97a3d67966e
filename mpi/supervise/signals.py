"""Signals that stop a job in its supervising process, and a clock that excludes pauses of that process."""

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

AWAY_S = 5.0  # loops read the clock several times a second

PREEMPTION_SIGNAL = signal.SIGUSR1  # sent by a batch system when the job's time is nearly up
# From a stop signal to SIGKILL: the ranks may finish a step, about ten seconds with large batches, and save gigabytes.
# Job scripts request a slightly earlier notice before the time limit.
SAVE_S = 90.0
FAILURE_GRACE_S = 3.0  # the same after a failure, when the other ranks wait for the lost one in vain


class RunningClock:
    """A monotonic clock that stands still while its process is suspended, so that others do not seem silent then.

    It must be read often: if two readings are more than AWAY_S apart, the process was suspended in between.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._read = monotonic()
        self._away_s = 0.0

    def now(self) -> float:
        """Return seconds; only differences are meaningful."""
        read = self._monotonic()
        if read - self._read > AWAY_S:
            self._away_s += read - self._read
        self._read = read
        return read - self._away_s


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a job: from Ctrl-C, batch systems and, except under nohup, a closed terminal."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if nohup else (signal.SIGHUP,)))


def end_by(number: int) -> None:
    """End this process by a signal that its launcher sees, after flushing its output."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class InterruptedBySignalError(Exception):
    """This process received a stop signal, whose number is args[0]."""


class StopSignals:
    """Count the stop signals that this process receives inside this context; restore the handlers afterwards.

    Handlers never raise: loops call `check` several times a second, between two messages. `preempt` is called in the
    handler of the preemption signal. `first_stop`, if given, is called in the handler of the first stop signal, which
    then does not count. A SIGHUP after another stop signal does not count either: it is not a deliberate repetition.
    """

    def __init__(
        self, preempt: Callable[[], None] = lambda: None, first_stop: Callable[[int], None] | None = None
    ) -> None:
        self._preempt = preempt
        self._first_stop = first_stop
        self._begun = self._raised = False
        self._counted: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._stop) for number in stop_signals()}
        self._before[PREEMPTION_SIGNAL] = signal.signal(PREEMPTION_SIGNAL, lambda _number, _frame: self._preempt())
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def unblock_preemption(self) -> None:
        """Unblock the preemption signal, which was blocked while no rank could receive it."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (PREEMPTION_SIGNAL,))

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        again, self._begun = self._begun, True
        if again and number == signal.SIGHUP:
            return  # systemd ends sessions by SIGTERM immediately followed by SIGHUP: systemd.kill(5), SendSIGHUP
        if self._first_stop is not None and not again:
            self._first_stop(number)
        else:
            self._counted.append(number)

    def check(self) -> None:
        """Raise InterruptedBySignalError if a stop signal has been counted, but only once."""
        if self._counted and not self._raised:
            self.interrupt(self._counted[-1])

    def interrupt(self, number: int) -> NoReturn:
        """Raise InterruptedBySignalError as for a stop signal with this number."""
        self._raised = True
        self._counted = [number]
        raise InterruptedBySignalError(number)

    @property
    def again(self) -> bool:
        """Whether a stop signal was counted since `check` raised, or before any check: the ranks are killed then."""
        return len(self._counted) > self._raised
