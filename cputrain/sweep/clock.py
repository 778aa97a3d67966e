"""Time limits: parsed, printed, enforced."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from affinity.errors import InputError
from mpi.supervise.signals import PREEMPTION_SIGNAL

AGAIN_S = 5.0  # the signal is repeated, as one sent while the workers are being started reaches none of them
CLOCK = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])")


def parse_clock(text: str) -> int:
    """ "1:30:00" or "2-00:00:00" -> seconds. Raises InputError."""
    found = CLOCK.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise InputError(f"--time {text!r} is not a time limit: give HH:MM:SS or D-HH:MM:SS")
    return total


def clock(seconds: float) -> str:
    """436 -> "0:07:16"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class Limit:
    """Whether the time limit was reached."""

    reached = False


@contextmanager
def time_limit(seconds: float | None) -> Iterator[Limit]:
    """Send this process the preemption signal (SIGUSR1) after so many seconds, as job scripts do near a job's limit.

    By a timer's signal, not a thread: processes are forked from here. The signal is repeated every AGAIN_S seconds, and
    withheld while no handler is installed, as it would end this process.
    """
    limit = Limit()

    def notify(_number: int, _frame: FrameType | None) -> None:
        limit.reached = True
        if callable(signal.getsignal(PREEMPTION_SIGNAL)):
            os.kill(os.getpid(), PREEMPTION_SIGNAL)

    before = signal.signal(signal.SIGALRM, notify)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0, AGAIN_S)
    try:
        yield limit
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
