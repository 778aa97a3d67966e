"""Signals that ask a training to stop, held back by the kernel until the training can act on them.

Imports, planning and the meeting of the ranks take seconds, in which a signal's default action would end the process. A
signal that is held arrives as soon as the training handles it: it then stops after a step that is saved. Threads and
programs that are started meanwhile hold it too.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from cputrain.affinity.errors import InputError
from cputrain.affinity.ranks.rank import discover
from cputrain.affinity.terminal import status_of_signal
from cputrain.mpi.supervise.signals import PREEMPTION_SIGNAL

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


def release_signals() -> None:
    """Let the signals arrive from now on. To be called in the main thread, when there are handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def _is_rank(env: Mapping[str, str]) -> bool:
    try:
        return discover(env) is not None
    except InputError:  # the command says what is wrong
        return False


def _end(number: int, _frame: FrameType | None) -> None:
    print(f"cputrain: {signal.Signals(number).name} before the training began: nothing was started", file=sys.stderr)
    sys.stderr.flush()
    os._exit(status_of_signal(number))
