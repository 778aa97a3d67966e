"""The Python stack of a rank, for whoever watches it.

The watcher gives the rank an unnamed file, and a rank that has Python lets faulthandler write the stack of its main
thread there at a signal: also while it computes in C, or loops. The signal is sent only to a process that handles it.
"""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from affinity.process_stat import catches

STACK_VARIABLE = "CPUTRAIN_STACK_FILE"  # the number of the open file
STACK_SIGNAL = signal.SIGRTMAX - 2  # a real-time signal that neither Python, MPI nor a scheduler uses
FILE_NAME = "cputrain-stack"
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
MOST_FRAMES, MOST_BYTES = 12, 1 << 16
ANSWER_S = 0.5  # a process that computes answers at once
POLL_S = 0.02


def stack_file() -> int:
    """A new file for a rank's stack, which the rank is to inherit."""
    return os.memfd_create(FILE_NAME, 0)


def offer_stack(env: Mapping[str, str]) -> None:
    """Let this process's stack be read by the watcher that has started it; nothing where there is none."""
    number = env.get(STACK_VARIABLE, "")
    if not re.fullmatch("[0-9]{1,6}", number):
        return
    try:
        name = Path(f"/proc/self/fd/{number}").readlink().name
    except OSError:  # not inherited
        return
    if name.startswith(f"memfd:{FILE_NAME} "):
        faulthandler.register(STACK_SIGNAL, file=int(number), all_threads=False)


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
