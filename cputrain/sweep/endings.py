"""How a sweep's training ends, and why, in a word and in a line."""

import re
from pathlib import Path

DONE, STOPPED, FAILED, DIVERGED = "done", "stopped", "failed", "diverged"
OUT_OF_MEMORY, TIME_LIMIT, DOES_NOT_FIT, REFUSED = "out of memory", "time limit", "does not fit", "refused"

NO_MEMORY = re.compile(
    r"can't allocate memory|MemoryError|bad_alloc|Cannot allocate memory|Out of memory|not enough memory"
    r"|could not create a memory|failed to map segment|can't start new thread|Thread creation failed"
)
NO_NUMBERS = re.compile(r"\bloss -?(nan|inf)\b|no numbers\b")
OURS = re.compile(r"cputrain: (.+)")


def ending(told: str, *, oom_killed: bool) -> tuple[str, str]:
    """Status and cause in one line, from what the launcher has told of a failed training.

    `oom_killed`: whether the kernel has counted an out-of-memory kill meanwhile.
    """
    first, *tail = [line.strip().removeprefix("| ") for line in told.splitlines()] or [""]
    rank = first.partition(" was ended by ")[0]
    if "ended by SIGKILL" in first:
        if oom_killed:
            return OUT_OF_MEMORY, f"{rank} killed by SIGKILL: out of memory (see dmesg, or memory.events of its cgroup)"
        return FAILED, f"{rank} killed by SIGKILL: the kernel counted no out-of-memory kill; see the scheduler's log"
    lacking = next((line for line in tail if NO_MEMORY.search(line)), None)
    if lacking is not None:
        return OUT_OF_MEMORY, f"allocation failed: {lacking}"
    ours = next((found[1] for line in tail if (found := OURS.match(line))), None)
    if ours is not None:
        return DIVERGED if NO_NUMBERS.search(ours) else FAILED, ours
    return FAILED, first.removesuffix("; its last lines:")


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 where it does not count them."""
    lines = vmstat.read_text().splitlines() if vmstat.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
