"""The notice that a job's time is nearly up: all ranks stop after the same step, and its checkpoint is saved."""

import signal
from types import FrameType

from torch._C._distributed_c10d import Store

from mpi.supervise.signals import PREEMPTION_SIGNAL

KEY = "last_step"


class Notice:
    """Listens for SIGUSR1 in every rank; rank 0's counts. Made once a rank, in its first thread."""

    def __init__(self, store: Store, *, leads: bool) -> None:
        self._store = store
        self._leads = leads
        self._given = False
        self._last_step: int | None = None
        signal.signal(PREEMPTION_SIGNAL, self._take)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self._given = True

    def is_last(self, step: int) -> bool:
        """Whether all ranks stop after this step; asked by each after every step.

        Rank 0 announces the step after the one at which it was told. Nobody gets past that step's all-reduce before
        rank 0 has begun it, so all have the announcement by its end.
        """
        if self._last_step is None:
            if self._leads and self._given:
                self._store.set(KEY, str(step + 1))
            if self._store.check([KEY]):
                self._last_step = int(self._store.get(KEY))
        return self._last_step is not None and step >= self._last_step
