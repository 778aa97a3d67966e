"""Keys that are pressed while a screen is shown."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def keys_pressed() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits for some seconds at most and returns the keys that were pressed, "" without any.

    They are read as they are pressed and not shown. Where stdin is no terminal, or belongs to another program (a job in
    the background), the function only waits. The terminal is as before at the end.
    """
    number = sys.stdin.fileno() if sys.stdin.isatty() else None
    if number is None or os.tcgetpgrp(number) != os.getpgrp():
        yield _only_wait
        return
    before = termios.tcgetattr(number)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([number], [], [], seconds)
        return os.read(number, 100).decode(errors="replace") if ready else ""

    tty.setcbreak(number, termios.TCSANOW)  # Ctrl-C is a signal still
    try:
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
