"""Words of a command line: suggestions for mistyped words, groups in --help, completion in bash, zsh and fish.

Completion is click's, extended by the recipes, machines and keys that parameters take.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

from cputrain.affinity.errors import InputError, Wording, as_option, as_recipe_key
from cputrain.affinity.filesystem import read_yaml
from cputrain.affinity.terminal import ExitStatus
from cputrain.affinity.wording import join_or
from cputrain.files import recipe_names

RECIPE_COMMANDS = ("train", "eval", "sweep", "reproduce", "bench", "tune", "find-lr")  # others set values by options
COMPLETE = "_CPUTRAIN_COMPLETE"  # set by the shell that completes a command line, e.g. to bash_complete
LEFT_TO_LAUNCHER = "--bind launcher leaves binding to the launcher, and --ppn 1 gives one rank all cores"
Items = list[CompletionItem[str]]
PROGRAM = "cputrain"
BASH = r"""%(complete_func)s() {
    local IFS=$'\n' completion type value
    for completion in $(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete $1); do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == plain ]]; then
            COMPREPLY+=("$value")
            if [[ $value == *= ]]; then compopt -o nospace; fi
        else
            compopt -o default
        fi
    done
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


def as_option_or_key(name: str, value: str | None) -> str:
    """Name a setting of a command with an optional RECIPE, in which the local batch is a key, not an option."""
    return "--local-batch (with a recipe: batch.local)" if name == "local_batch" else as_option(name, value)


def wording_of(arguments: list[str]) -> Wording:
    """Return how messages of the command with these arguments name settings."""
    return as_recipe_key if arguments and arguments[0] in RECIPE_COMMANDS else as_option_or_key


@cache
def tables() -> dict[str, dict[str, Any]]:
    """Read words.yaml: synonyms of commands and options, and hints for missing arguments."""
    return cast(dict[str, dict[str, Any]], read_yaml(Path(__file__).with_name("words.yaml")))


def no_such_command(name: str, known: Iterable[str]) -> str:
    """Return the error line for an unknown command."""
    word = name.lower().replace("_", "-")
    meant = tables()["commands"].get(word) or (("import", "launch") if _is_launcher(word) else ())
    near = meant or get_close_matches(word, list(known), n=2, cutoff=0.6)
    hint = f": did you mean {join_or([f'cputrain {command}' for command in near])}?" if near else "."
    return f"No such command {name[:60]!r}{hint} See cputrain --help"


def no_such_command_of(group: str, name: str, known: Iterable[str]) -> str:
    """Return the error line for an unknown command of a group such as "cputrain bench"."""
    known = list(known)
    near = get_close_matches(name, known, n=2, cutoff=0.6)
    hint = f"did you mean {join_or([f'{group} {command}' for command in near])}?" if near else f"give {join_or(known)}."
    return f"No such command {name[:60]!r}: {hint} See {group} --help"


def missing_argument(error: click.MissingParameter) -> str:
    """Return the error line for a missing argument, with a hint to its values or an example."""
    path = error.ctx.command_path if error.ctx else "cputrain"
    missing = error.format_message().partition(". Choose from")[0].removesuffix(".")
    hint = _values_of(error.param) if error.param else ""
    return f"{missing}{f': {hint}.' if hint else '.'} See {path} --help"


def _values_of(param: click.Parameter) -> str:
    """Return a hint to the values of a parameter, "" if there is none."""
    arguments = tables()["arguments"]
    described: str = arguments.get(param.metavar or "") or arguments.get(param.name or "", "")
    if not described and isinstance(param.type, click.Choice):
        return f"give {join_or(list(param.type.choices))}"
    return described


