"""Signals in a rank of a training: held by the kernel until there are handlers, then a stop or a checkpoint that all
ranks agree on.

Imports, planning and the meeting of the ranks take seconds, in which a signal's default action would end the process. A
signal that is held arrives as soon as the training handles it: it then stops after a step that is saved. Threads and
programs that are started meanwhile hold it too. The command line imports this before torch, so it imports no torch.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import status_of_signal
from cputrain.mpi.supervise.signals import PREEMPTION_SIGNAL, stop_signals

if TYPE_CHECKING:
    from cputrain.comm.store import SignedKeys


HELD = (PREEMPTION_SIGNAL, signal.SIGTERM)


@contextmanager
def signals_held(env: Mapping[str, str], *, prepared: bool) -> Iterator[None]:
    """Hold the preemption signal, and SIGTERM in a rank whose run no launcher has `prepared`; in a process that is no
    rank that ends it with a line. Afterwards all is as before, unless a signal waits: then the process is to exit."""
    is_rank = _is_rank(env)
    held = HELD if is_rank and not prepared else HELD[:1]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    handler = None if is_rank else signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        if not signal.sigpending() & set(held):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_rank(env: Mapping[str, str]) -> bool:
    from cputrain.affinity.ranks.rank import discover  # not for every command that is no training

    try:
        return discover(env) is not None
    except InputError:  # the command says what is wrong
        return False


def _end(number: int, _frame: FrameType | None) -> None:
    print(f"cputrain: {signal.Signals(number).name} before the training began: nothing was started", file=sys.stderr)
    sys.stderr.flush()
    os._exit(status_of_signal(number))


KEY = "after_steps"
REQUEST = "stop_requested"  # by a rank other than 0, whose host alone may be about to go
NEVER = 0
LOOK_S, MOST_STEPS = 0.1, 100  # between looks into the store, which cost more than a small network's step
AGAIN_S = 10.0  # within which schedulers, launchers and scripts pass the same signal on, one after another


class Preemption:
    """Handles the preemption signal in every rank: one that reaches any of them stops all. To be created once, in the
    main thread, where signals that came before arrive then.

    SIGTERM and SIGHUP stop it after a step that is saved, too; in ranks whose run no launcher has `prepared` SIGINT as
    well. One that comes later than AGAIN_S ends the process. A prepared rank ends by the first one in the end, for its
    launcher to know: where that has not got it, too, this rank alone was told to end.
    """

    def __init__(self, keys: "SignedKeys", *, is_main_rank: bool, prepared: bool) -> None:
        self._keys = keys
        self._is_main_rank = is_main_rank
        self._signaled_at: float | None = None
        self._requested = False
        self._prepared = prepared
        self._stop_signal = 0
        self._last_step = self._save_step = NEVER
        self._every, self._next = 1, NEVER
        for number in (PREEMPTION_SIGNAL, *(n for n in stop_signals() if not prepared or n != signal.SIGINT)):
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number != PREEMPTION_SIGNAL:
            self._stop_signal = self._stop_signal or number
        if self._signaled_at is None:
            self._signaled_at = now
        elif number != PREEMPTION_SIGNAL and now - self._signaled_at > AGAIN_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    @property
    def ends_by(self) -> int:
        """The signal by which this rank is to end once it has saved; 0: by none."""
        return self._stop_signal if self._prepared else 0

    def set_pace(self, step_s: float) -> None:
        """Look into the store every LOOK_S from the next look on, by the seconds of a step, the same on all ranks."""
        self._every = min(max(int(LOOK_S / step_s), 1), MOST_STEPS) if step_s > 0 else 1

    def agree(self, step: int, *, save_due: bool = False, ends_epoch: bool = False) -> None:
        """Announce, on rank 0, what is to be done after the step of the next look; on the others learn what was
        announced before, and pass a signal on to rank 0.

        To be called by every rank after every step; all look after the same steps, and at an epoch's end. No rank
        completes the next step's all-reduce before rank 0 has started it, so that all have the announcement by the next
        look.
        """
        if step < self._next and not ends_epoch:
            return
        self._next = step + self._every
        if not self._is_main_rank:
            announced = self._keys.get(KEY)
            if announced is not None:
                self._last_step, self._save_step = map(int, announced.split())
            if self._signaled_at is not None and not self._requested:
                self._requested = True
                self._keys.set(REQUEST, "yes")
            return
        before = self._last_step, self._save_step
        if self._last_step == NEVER and (self._signaled_at is not None or self._keys.get(REQUEST) is not None):
            self._last_step = self._next
        if save_due and step > self._save_step:  # else one is announced already
            self._save_step = self._next
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


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Afterwards the signals that a training handles have the handlers that they have now."""
    handlers = {number: signal.getsignal(number) for number in (PREEMPTION_SIGNAL, *stop_signals())}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
