"""Time without the pauses of this process: it may be stopped, frozen or on a host that is suspended."""

import time
from collections.abc import Callable

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
