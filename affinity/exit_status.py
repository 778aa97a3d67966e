"""Exit statuses, and the one way from an error to a line on stderr and a status: every command, agent and rank."""

import sys
from enum import IntEnum

from affinity.errors import InputError, RunError, Wording, as_field, describe
from affinity.filesystem import refusal
from affinity.terminal_text import printable_lines


class ExitStatus(IntEnum):
    """How a command ends that no signal has ended."""

    DONE = 0
    FAILED = 1
    WRONG_INPUT = 2

    @property
    def meaning(self) -> str:
        """The status as the documentation explains it."""
        return {
            ExitStatus.DONE: "done",
            ExitStatus.FAILED: "it failed while running: the message names rank, host, signal or status, and the log",
            ExitStatus.WRONG_INPUT: "the input is wrong: one line with what was requested, what was found and what to "
            "do next; nothing was written",
        }[self]


def status_of_signal(number: int) -> int:
    """The status of a command that a signal has ended, as shells count it (POSIX, 2.8.2)."""
    return 128 + number


def one_line(error: Exception, wording: Wording = as_field) -> str | None:
    """The message of an error that a user can mend, in one line; None for any other error, which is a bug."""
    if isinstance(error, InputError | RunError):
        return describe(error, wording)
    return refusal(error) if isinstance(error, OSError) else None


def exit_status(error: Exception, program: str, wording: Wording = as_field) -> int:
    """Print the error as `program: ...` to stderr; the status is that of wrong input, or of a failure while running.

    `wording` spells the settings that the message names. Raises the error again, with its traceback, where it is a bug.
    """
    line = one_line(error, wording)
    if line is None:
        raise error
    print(f"{program}: {printable_lines(line)}", file=sys.stderr)
    return status_of(error)


def status_of(error: Exception) -> ExitStatus:
    """The status of an error that is one line."""
    return ExitStatus.WRONG_INPUT if isinstance(error, InputError) else ExitStatus.FAILED
