"""Page of the exit statuses in affinity/terminal.py."""

import signal

from cputrain.affinity.terminal import ExitStatus, status_of_signal
from site_pages.text import plain, table

REST = """`cputrain launch` returns {failed} if a rank fails; the message names the rank's status. If all failed ranks
exited with status {wrong} (wrong arguments, as with Python's argparse), it returns {wrong}, with the same message.

Messages go to stderr and begin with `cputrain:`. A command's result (a plan, a script, a table) goes to stdout, so
that it can be redirected.
"""


def exit_status() -> str:
    """Return a table of the statuses, and how a launch derives its status from its ranks."""
    rows = [[str(int(status)), plain(status.meaning)] for status in ExitStatus]
    interrupted, unread = status_of_signal(signal.SIGINT), status_of_signal(signal.SIGPIPE)
    by_signal = (
        f"signal n ended it: {interrupted} after Ctrl-C, even if a training has saved its state and can be resumed; "
        f"{unread} if the reader of its output has gone (`| head`), which ends no job"
    )
    statuses = table(["status", "meaning"], [*rows, [f"{status_of_signal(0)} + n", by_signal]])
    rest = REST.format(failed=int(ExitStatus.FAILED), wrong=int(ExitStatus.WRONG_INPUT))
    return f"# Exit status\n\n{statuses}\n\n{rest}"
