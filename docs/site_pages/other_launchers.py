"""Page of other launchers' options and their counterparts, from the tables of `cputrain import`."""

from cputrain.other_launchers import PROGRAMS
from site_pages.text import code, plain, table

INTRODUCTION = """# Options of other launchers

`cputrain import` converts a command line of these launchers to `cputrain launch`
([migrating](../guides/moving-in.md)).
"""


def other_launchers() -> str:
    """Return a table for each launcher: its options, their counterparts, and reasons or differences."""
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
