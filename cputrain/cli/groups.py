"""Groups of commands: with whole summaries in their help, and those that list, search and show named things."""

from collections.abc import Callable
from difflib import get_close_matches

import click

from cputrain.cli.suggestions import no_such_command_of


class WholeSummaries(click.Group):
    """A group whose help has the whole summary of each command, on several lines where that is needed, and which names
    its commands to one who gives another."""

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
    """A group with the commands `show` and `search` whose first word may be the name of a thing, which is shown, or
    another text, which is searched; a word like a command's with another one behind it is taken for that command."""

    class CatalogGroup(WholeSummaries):
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
    """What to do where a command's search for a text finds nothing: a command that it resembles, else the list."""
    group = click.get_current_context().parent
    assert group is not None and isinstance(group.command, click.Group)
    near = _near(text, group.command)
    return f"did you mean {group.command_path} {near[0]}?" if near else f"{group.command_path} lists all of them"


def _near(word: str, group: click.Group) -> list[str]:
    """The command that a word resembles."""
    return get_close_matches(word, group.commands, n=1, cutoff=0.75)
