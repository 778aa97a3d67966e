"""The exit statuses, from affinity/terminal.py."""

import signal

from cputrain.affinity.terminal import ExitStatus, status_of_signal
from site_pages.text import plain, table

REST = """`cputrain launch` returns {failed} when a rank fails, whatever the rank's own status; the message has it. Only
where every rank that failed has exited with status {wrong} (wrong arguments, for Python's argparse too) it returns
{wrong}, with the same message.

Messages go to stderr and begin with `cputrain:`. What a command is for (a plan, a script, a table) goes to stdout, so
that it can be redirected.
"""


def exit_status() -> str:
    """A table of the statuses, and what a launch makes of those of its ranks."""
    rows = [[str(int(status)), plain(status.meaning)] for status in ExitStatus]
    interrupted, unread = status_of_signal(signal.SIGINT), status_of_signal(signal.SIGPIPE)
    by_signal = (
        f"signal n ended it: {interrupted} after Ctrl-C, also where a training has saved its state and can be resumed; "
        f"{unread} where nobody reads its output any more (`| head`), which ends no job"
    )
    statuses = table(["status", "meaning"], [*rows, [f"{status_of_signal(0)} + n", by_signal]])
    rest = REST.format(failed=int(ExitStatus.FAILED), wrong=int(ExitStatus.WRONG_INPUT))
    return f"# Exit status\n\n{statuses}\n\n{rest}"
