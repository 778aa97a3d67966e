"""The signals that stop a job in the process that supervises it, and a clock that stands still while that does."""

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

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


def end_by(number: int) -> None:
    """End this process by a signal, for its launcher to see; its output is written before."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


class InterruptedBySignalError(Exception):
    """This process has received a stop signal (its number is in args[0])."""


class StopSignals:
    """Counts the stop signals that this process gets inside this context; the handlers are restored after it.

    A handler never raises: loops call `check` several times a second, between two messages. `preempt` is called in the
    handler of the preemption signal. With `first_stop`, that is called in the handler of the first stop signal, which
    does not count. Nor does a SIGHUP after another stop signal: nobody repeats it to be heard.
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

    def let_preempt(self) -> None:
        """Let the preemption signal come, which was held while no rank could take it."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (PREEMPTION_SIGNAL,))

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        again, self._begun = self._begun, True
        if again and number == signal.SIGHUP:
            return  # systemd ends sessions by SIGTERM and at once SIGHUP: systemd.kill(5), SendSIGHUP
        if self._first_stop is not None and not again:
            self._first_stop(number)
        else:
            self._counted.append(number)

    def check(self) -> None:
        """Raise InterruptedBySignalError if a stop signal has been counted; not again after that."""
        if self._counted and not self._raised:
            self.interrupt(self._counted[-1])

    def interrupt(self, number: int) -> NoReturn:
        """Raise InterruptedBySignalError as for a stop signal of this number."""
        self._raised = True
        self._counted = [number]
        raise InterruptedBySignalError(number)

    @property
    def again(self) -> bool:
        """Whether a stop signal has been counted since `check` raised, or none was checked: the ranks end at once."""
        return len(self._counted) > self._raised
