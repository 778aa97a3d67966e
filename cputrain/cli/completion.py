"""cputrain completion: what a shell reads to complete command lines."""

import os

import click

from cputrain.cli.complete import SHELLS, script
from cputrain.cli.completion_table import make_table, read_table


@click.command("completion")
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
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
