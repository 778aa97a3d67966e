"""Errors that a command reports in one line, with their exit statuses, and the spelling of settings in messages."""

import re
from collections.abc import Callable

SETTING = re.compile(r"\{(\w+)(?:=([^{}]+))?\}")
Wording = Callable[[str, "str | None"], str]
MAX_MESSAGE_LENGTH = 1500


def as_field(name: str, value: str | None) -> str:
    """Spell a setting by its name in `Request`: ppn, oversubscribe=true."""
    return name if value is None else f"{name}={value}"


def as_option(name: str, value: str | None) -> str:
    """Spell a setting as a command-line option: --ppn, --local-batch 8, --oversubscribe, --no-verify."""
    option = name.replace("_", "-")
    if value == "false":
        return f"--no-{option}"
    return f"--{option}" if value in (None, "true") else f"--{option} {value}"


def as_recipe_key(name: str, value: str | None) -> str:
    """Spell a setting as a recipe key: plan.ppn, batch.local, plan.oversubscribe=true; --no-verify stays an option."""
    if name == "verify":
        return as_option(name, value)
    key = "batch.local" if name == "local_batch" else f"plan.{name}"
    return key if value is None else f"{key}={value}"


def as_argument(name: str, value: str | None) -> str:
    """Spell a setting for a script that calls `cputrain.train`: its argument resume=True, a key of its settings
    (plan.ppn), or, for the binding's check, the option of the command that has bound the script."""
    if name == "verify":
        return f"cputrain launch {as_option(name, value)}"
    if name in ("resume", "overwrite"):
        return name if value is None else f"{name}={value.capitalize()}"
    return as_recipe_key(name, value)


def render_message(text: str, wording: Wording) -> str:
    """Replace each setting in braces, `{ppn}` or `{oversubscribe=true}`, by `wording(name, value)`."""
    return SETTING.sub(lambda match: wording(match[1], match[2]), text)


class InputError(Exception):
    """Wrong input (exit status 2): one line with what was requested, what was found and what to do next.

    Line breaks in quoted input become spaces, and the middle of an overlong message is cut out.
    """

    def __init__(self, message: str) -> None:
        message = " ".join(message.splitlines())
        half = MAX_MESSAGE_LENGTH // 2
        cut = len(message) > MAX_MESSAGE_LENGTH
        super().__init__(f"{message[:half]} ... {message[-half:]}" if cut else message)


class RunError(Exception):
    """A run failed (exit status 1): one line that names rank, host, signal and log if they are known."""


class SettingsError(Exception):
    """An error whose message names settings in braces, `{ppn}` or `{oversubscribe=true}`.

    `str()` spells them by `wording`, as fields of `Request` unless it is set; command lines and recipes spell them
    differently: see `describe_error`.
    """

    wording: Wording = staticmethod(as_field)

    def render(self, wording: Wording) -> str:
        """Return the message with each setting spelled by `wording(name, value)`."""
        return render_message(str(self.args[0]), wording)

    def __str__(self) -> str:
        return self.render(self.wording)


class RequestError(SettingsError, InputError):
    """A plan request is invalid or does not fit the host."""


class PlanOfAnotherMachineError(SettingsError, InputError):
    """A plan was made for a machine with other cores, caches or NUMA nodes than this host."""


class DoesNotFitError(RequestError):
    """A batch needs more memory than a worker has; `largest` is the largest local batch that fits, 0 if none fits."""

    def __init__(self, message: str, *, largest: int) -> None:
        super().__init__(message)
        self.largest = largest


class BindingError(SettingsError, RunError):
    """The kernel gave a process other CPUs or memory than planned."""


def describe_error(error: Exception, wording: Wording) -> str:
    """Return an error's message with its settings spelled by `wording`."""
    return error.render(wording) if isinstance(error, SettingsError) else str(error)
