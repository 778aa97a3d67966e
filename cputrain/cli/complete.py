"""The answers to a shell that completes a command line, and the scripts that make it ask."""

import os
from collections.abc import Mapping

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

from affinity.exit_status import ExitStatus
from cputrain.cli.completion_table import skeleton
from cputrain.variables import COMPLETE

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
