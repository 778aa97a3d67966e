"""Completion by Tab in bash, zsh and fish.

What can be completed is kept in a file, since the commands' own modules take a second to load. `skeleton` makes of it
the same tree of click's commands and options as the real one, which does nothing else.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

from cputrain import __version__
from cputrain.affinity.errors import RunError
from cputrain.affinity.filesystem import cache_folder
from cputrain.affinity.terminal import ExitStatus
from cputrain.files import write_text
from cputrain.variables import COMPLETE

Table = dict[str, Any]
ROOT = Path(__file__).parents[2]
SOURCES = ("cputrain/cli", "cputrain/recipe", "cputrain/affinity/planner", "cputrain/mpi", "cputrain/mpi/launchers")
SHIPPED = ("configs/recipes", "configs/machines", "cputrain/recipes", "cputrain/machines")
# What the parameters of these names take.
TAKES = {
    "recipe": "recipes",
    "machine": "machines",
    "settings": "settings",
    "grids": "settings",
    "array": "settings",
    "words": "words",
    "topic": "keys",
}


def read_table(env: Mapping[str, str], make: Callable[[], Table]) -> Table:
    """The table in the user's cache; made anew, and kept, where it is that of another version of the sources."""
    known = fingerprint()
    path = None
    with suppress(RunError):  # a user without a home: nothing is kept
        path = cache_folder(env) / "completion.json"
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8")) if path else None
        if isinstance(found, dict) and found.get("fingerprint") == known:
            return found
    table = {"fingerprint": known, **make()}
    with suppress(OSError):  # a cache that cannot be written makes completion slow, not wrong
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(table))
    return table


def fingerprint() -> str:
    """The version, and the newest of the files that the table is made from with their number."""
    files = [path for folder in SOURCES for path in (ROOT / folder).glob("*.py")]
    files += [path for folder in SHIPPED for path in (ROOT / folder).glob("*.yaml")]
    return f"{__version__} {len(files)} {max(path.stat().st_mtime_ns for path in files)} {ROOT}"


def make_table(group: click.Group) -> Table:
    """The table of a tree of commands, and the recipes, machines and keys."""
    from cputrain.affinity.topology.catalog import machine_names  # YAML
    from cputrain.recipe.keys import all_keys, annotation_of  # pydantic
    from cputrain.recipe.loading import recipe_names

    keys = {key: list(_choices(annotation_of(tuple(key.split("."))))) for key in all_keys()}
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    return {
        "root": _command(group, click.Context(group)),
        "recipes": recipe_names(),
        "machines": machine_names(),
        "settings": {key: values for key, values in keys.items() if key not in sections},
        "keys": sorted({*keys}),
    }


def _choices(annotation: Any) -> Iterator[str]:
    """The words that a key takes."""
    if annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) not in (tuple, dict):
        for inner in get_args(annotation):
            yield from _choices(inner)


def _command(command: click.Command, context: click.Context) -> Table:
    found: Table = {
        "name": command.name,
        "help": command.get_short_help_str(),
        "settings": {"ignore_unknown_options": command.ignore_unknown_options},
        "interspersed": command.allow_interspersed_args,
        "params": [_param(each) for each in command.params if not getattr(each, "hidden", False)],
    }
    if isinstance(command, click.Group):
        names = command.list_commands(context)
        inner = {name: command.get_command(context, name) for name in names}
        found["commands"] = {name: _command(each, context) for name, each in inner.items() if each}
    return found


def _param(param: click.Parameter) -> Table:
    kind = param.type
    return {
        "name": param.name,
        "option": isinstance(param, click.Option),
        "opts": param.opts,
        "secondary": param.secondary_opts,
        "flag": bool(getattr(param, "is_flag", False)),
        "nargs": param.nargs,
        "multiple": param.multiple,
        "choices": list(map(str, kind.choices)) if isinstance(kind, click.Choice) else None,
        "path": isinstance(kind, click.Path),
        "help": getattr(param, "help", None),
    }


def skeleton(table: Table) -> click.Group:
    """The tree of commands of a table."""
    root = _skeleton(table["root"], table)
    assert isinstance(root, click.Group)
    return root


