"""From an error to one line on stderr and an exit status: the one way for every command, agent and rank."""

import sys

from affinity.errors import InputError, RunError
from affinity.filesystem import refusal


def one_line(error: BaseException) -> str | None:
    """What a user can do something about, in one line; None for any other error, which is a bug."""
    if isinstance(error, InputError | RunError):
        return str(error)
    return refusal(error) if isinstance(error, OSError) else None


def exit_status(error: Exception, program: str) -> int:
    """Print the error as `program: ...` to stderr; 2 where the input is wrong, 1 where it failed while running.

    Raises the error again, with its traceback, where it is a bug.
    """
    line = one_line(error)
    if line is None:
        raise error
    print(f"{program}: {line}", file=sys.stderr)
    return 2 if isinstance(error, InputError) else 1
