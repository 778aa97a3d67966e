"""What becomes of the options of other launchers, from the tables that `cputrain import` uses."""

from cputrain.other_launchers import PROGRAMS
from site_pages.text import code, plain, table

INTRODUCTION = """# Options of other launchers

`cputrain import` prints the `cputrain launch` that does what a command line of these launchers does.
[Migrating](../guides/moving-in.md) tells more.
"""


def other_launchers() -> str:
    """A table for each launcher: its options, ours, and why there is none or what differs."""
    parts = [INTRODUCTION]
    for program in PROGRAMS.values():
        rows = [
            [
                " ".join(map(code, option.names)),
                code(option.launch_option) if option.launch_option else "",
                plain(option.why),
            ]
            for option in program.options
        ]
        on_one_host = f"On one host: {program.remark_on_one_host}" if program.remark_on_one_host else ""
        remarks = "".join(
            f"\n{plain(remark)}.\n" for remark in (program.remark, on_one_host, program.remark_without_ranks) if remark
        )
        parts.append(f"## {program.title}\n{remarks}\n{table(['option', 'here', 'why'], rows)}\n")
    return "\n".join(parts)