class _Commands(click.Group):
    """Commands whose names may be two words: "job kubernetes" is proposed word by word."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in self.commands if " " not in name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        two = " ".join(args[:2])
        return (two, self.commands[two], args[2:]) if two in self.commands else super().resolve_command(ctx, args)


def _skeleton(found: Table, table: Table) -> click.Command:
    params = [_skeleton_param(each, table) for each in found["params"]]
    settings = {**found["settings"], "allow_interspersed_args": found["interspersed"]}
    if "commands" not in found:
        return click.Command(found["name"], params=params, help=found["help"], context_settings=settings)
    inner = {name: _skeleton(each, table) for name, each in found["commands"].items()}
    for first, second in (name.split() for name in inner if " " in name):
        kind = next(param.type for param in inner[first].params if isinstance(param.type, click.Choice))
        kind.choices = (*kind.choices, second)
    return _Commands(found["name"], commands=inner, params=params, help=found["help"], context_settings=settings)


def _skeleton_param(found: Table, table: Table) -> click.Parameter:
    kind: Any = click.STRING
    if found["choices"] is not None:
        kind = click.Choice(found["choices"])
    elif found["path"]:
        kind = click.Path()
    values = TAKES.get(found["name"])
    complete = None if values is None or found["flag"] else _completes(values, table)
    if not found["option"]:
        return click.Argument([found["name"]], type=kind, nargs=found["nargs"], required=False, shell_complete=complete)
    names = found["opts"] if not found["secondary"] else [f"{found['opts'][0]}/{found['secondary'][0]}"]
    more = (
        {"is_flag": True} if found["flag"] else {"type": kind, "nargs": found["nargs"], "multiple": found["multiple"]}
    )
    return click.Option([found["name"], *names], help=found["help"], shell_complete=complete, **more)


def _completes(values: str, table: Table) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]:
    """What completes a parameter that takes such values."""

    def complete(context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem[str]]:
        wanted = values
        if wanted == "words":  # of job: RECIPE [KEY=VALUE]...
            wanted = "settings" if context.params.get("words") else "recipes"
        if wanted == "settings":
            return [CompletionItem(each) for each in settings_from(begun, table["settings"])]
        named = [CompletionItem(each) for each in table[wanted] if each.startswith(begun)]
        return named or [CompletionItem(begun, type="file")]

    return complete


def settings_from(begun: str, keys: Mapping[str, list[str]]) -> list[str]:
    """KEY= for each key that begins so, or for KEY=... the words that the key takes."""
    key, equals, value = begun.partition("=")
    if equals:
        return [f"{key}={word}" for word in keys.get(key, ()) if word.startswith(value)]
    return [f"{each}=" for each in keys if each.startswith(begun)]


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


class Bash(BashComplete):
    """bash splits words at "=" too: KEY=VALUE is put together again, and only what stands behind "=" is completed."""

    source_template = BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one that is completed, and that one."""
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
        """A completion as the script reads it."""
        value = item.value.partition("=")[2] if self._split else ""
        return f"{item.type},{value or item.value}"


class Zsh(ZshComplete):
    """As click's, without a space behind KEY=."""

    source_template = ZshComplete.source_template.replace(
        'completions+=("$key")',
        'if [[ "$key" == *= ]]; then compadd -S "" -U -- "$key"; else completions+=("$key"); fi',
    )


SHELLS: dict[str, type[ShellComplete]] = {"bash": Bash, "zsh": Zsh, "fish": FishComplete}


def script(shell: str, group: click.Group) -> str:
    """The script that a shell reads once."""
    return SHELLS[shell](group, {}, PROGRAM, COMPLETE).source_template % {
        "complete_func": "_cputrain_completion",
        "complete_var": COMPLETE,
        "prog_name": PROGRAM,
    }


def answer(instruction: str, table: Mapping[str, object]) -> int:
    """Answer "bash_complete" and the like from the variables that the shell has set; 1 for a shell that is unknown."""
    shell, _, what = instruction.partition("_")
    if shell not in SHELLS or what != "complete":
        return ExitStatus.FAILED
    click.echo(SHELLS[shell](skeleton(dict(table)), {}, PROGRAM, COMPLETE).complete())
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
    read_table(os.environ, lambda: make_table(root))  # the first use of Tab is quick, too
    click.echo(script(shell, root), nl=False)
