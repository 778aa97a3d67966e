"""The command line: one module per group of commands, imported only when one of them runs.

Each module declares options, calls the packages below `cputrain` and prints what they return.
"""

import errno
import logging
import os
import signal
import sys
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from cputrain import __version__
from cputrain.affinity.terminal import ExitStatus, exit_status, printable_lines, status_of_signal, use_utf8
from cputrain.cli.output import finished, is_closed, is_full, open_streams
from cputrain.cli.words import COMPLETE, answer, missing_argument, no_such_command, no_such_option, wording_of
from cputrain.mpi.supervise.signals import InterruptedBySignalError
from cputrain.training.signals import signals_blocked

__all__ = ["group", "main"]

SECTIONS = {
    "Plan and launch": {
        "plan": "show the cores, threads and memory of each worker, with reasons",
        "launch": "run any command with bound workers, on one host or many",
        "import": "convert a command line of torchrun, mpirun, srun or ipexrun",
        "machines": "list, search and show the machines in the catalog",
        "machine": "save this host's topology as a tarball, to plan for it elsewhere",
    },
    "Train and evaluate": {
        "train": "train a recipe",
        "sweep": "train a recipe with several settings and compare the results",
        "find-lr": "run a range test and suggest a recipe's learning rate",
        "eval": "compute the exact top-1 and top-5 accuracy of checkpoints",
        "predict": "classify images with a trained network",
        "export": "write a network as safetensors, state dict, TorchScript or ONNX",
        "weights": "download torchvision's pretrained weights for a network",
        "reproduce": "repeat published experiments, scaled to this machine",
        "demo": "train ResNet-50 on handwritten digits, in minutes on two cores",
    },
    "Data": {
        "prepare": "pack images into shuffled shards",
        "data": "inspect or verify a data folder",
    },
    "Measure and predict": {
        "bench": "measure training, operators, memory, decoding, communication",
        "tune": "find the fastest plan for a recipe on this host by timed trials",
        "simulate": "predict a training's throughput and duration on other hosts",
    },
    "Jobs": {
        "job": "write a Slurm or PBS script, or Kubernetes manifests",
    },
    "Results": {
        "report": "write the HTML report of a run, or compare several runs",
        "watch": "show a run live: curves, step times of its ranks, warnings",
    },
    "Help": {
        "doctor": "check this host and suggest a fix for each problem",
        "env": "print what a bug report needs: versions, libraries, variables",
        "recipes": "list, search and show the shipped recipes",
        "keys": "print the manual of the recipe keys",
        "completion": "print the shell completion script for bash, zsh or fish",
    },
}
COMMANDS = {name: text for commands in SECTIONS.values() for name, text in commands.items()}

MODULES = {  # commands in a module of another name
    "machine": "plan",
    "machines": "plan",
    "prepare": "data",
    "demo": "train",
    "import": "migrate",
    "eval": "train",
    "find-lr": "train",
    "weights": "train",
    "tune": "bench",
    "reproduce": "studies",
    "simulate": "studies",
    "sweep": "studies",
    "report": "results",
    "watch": "results",
    "predict": "results",
    "export": "results",
    "keys": "recipes",
    "env": "doctor",
    "completion": "words",
}


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click would exit with status 1 and print nothing
            if is_closed():
                raise click.exceptions.Exit(status_of_signal(signal.SIGPIPE)) from None
            raise RuntimeError("a connection was closed by its peer") from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing or cmd_name.startswith("-"):
                return None
            raise click.UsageError(no_such_command(cmd_name, COMMANDS), ctx)
        module = import_module(f"cputrain.cli.{MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Complete command names from COMMANDS: click would import the module of every command."""
        named = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section without blank lines between, so that all fit into 80 x 40 characters."""
        self.format_usage(ctx, formatter)
        formatter.write(f"\n{self.help}\n\n")
        width = max(len(name) for name in COMMANDS)
        for title, commands in SECTIONS.items():
            lines = [title, *(f"  {name:{width}}  {text}" for name, text in commands.items())]
            formatter.write("".join(f"{line}\n" for line in lines))
        formatter.write("Each command has --help. -V or --version prints the version.\n")


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="cputrain")
def group() -> None:
    """Plan, launch and train on CPU machines, from two cores to thousands of hosts."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Exit status: 0 done, 2 wrong input, 1 failed while running, 128 + n ended by signal n."""
    if arguments is None:
        use_utf8()
    open_streams()
    env = os.environ
    if instruction := env.get(COMPLETE):
        return answer(instruction, group)
    _log_to_stderr()
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] != ["train"]:
        return finished(_run(words))
    with signals_blocked(env, prepared="--prepared" in words):
        return finished(_run(words))


def _run(words: list[str]) -> int:
    try:
        status = group.main(words, prog_name="cputrain", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return ExitStatus.WRONG_INPUT
    except click.MissingParameter as error:
        return _usage_error(missing_argument(error))
    except click.NoSuchOption as error:
        return _usage_error(no_such_option(error))
    except click.ClickException as error:
        return _usage_error(error.format_message())
    except (KeyboardInterrupt, click.exceptions.Abort):
        return status_of_signal(signal.SIGINT)
    except InterruptedBySignalError as stop:
        return status_of_signal(int(stop.args[0]))
    except Exception as error:  # noqa: BLE001  exit_status raises bugs again
        if is_full(error):
            return ExitStatus.FAILED
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _usage_error(f"{str(error.filename)[:60]}... is too long for a file name; use a shorter one")
        if isinstance(error, FileNotFoundError) and not _working_directory_exists():
            return _usage_error("the working directory has been deleted: change to one that exists")
        return exit_status(error, "cputrain", wording_of(words))
    return status if isinstance(status, int) else 0


def _working_directory_exists() -> bool:
    """Whether this process's working directory still exists; relative paths need it."""
    try:
        os.getcwd()  # noqa: PTH109  Path.cwd is the same call
    except FileNotFoundError:
        return False
    return True


class _PrintableFormatter(logging.Formatter):
    """Escape control characters: log lines contain names of files, hosts and classes chosen by others."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def _log_to_stderr() -> None:
    """Print log records of cputrain's packages, from INFO up, as plain lines."""
    for package, line in (("cputrain", "%(message)s"), ("cputrain.affinity", "affinity: %(message)s")):
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # the parent package's handler would print the line again
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(_PrintableFormatter(line))
            logger.addHandler(handler)


def _usage_error(message: str) -> int:
    print(f"cputrain: {printable_lines(message)}", file=sys.stderr)
    return ExitStatus.WRONG_INPUT
