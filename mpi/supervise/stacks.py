"""The Python stack of a rank, for whoever watches it.

The watcher gives the rank an unnamed file, and a rank that has Python lets faulthandler write the stack of its main
thread there at a signal: also while it computes in C, or loops. The signal is sent only to a process that handles it.
"""

import os
import re
import time
from collections.abc import Iterable

from _cputrain_autoload import STACK_FILE, STACK_SIGNAL
from affinity.process_stat import catches

FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
MOST_FRAMES, MOST_BYTES = 12, 1 << 16
ANSWER_S = 0.5  # a process that computes answers at once
POLL_S = 0.02


def stack_file() -> int:
    """A new file for a rank's stack, which the rank is to inherit."""
    return os.memfd_create(STACK_FILE, 0)


def read_stack(pids: Iterable[int], file: int) -> tuple[str, ...]:
    """The Python stack of the first of these processes that offers one, innermost first; empty where none does."""
    pid = next((pid for pid in pids if catches(pid, STACK_SIGNAL)), None)
    if pid is None:
        return ()
    before = os.fstat(file).st_size
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return ()
    deadline, text = time.monotonic() + ANSWER_S, b""
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        now = os.pread(file, MOST_BYTES, before)
        if now and now == text:
            break
        text = now
    return frames(text.decode(errors="replace"))


def frames(text: str) -> tuple[str, ...]:
    """The frames of faulthandler's text, as FILE:LINE in FUNCTION."""
    found = [f"{match[1]}:{match[2]} in {match[3]}" for match in map(FRAME.match, text.splitlines()) if match]
    return tuple(found[:MOST_FRAMES])
