"""What rank 0 makes all ranks do after the same step: stop, after a signal, or save a checkpoint."""

import signal
import time
from types import FrameType

from cputrain.comm.store import SignedKeys
from mpi.supervise.signals import PREEMPTION_SIGNAL, STOP_SIGNALS

KEY = "after_steps"
NEVER = 0
AGAIN_S = 10.0  # within which schedulers, launchers and scripts pass the same signal on, one after another


class Preemption:
    """Handles the preemption signal in every rank; that of rank 0 counts. To be created once, in the main thread.

    Ranks that `cputrain train` does not watch handle SIGTERM and SIGINT too: the first stops the training after a step
    that is saved, one that comes later than AGAIN_S ends the process.
    """

    def __init__(self, keys: SignedKeys, *, is_main_rank: bool, watched: bool) -> None:
        self._keys = keys
        self._is_main_rank = is_main_rank
        self._signaled_at: float | None = None
        self._last_step = self._save_step = NEVER
        for number in (PREEMPTION_SIGNAL, *(() if watched else STOP_SIGNALS)):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signaled_at is None:
            self._signaled_at = now
        elif number != PREEMPTION_SIGNAL and now - self._signaled_at > AGAIN_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def agree(self, step: int, *, save_due: bool = False) -> None:
        """Announce, on rank 0, what is to be done after the next step; learn on the others what was announced before.

        To be called by every rank after every step. No rank completes the next step's all-reduce before rank 0 has
        started it, so that all ranks have the announcement by its end.
        """
        if not self._is_main_rank:
            announced = self._keys.get(KEY)
            if announced is not None:
                self._last_step, self._save_step = map(int, announced.split())
            return
        before = self._last_step, self._save_step
        if self._signaled_at is not None and self._last_step == NEVER:
            self._last_step = step + 1
        if save_due and step > self._save_step:  # else one is announced for this very step
            self._save_step = step + 1
        if (self._last_step, self._save_step) != before:
            self._keys.set(KEY, f"{self._last_step} {self._save_step}")

    def should_stop_after(self, step: int) -> bool:
        """Whether all ranks stop after this step."""
        return self._last_step != NEVER and step >= self._last_step

    def should_save_after(self, step: int) -> bool:
        """Whether all ranks save after this step, and go on."""
        return step == self._save_step


def ignore_preemption() -> None:
    """Ignore the signal from now on. To be called at a training's end, when a repeated signal has nothing to stop.

    An ending interpreter gives handled signals their default action, which ends the process; ignored ones stay ignored.
    """
    signal.signal(PREEMPTION_SIGNAL, signal.SIG_IGN)
