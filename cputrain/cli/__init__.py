"""The command line. Each command is a file of its own, imported only when it is asked for."""

import logging
import sys
from difflib import get_close_matches
from importlib import import_module

import click

from affinity.errors import InputError, RunError, Wording, describe
from affinity.filesystem import refusal
from cputrain import __version__
from cputrain.cli.wording import as_recipe_key, wording_of

COMMANDS = {
    "plan": "decide and explain who runs where: a dry run of launch",
    "launch": "run any command under a plan",
    "train": "train a recipe",
    "sweep": "one recipe with many settings: a table and a picture",
    "reproduce": "published claims, trained again at this machine's size, and published tables",
    "job": "a batch script for Slurm or PBS: a training, image preparation or any command",
    "eval": "exact top-1 and top-5 of a checkpoint",
    "prepare": "pack images into shuffled shards",
    "data": "look at a data folder, verify it",
    "bench": "a run's norms of weights and gradients, layer by layer",
    "report": "write a run's report.html again",
    "doctor": "compare what was planned with what is",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"cputrain.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="cputrain")
def group() -> None:
    """Plan, launch and train on CPU machines, from two cores to thousands of hosts."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0 done, 2 the input is wrong, 1 it failed while running, 128 + n ended by signal n."""
    logging.basicConfig(format="cputrain: %(message)s")
    try:
        status = group.main(arguments, prog_name="cputrain", standalone_mode=False)
    except (InputError, RunError, OSError) as error:
        if (failed := tell(error, wording_of(sys.argv[1:] if arguments is None else arguments))) is None:
            raise
        return failed
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.NoSuchOption as error:
        return say(_no_such_option(error), 2)
    except click.ClickException as error:
        return say(error.format_message(), 2)
    except (KeyboardInterrupt, click.exceptions.Abort):
        return 130
    return status if isinstance(status, int) else 0


def _no_such_option(error: click.NoSuchOption) -> str:
    """The options that begin as what was typed, or else look like it, or the recipe's key of that name."""
    typed, params = error.option_name, error.ctx.command.params if error.ctx else []
    known = [
        name for param in params for name in param.opts if name.startswith("--") and not getattr(param, "hidden", 0)
    ]
    near = [name for name in known if name.startswith(typed)] or get_close_matches(typed, known, n=1, cutoff=0.75)
    if not near and any(param.name == "settings" for param in params):
        from cputrain.recipe.keys import all_keys  # pydantic: only for this

        last = typed.lstrip("-").replace("-", "_")
        near = [f"{key}=VALUE" for key in all_keys() if key.rpartition(".")[2] == last][:3]
    told = f": did you mean {' or '.join(near)}?" if near else ": see --help"
    return f"No such option {typed}{told}"


def tell(error: Exception, wording: Wording = as_recipe_key) -> int | None:
    """Tell an error that users can mend in one line, and its exit status; None where it is of another kind."""
    if isinstance(error, InputError):
        return say(describe(error, wording), 2)
    if isinstance(error, RunError):
        return say(describe(error, wording), 1)
    told = refusal(error) if isinstance(error, OSError) else None
    return None if told is None else say(told, 1)


def say(error: object, status: int) -> int:
    """Tell what went wrong in one line; returns the status."""
    print(f"cputrain: {error}", file=sys.stderr)
    return status
