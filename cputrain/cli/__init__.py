"""The command line: one file for each command, imported only when that command runs.

A file declares options, calls the packages below and prints what they return.
"""

import logging
import sys
from difflib import get_close_matches
from importlib import import_module

import click

from affinity.exit_status import exit_status
from cputrain import __version__
from cputrain.cli.setting_names import wording_of

COMMANDS = {
    "plan": "show the cores, threads and memory of each worker, and why: a dry run of launch",
    "machine": "save this host's topology as a tarball, to plan for it elsewhere",
    "launch": "run any command with planned and bound workers, on one host or many",
    "train": "train a recipe",
    "sweep": "train a recipe with many settings and compare the results",
    "simulate": "predict a training's speed and duration on hosts that are not here",
    "reproduce": "repeat published experiments at this machine's size; compare published tables",
    "job": "write a Slurm or PBS script for a training, an image preparation or any command",
    "eval": "compute the exact top-1 and top-5 accuracy of checkpoints",
    "export": "write a checkpoint's weights as safetensors, or as a state dict of torch",
    "prepare": "pack images into shuffled shards",
    "data": "inspect or verify a data folder",
    "bench": "measure training on this host; print the norms of a run's weights, layer by layer",
    "report": "write a run's report.html again",
    "doctor": "check the binding of running processes, or oneCCL",
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
    """Run a command. Exit status: 0 done, 2 wrong input, 1 failed while running, 128 + n ended by signal n."""
    _log_to_stderr()
    try:
        status = group.main(arguments, prog_name="cputrain", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.NoSuchOption as error:
        return _usage_error(_no_such_option(error))
    except click.ClickException as error:
        return _usage_error(error.format_message())
    except (KeyboardInterrupt, click.exceptions.Abort):
        return 130
    except Exception as error:  # noqa: BLE001  bugs are raised again
        return exit_status(error, "cputrain", wording_of(sys.argv[1:] if arguments is None else arguments))
    return status if isinstance(status, int) else 0


def _log_to_stderr() -> None:
    """Print what our own packages log, from INFO up, as plain lines."""
    for package in ("affinity", "mpi", "cputrain"):
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("affinity: %(message)s" if package == "affinity" else "%(message)s"))
            logger.addHandler(handler)


def _usage_error(message: str) -> int:
    print(f"cputrain: {message}", file=sys.stderr)
    return 2


def _no_such_option(error: click.NoSuchOption) -> str:
    """Suggest the options that begin like the unknown one, or resemble it, or the recipe's key of that name."""
    typed, params = error.option_name, error.ctx.command.params if error.ctx else []
    known = [
        name for param in params for name in param.opts if name.startswith("--") and not getattr(param, "hidden", 0)
    ]
    near = [name for name in known if name.startswith(typed)] or get_close_matches(typed, known, n=1, cutoff=0.75)
    if not near and any(param.name == "settings" for param in params):
        from cputrain.recipe.keys import all_keys  # pydantic: only for this

        last = typed.lstrip("-").replace("-", "_")
        near = [f"{key}=VALUE" for key in all_keys() if key.rpartition(".")[2] == last][:3]
    hint = f": did you mean {' or '.join(near)}?" if near else ": see --help"
    return f"No such option {typed}{hint}"
