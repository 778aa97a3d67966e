"""Commands with many options: --help shows them in sections, with examples at the end."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

OTHER = "Other options"
# Of the planning options, by the names of their parameters.
HOSTS = ("machine", "hosts", "hostfile", "nodes", "host_groups")
CORES = (
    *("ppn", "threads", "inter_op", "comm_cores", "loader_cores", "smt", "local_batch"),
    *("cores", "e_cores", "balance", "oversubscribe", "share", "profile"),
)
RUNTIME = ("openmp", "allocator", "pin_threads", "keep_env")
NETWORK = ("launcher", "bind", "fabric", "link_gbit")
PLANNING = {
    "Hosts": HOSTS,
    "Workers and cores": CORES,
    "OpenMP and memory": RUNTIME,
    "Network and launcher": NETWORK,
}


class SectionedCommand(click.Command):
    """A command whose options stand in `sections` (title -> names of parameters); the others come last. `examples` are
    command lines, shown at the end."""

    def __init__(
        self,
        *arguments: Any,
        sections: Mapping[str, Sequence[str]],
        examples: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.sections, self.examples = sections, examples

    def options_by_section(self, ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
        """Each section that has options, and these in the order of the section."""
        options = {param.name: param for param in self.get_params(ctx) if isinstance(param, click.Option)}
        for title, names in self.sections.items():
            found = [options.pop(name) for name in names if name in options]
            if found:
                yield title, list(found)
        yield OTHER, list(options.values())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        for title, options in self.options_by_section(ctx):
            records = [record for option in options if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"{' ' * formatter.current_indent}{line}\n" for line in self.examples))
