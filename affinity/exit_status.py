"""From an error to one line on stderr and an exit status: the one way for every command, agent and rank."""

import sys

from affinity.errors import InputError, RunError, Wording, as_field, describe
from affinity.filesystem import refusal


def one_line(error: Exception, wording: Wording = as_field) -> str | None:
    """The message of an error that a user can mend, in one line; None for any other error, which is a bug."""
    if isinstance(error, InputError | RunError):
        return describe(error, wording)
    return refusal(error) if isinstance(error, OSError) else None


def exit_status(error: Exception, program: str, wording: Wording = as_field) -> int:
    """Print the error as `program: ...` to stderr; 2 for wrong input, 1 for a failure while running.

    `wording` spells the settings that the message names. Raises the error again, with its traceback, where it is a bug.
    """
    line = one_line(error, wording)
    if line is None:
        raise error
    print(f"{program}: {line}", file=sys.stderr)
    return 2 if isinstance(error, InputError) else 1
