"""Signals in a training rank: blocked until the training handles them, then all ranks stop or save after the same step.

Imports, planning and connecting the ranks take seconds, in which a signal's default action would end the process. A
blocked signal is delivered when the training installs its handlers; the training then stops after a step and saves it.
Threads and programs that are started meanwhile inherit the signal mask. The command line imports this module before
torch, so it must not import torch.
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
from cputrain.mpi.supervise.signals import PREEMPTION_SIGNAL, end_by, stop_signals

if TYPE_CHECKING:
    from cputrain.comm.store import SignedKeys


BLOCKED = (PREEMPTION_SIGNAL, signal.SIGTERM)
KEY = "after_steps"
REQUEST = "stop_requested"  # set by a rank other than 0, if the signal reached only its host
NEVER = 0
READ_INTERVAL_S, MAX_STEPS = 0.1, 100  # between reads of the store, which take longer than a small step
REPEAT_S = 10.0  # schedulers, launchers and scripts may each forward the same signal within this time


@contextmanager
def signals_blocked(env: Mapping[str, str], *, prepared: bool) -> Iterator[None]:
    """Block the preemption signal, and SIGTERM in a rank whose run was not `prepared` by a launcher. In a process that
    is not a rank, SIGTERM ends it with a message. On exit the mask is restored unless a signal is pending: then the
    process must exit."""
    is_rank = _is_rank(env)
    blocked = BLOCKED if is_rank and not prepared else BLOCKED[:1]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    handler = None if is_rank else signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        if not signal.sigpending() & set(blocked):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_rank(env: Mapping[str, str]) -> bool:
    from cputrain.affinity.rank import rank_from_env  # imported late for the start-up time of other commands

    try:
        return rank_from_env(env) is not None
    except InputError:  # reported later by the command
        return False


def _end(number: int, _frame: FrameType | None) -> None:
    print(f"cputrain: {signal.Signals(number).name} before the training began: nothing was started", file=sys.stderr)
    sys.stderr.flush()
    os._exit(status_of_signal(number))


class Preemption:
    """Handles the preemption signal: if it reaches any rank, all ranks stop. Create it once, in the main thread, to
    which blocked signals are then delivered.

    SIGTERM and SIGHUP also make all ranks stop and save, as does SIGINT unless the run was `prepared` by a launcher. A
    further one more than REPEAT_S later ends the process. A prepared rank finally ends by the first such signal; from
    this its launcher, if it did not receive the signal itself, knows that only this rank was signaled.
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number != PREEMPTION_SIGNAL:
            self._stop_signal = self._stop_signal or number
        if self._signaled_at is None:
            self._signaled_at = now
        elif number != PREEMPTION_SIGNAL and now - self._signaled_at > REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    @property
    def ends_by(self) -> int:
        """Signal by which this rank must end after it has saved; 0 if none."""
        return self._stop_signal if self._prepared else 0

    def set_step_time(self, step_s: float) -> None:
        """Set how often agree() reads the store; `step_s`, the seconds of a step, must be equal on all ranks."""
        self._every = min(max(int(READ_INTERVAL_S / step_s), 1), MAX_STEPS) if step_s > 0 else 1

    def agree(self, step: int, *, save_due: bool = False, ends_epoch: bool = False) -> None:
        """Agree on a step after which all ranks stop or save. Rank 0 announces it one read of the store ahead; other
        ranks read the announcement and forward signals to rank 0.

        Every rank must call this after every step; all read the store after the same steps, and at an epoch's end. No
        rank completes the next step's all-reduce before rank 0 has started it, so all ranks have the announcement by
        the next read.
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
        if save_due and step > self._save_step:  # else a save is already announced
            self._save_step = self._next
        if (self._last_step, self._save_step) != before:
            self._keys.set(KEY, f"{self._last_step} {self._save_step}")

    def should_stop_after(self, step: int) -> bool:
        """Return whether all ranks stop after this step."""
        return self._last_step != NEVER and step >= self._last_step

    def should_save_after(self, step: int) -> bool:
        """Return whether all ranks save after this step and continue."""
        return step == self._save_step


def ignore_preemption() -> None:
    """Ignore the preemption signal from now on, at the end of a training.

    An exiting interpreter resets handled signals to their default action, which would end the process; ignored signals
    stay ignored.
    """
    signal.signal(PREEMPTION_SIGNAL, signal.SIG_IGN)


def end_as_signaled(number: int) -> None:
    """End this process by the signal that stopped its training, if there was one: see `Preemption.ends_by`."""
    if number:
        end_by(number)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore on exit the current handlers of the signals that a training handles."""
    handlers = {number: signal.getsignal(number) for number in (PREEMPTION_SIGNAL, *stop_signals())}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
