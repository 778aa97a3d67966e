"""Errors that a command reports in one line, by exit status, and how their messages name settings."""

import re
from collections.abc import Callable

SETTING = re.compile(r"\{(\w+)(?:=([^{}]+))?\}")
Wording = Callable[[str, "str | None"], str]
LONGEST_MESSAGE = 1500


def as_field(name: str, value: str | None) -> str:
    """A setting by its name in `Request`: ppn, oversubscribe=true."""
    return name if value is None else f"{name}={value}"


def as_option(name: str, value: str | None) -> str:
    """A setting as the command lines spell it: --ppn, --local-batch 8, --oversubscribe, --no-verify."""
    option = name.replace("_", "-")
    if value == "false":
        return f"--no-{option}"
    return f"--{option}" if value in (None, "true") else f"--{option} {value}"


def worded(text: str, wording: Wording) -> str:
    """A text with each setting in braces, `{ppn}` or `{oversubscribe=true}`, as `wording(name, value)` spells it."""
    return SETTING.sub(lambda match: wording(match[1], match[2]), text)


class InputError(Exception):
    """The input is wrong (exit status 2): one line with what was requested, what was found and what to do next.

    Lines of a quoted input become one, and the middle of a message that quotes a longer input is cut out.
    """

    def __init__(self, message: str) -> None:
        message = " ".join(message.splitlines())
        half = LONGEST_MESSAGE // 2
        cut = len(message) > LONGEST_MESSAGE
        super().__init__(f"{message[:half]} ... {message[-half:]}" if cut else message)


class RunError(Exception):
    """A run failed (exit status 1): one line that names rank, host, signal and log where they are known."""


class SettingsError(Exception):
    """An error whose message names settings in braces, `{ppn}` or `{oversubscribe=true}`.

    `str()` writes them as fields of `Request`. A command line or a recipe has other names for them: see `describe`.
    """

    def worded(self, wording: Wording) -> str:
        """The message with each setting as `wording(name, value)` spells it."""
        return worded(str(self.args[0]), wording)

    def __str__(self) -> str:
        return self.worded(as_field)


class RequestError(SettingsError, InputError):
    """A request for a plan is wrong, or does not fit the host."""


class PlanOfAnotherMachineError(SettingsError, InputError):
    """A plan's machine has other cores, caches or NUMA nodes than this host."""


class DoesNotFitError(RequestError):
    """A batch needs more memory than a worker has; `largest` is the largest local batch that fits, 0 if none does."""

    def __init__(self, message: str, *, largest: int) -> None:
        super().__init__(message)
        self.largest = largest


class BindingError(SettingsError, RunError):
    """The kernel gave a process other CPUs or other memory than planned."""


def describe(error: Exception, wording: Wording) -> str:
    """An error's message in its reader's words."""
    return error.worded(wording) if isinstance(error, SettingsError) else str(error)
