"""How a training of a sweep ended: a status, and the cause in one line."""

import re
from pathlib import Path

DONE, STOPPED, FAILED, DIVERGED = "done", "stopped", "failed", "diverged"
OUT_OF_MEMORY, TIME_LIMIT, DOES_NOT_FIT, INVALID = "out of memory", "time limit", "does not fit", "invalid"

NO_MEMORY = re.compile(
    r"can't allocate memory|MemoryError|bad_alloc|Cannot allocate memory|Out of memory|not enough memory"
    r"|could not create a memory|failed to map segment|can't start new thread|Thread creation failed"
)
NON_FINITE = re.compile(r"\bloss -?(nan|inf)\b|\bNaN or Inf\b")
OWN_MESSAGE = re.compile(r"cputrain: (.+)")


def outcome_of(message: str, *, oom_killed: bool) -> tuple[str, str]:
    """Status and cause of a failed training, from the launcher's message.

    `oom_killed`: whether the kernel has counted an out-of-memory kill meanwhile.
    """
    first, *tail = [line.strip().removeprefix("| ") for line in message.splitlines()] or [""]
    rank = first.partition(" was ended by ")[0]
    if "ended by SIGKILL" in first:
        if oom_killed:
            return OUT_OF_MEMORY, f"{rank} killed by SIGKILL: out of memory (see dmesg, or memory.events of its cgroup)"
        return FAILED, f"{rank} killed by SIGKILL: the kernel counted no out-of-memory kill; see the scheduler's log"
    lacking = next((line for line in tail if NO_MEMORY.search(line)), None)
    if lacking is not None:
        return OUT_OF_MEMORY, f"allocation failed: {lacking}"
    own = next((found[1] for line in tail if (found := OWN_MESSAGE.match(line))), None)
    if own is not None:
        return DIVERGED if NON_FINITE.search(own) else FAILED, own
    return FAILED, first.removesuffix("; its last lines:")


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Processes that the kernel has killed for lack of memory since it started; 0 where it does not count them."""
    lines = vmstat.read_text().splitlines() if vmstat.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