def no_such_option(error: click.NoSuchOption) -> str:
    """Return the error line for an unknown option, with the best hint: options that begin like it, mean the same or
    resemble it, a recipe key, or what `launch` has instead of another launcher's option."""
    context = error.ctx or click.Context(click.Command("cputrain"), info_name="cputrain")
    typed, name = error.option_name, error.option_name.lstrip("-").replace("_", "-")
    shown = [param for param in context.command.params if not getattr(param, "hidden", False)]
    param_of = {word: param for param in shown for word in param.opts if word.startswith("--")}
    near = [word for word in param_of if len(name) > 1 and word.startswith(f"--{name}")]
    near = near or [word for word in tables()["options"].get(name, ()) if word in param_of]
    formats = (param.type for param in shown if "--format" in param.opts)
    near = near or [f"--format {name}" for kind in formats if isinstance(kind, click.Choice) and name in kind.choices]
    keys = [] if near else _keys(name)
    near = near or [word for word in map(_option_of, keys) if word in param_of]
    hint = "" if near or "--ppn" not in param_of else _of_other_launchers(name)
    near = near or get_close_matches(f"--{name}", [*param_of, "--help"], n=1, cutoff=0.75)
    if not near and any(param.name == "settings" for param in shown):
        near = [f"{key}=VALUE" for key in keys[:3]]
    if not hint and near:
        hint = f"did you mean {join_or(near)}?"
    if not hint and (holders := _commands_with(typed, context.command)):
        hint = f"put options after the command, as in {context.command_path} {holders[0]} {typed}."
    if not hint and len(keys) == 1:
        hint = f"did you mean cputrain train RECIPE {keys[0]}=VALUE?"
    return f"No such option {typed}{f': {hint}' if hint else '.'} See {context.command_path} --help"


