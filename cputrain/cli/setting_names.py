"""The names by which a command's users know the settings that a planner's error names."""

from affinity.errors import Wording, as_option

RECIPE_COMMANDS = ("train", "eval", "sweep", "reproduce", "bench", "tune", "find-lr")  # the others have options
KEYS = {"local_batch": "batch.local"}


def as_recipe_key(name: str, value: str | None) -> str:
    """A setting as a recipe has it: plan.ppn, plan.oversubscribe=true; --no-verify, which is no key."""
    if name == "verify":
        return as_option(name, value)
    key = KEYS.get(name, f"plan.{name}")
    return key if value is None else f"{key}={value}"


def as_option_or_key(name: str, value: str | None) -> str:
    """A setting of a command that may have a recipe, whose batch is a key and no option."""
    return "--local-batch (with a recipe: batch.local)" if name == "local_batch" else as_option(name, value)


def wording_of(arguments: list[str]) -> Wording:
    """How the command with these arguments names settings."""
    return as_recipe_key if arguments and arguments[0] in RECIPE_COMMANDS else as_option_or_key
