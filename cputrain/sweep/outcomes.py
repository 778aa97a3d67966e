"""How a training of a sweep ended: a status, and the cause in one line."""

import re

DONE, STOPPED, FAILED, DIVERGED = "done", "stopped", "failed", "diverged"
OUT_OF_MEMORY, TIME_LIMIT, DOES_NOT_FIT, INVALID = "out of memory", "time limit", "does not fit", "invalid"

NO_MEMORY = re.compile(
    r"can't allocate memory|MemoryError|bad_alloc|Cannot allocate memory|Out of memory|not enough memory"
    r"|could not create a memory|failed to map segment|can't start new thread|Thread creation failed"
)
KILLED = re.compile(r"(.*) was ended by SIGKILL(?:, (out of memory: [^;]*))?")
NON_FINITE = re.compile(r"\bloss -?(nan|inf)\b|\bNaN or Inf\b")
OWN_MESSAGE = re.compile(r"cputrain: (.+)")


def outcome_of(message: str) -> tuple[str, str]:
    """Status and cause of a failed training, from the launcher's message."""
    first, *tail = [line.strip().removeprefix("| ") for line in message.splitlines()] or [""]
    if killed := KILLED.match(first):
        rank, shortage = killed.groups()
        if shortage is not None:
            return OUT_OF_MEMORY, f"{rank} killed by SIGKILL: {shortage}"
        return FAILED, f"{rank} killed by SIGKILL: the kernel counted no out-of-memory kill; see the scheduler's log"
    lacking = next((line for line in tail if NO_MEMORY.search(line)), None)
    if lacking is not None:
        return OUT_OF_MEMORY, f"allocation failed: {lacking}"
    own = next((found[1] for line in tail if (found := OWN_MESSAGE.match(line))), None)
    if own is not None:
        return DIVERGED if NON_FINITE.search(own) else FAILED, own
    return FAILED, first.removesuffix("; its last lines:")