def refuse_options_as_keys(context: click.Context, _param: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words after a command. Raises InputError if one is an option of the command without its dashes
    (nodes=2), which no recipe key is called."""
    options = {word: param for param in context.command.params for word in param.opts if word.startswith("--")}
    for word in () if context.params.get("prepare") else words:
        name, equals, value = word.partition("=")
        option = options.get(f"--{name.replace('_', '-')}")
        if equals and option is not None and not _keys(name):
            written = option.opts[0] if getattr(option, "is_flag", False) else f"{option.opts[0]} {value}"
            raise InputError(
                f"{word} is no key of a recipe: did you mean the option {written} of {context.command_path}?"
            )
    return words


def _commands_with(option: str, group: click.Command) -> list[str]:
    """Return the commands of a group that have an option; [] for the top level, which would import every module."""
    commands = group.commands if isinstance(group, click.Group) else {}
    return [name for name, command in commands.items() if any(option in param.opts for param in command.params)]


def _keys(name: str) -> list[str]:
    """Return the recipe keys that an option may stand for."""
    from cputrain.recipe.keys import all_keys, keys_elsewhere, plain  # pydantic, only needed here

    return keys_elsewhere(name) or [key for key in all_keys() if plain(key.rpartition(".")[2]) == plain(name)]


def _option_of(key: str) -> str:
    """Return the option that sets a recipe key for one command: --ppn for plan.ppn, --local-batch for batch.local."""
    return as_option("local_batch" if key == "batch.local" else key.removeprefix("plan."), None)


def _is_launcher(word: str) -> bool:
    """Whether a word starts the command line of another launcher."""
    from cputrain.other_launchers import PROGRAMS

    return any(word == call[0] for program in PROGRAMS.values() for call in program.called)


def _of_other_launchers(name: str) -> str:
    """Return a hint to what replaces an option of another launcher, naming that launcher; "" if no launcher has it."""
    from cputrain.other_launchers import PROGRAMS, REASONS

    for program in PROGRAMS.values():
        for option in program.options:
            if name in {spelling.lstrip("-") for spelling in option.names}:
                instead = option.launch_option or option.why
                more = f"; {LEFT_TO_LAUNCHER}" if instead.startswith(REASONS["binding"]) else ""
                return f"{program.title} has it; here: {instead}{more}."
    return ""


class FullSummaryGroup(click.Group):
    """A group whose help shows each command's whole summary, wrapped, and whose error for an unknown command names its
    commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(no_such_command_of(ctx.command_path, args[0], self.list_commands(ctx)), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.commands[name].get_short_help_str(limit=1000)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def catalog_group(names: Callable[[], list[str]]) -> type[click.Group]:
    """Return a group with commands `show` and `search` whose first word may also be a name, which is shown, or another
    text, which is searched; a word similar to a command and followed by another is taken for that command."""

    class CatalogGroup(FullSummaryGroup):
        def resolve_command(
            self, ctx: click.Context, args: list[str]
        ) -> tuple[str | None, click.Command | None, list[str]]:
            word, behind = args[0], args[1:2]
            misspelled = bool(behind) and not behind[0].startswith("-") and bool(_near(word, self))
            if word not in self.commands and not word.startswith("-") and not misspelled:
                args = ["show" if word in names() else "search", *args]
            return super().resolve_command(ctx, args)

    return CatalogGroup


def command_or_list(text: str) -> str:
    """Return the next step after a search without matches: a command that the text resembles, else the list."""
    group = click.get_current_context().parent
    assert group is not None and isinstance(group.command, click.Group)
    near = _near(text, group.command)
    return f"did you mean {group.command_path} {near[0]}?" if near else f"{group.command_path} lists all of them"


def _near(word: str, group: click.Group) -> list[str]:
    """Return the command that a word resembles, as a list of at most one."""
    return get_close_matches(word, group.commands, n=1, cutoff=0.75)


def complete_recipe(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """Complete shipped recipes, else files."""
    return _named(recipe_names(), begun)


def complete_machine(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """Complete machines of the catalog, else files."""
    from cputrain.affinity.topology.catalog import machine_names

    return _named(machine_names(), begun)


def complete_key(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """Complete recipe keys and sections."""
    from cputrain.recipe.keys import all_keys

    return _named(sorted(all_keys()), begun)


def complete_setting(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """Complete KEY= of the recipe keys, or the values of KEY=... if they are words."""
    from cputrain.recipe.keys import all_keys, annotation_of

    key, equals, value = begun.partition("=")
    keys = all_keys()
    if not equals:
        sections = {key.rpartition(".")[0] for key in keys}
        return [CompletionItem(f"{key}=") for key in keys if key.startswith(begun) and key not in sections]
    words = _choices(annotation_of(tuple(key.split(".")))) if key in keys else ()
    return [CompletionItem(f"{key}={word}") for word in words if word.startswith(value)]


def complete_recipe_or_setting(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """Complete the arguments of `job`: a recipe, then its settings."""
    complete = complete_setting if context.params.get(param.name or "") else complete_recipe
    return complete(context, param, begun)


def _named(names: Iterable[str], begun: str) -> Items:
    items = [CompletionItem(name) for name in names if name.startswith(begun)]
    return items or [CompletionItem(begun, type="file")]


def _choices(annotation: Any) -> Iterator[str]:
    """Yield the words that a key accepts."""
    if annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) not in (tuple, dict):
        for inner in get_args(annotation):
            yield from _choices(inner)


class Bash(BashComplete):
    """Rejoin KEY=VALUE, as bash also splits words at "=", and return only what follows the "=" as the completion."""

    source_template = BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one being completed, and that word."""
        env = os.environ
        number = int(env["COMP_CWORD"])
        words = split_arg_string(env["COMP_WORDS"])[1 : number + 1]
        words += [""] * (number - len(words))
        joined: list[str] = []
        for i, word in enumerate(words):
            if joined and (word == "=" or (i and words[i - 1] == "=")):
                joined[-1] += word
            else:
                joined.append(word)
        self._split = len(joined) < len(words) and "=" in joined[-1]
        return joined[:-1], joined[-1] if joined else ""

    def format_completion(self, item: CompletionItem[str]) -> str:
        """Format a completion as the script reads it."""
        value = item.value.partition("=")[2] if self._split else ""
        return f"{item.type},{value or item.value}"


class Zsh(ZshComplete):
    """click's zsh completion, without a space after KEY=."""

    source_template = ZshComplete.source_template.replace(
        'completions+=("$key")',
        'if [[ "$key" == *= ]]; then compadd -S "" -U -- "$key"; else completions+=("$key"); fi',
    )


SHELLS: dict[str, type[ShellComplete]] = {"bash": Bash, "zsh": Zsh, "fish": FishComplete}


def script(shell: str, group: click.Group) -> str:
    """Return the completion script that a shell sources."""
    return SHELLS[shell](group, {}, PROGRAM, COMPLETE).source_template % {
        "complete_func": "_cputrain_completion",
        "complete_var": COMPLETE,
        "prog_name": PROGRAM,
    }


def answer(instruction: str, group: click.Group) -> int:
    """Answer a completion request such as "bash_complete" from the variables that the shell has set; 1 if the shell is
    unknown."""
    shell, _, what = instruction.partition("_")
    if shell not in SHELLS or what != "complete":
        return ExitStatus.FAILED
    click.echo(SHELLS[shell](group, {}, PROGRAM, COMPLETE).complete())
    return 0


@click.command("completion")
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, recipes, machines and KEY= in bash, zsh or fish.

    \b
    bash: cputrain completion bash > ~/.local/share/bash-completion/completions/cputrain
    zsh:  cputrain completion zsh > ~/.zfunc/_cputrain, with fpath+=(~/.zfunc) before compinit in ~/.zshrc
    fish: cputrain completion fish > ~/.config/fish/completions/cputrain.fish
    """
    root = context.find_root().command
    assert isinstance(root, click.Group)
    click.echo(script(shell, root), nl=False)
