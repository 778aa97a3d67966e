"""Completion by Tab in bash, zsh and fish: click's own, with the recipes, machines and keys that parameters take."""

import os
from collections.abc import Iterable, Iterator
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

from cputrain.affinity.terminal import ExitStatus
from cputrain.variables import COMPLETE

Items = list[CompletionItem[str]]


def complete_recipe(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """The included recipes that begin so, else files."""
    from cputrain.recipe.loading import recipe_names  # pydantic: only where a recipe is completed

    return _named(recipe_names(), begun)


def complete_machine(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """The machines of the catalog that begin so, else files."""
    from cputrain.affinity.topology.catalog import machine_names

    return _named(machine_names(), begun)


def complete_key(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """The recipe keys and sections that begin so."""
    from cputrain.recipe.keys import all_keys

    return _named(sorted(all_keys()), begun)


def complete_setting(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """KEY= for each key that begins so, or for KEY=... the words that the key takes."""
    from cputrain.recipe.keys import all_keys, annotation_of

    key, equals, value = begun.partition("=")
    keys = all_keys()
    if not equals:
        sections = {each.rpartition(".")[0] for each in keys}
        return [CompletionItem(f"{each}=") for each in keys if each.startswith(begun) and each not in sections]
    words = _choices(annotation_of(tuple(key.split(".")))) if key in keys else ()
    return [CompletionItem(f"{key}={word}") for word in words if word.startswith(value)]


def complete_recipe_or_setting(context: click.Context, param: click.Parameter, begun: str) -> Items:
    """The words of a job: a recipe, then its settings."""
    complete = complete_setting if context.params.get(param.name or "") else complete_recipe
    return complete(context, param, begun)


def _named(names: Iterable[str], begun: str) -> Items:
    found = [CompletionItem(name) for name in names if name.startswith(begun)]
    return found or [CompletionItem(begun, type="file")]


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


def answer(instruction: str, group: click.Group) -> int:
    """Answer "bash_complete" and the like from the variables that the shell has set; 1 for a shell that is unknown."""
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
