"""Preemption: SIGUSR1, sent when a job's time is nearly up, stops all ranks after the same step."""

import signal
from types import FrameType

from cputrain.comm.store import SignedKeys
from mpi.supervise.signals import PREEMPTION_SIGNAL

KEY = "last_step"


class Preemption:
    """Handles SIGUSR1 in every rank; the signal of rank 0 counts. To be created once, in the main thread."""

    def __init__(self, keys: SignedKeys, *, is_main_rank: bool) -> None:
        self._keys = keys
        self._is_main_rank = is_main_rank
        self._signaled = False
        self._last_step: int | None = None
        signal.signal(PREEMPTION_SIGNAL, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._signaled = True

    def should_stop_after(self, step: int) -> bool:
        """Whether all ranks stop after this step. To be called by every rank after every step.

        After the signal, rank 0 announces the next step as the last one. No rank completes that step's all-reduce
        before rank 0 has started it, so that all ranks have the announcement by its end.
        """
        if self._last_step is None:
            if self._is_main_rank and self._signaled:
                self._keys.set(KEY, str(step + 1))
            last_step = self._keys.get(KEY)
            if last_step is not None:
                self._last_step = int(last_step)
        return self._last_step is not None and step >= self._last_step


def ignore_preemption() -> None:
    """Ignore the signal from now on. To be called at a training's end, when a repeated signal has nothing to stop.

    An ending interpreter gives handled signals their default action, which ends the process; ignored ones stay ignored.
    """
    signal.signal(PREEMPTION_SIGNAL, signal.SIG_IGN)
