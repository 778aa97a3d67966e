"""Standard streams that are closed or full: a job goes on with its logs, any other command ends and says why."""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

import click

from affinity.exit_status import status_of_signal
from affinity.terminal import redraws
from affinity.terminal_text import accept_any_text
from affinity.utf8 import locale_encoding
from mpi.supervise.output import discard

NAMES = ("stdin", "stdout", "stderr")


class Unfailing:
    """stderr, where writing never fails: on a full disk nobody can be told, and what is done goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write what can be written."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be written."""
        with suppress(OSError):
            self._stream.flush()


def open_streams() -> None:
    """Let standard streams that are closed (`>&-`) lead nowhere: a file that is opened would get their number, and what
    is printed. Any text can be printed, also where the locale has not all of its characters. Errors of stderr are
    nobody's."""
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115  for good
    for stream in (sys.stdout, sys.stderr):
        accept_any_text(stream, stream.encoding if "PYTHONIOENCODING" in os.environ else locale_encoding())
    if not isinstance(sys.stderr, Unfailing):
        sys.stderr = cast(TextIO, Unfailing(sys.stderr))


def say(text: str) -> None:
    """Print a line of a command that starts a job, which goes on where stdout is closed or full."""
    try:
        click.echo(text)
    except OSError as error:
        discard(sys.stdout)
        click.echo(f"cputrain: stdout: {error.strerror}: the job goes on, and its output is in its logs", err=True)


def print_file(text: str) -> None:
    """Print what is a file, such as a script: UTF-8 whatever the locale, and names byte for byte."""
    click.echo(text.encode(errors="surrogateescape"), nl=False)


def shows_bars() -> bool:
    """Whether progress bars are drawn: where stderr is a terminal on which they can be drawn again in their place."""
    return redraws(sys.stderr, os.environ)


def is_closed() -> bool:
    """Whether nobody reads stdout any more, as after `| head`."""
    watched = select.poll()
    watched.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in watched.poll(0))


def is_full(error: Exception) -> bool:
    """Whether an error of the operating system has come from stdout, which is then said."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    try:
        os.write(1, b"\n")
    except OSError:
        discard(sys.stdout)
        click.echo(f"cputrain: stdout: {error.strerror}", err=True)
        return True
    return False


def finished(status: int) -> int:
    """The exit status of a command once all that it has printed is written. Where nobody reads it that is not said, as
    with other programs: the status is that of SIGPIPE."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        return status or status_of_signal(signal.SIGPIPE)
    except OSError as error:
        discard(sys.stdout)
        click.echo(f"cputrain: stdout: {error.strerror}", err=True)
        return status or 1
    return status
