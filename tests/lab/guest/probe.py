"""What affinity.bind becomes in the lab: touch pages of three sizes, print what the kernel gave, wait for a line.

    python -I -S probe.py

prints one line of JSON. It imports nothing of the project, as a user's program would not.
"""

import ctypes
import json
import mmap
import sys
from pathlib import Path

MIB = 1 << 20
HUGE = 2 * MIB
NO_HUGE_PAGES, HUGE_PAGES, COLLAPSE = 15, 14, 25  # madvise(2)
HUGETLB = 0x40000  # mmap(2)


def touched(size: int, flags: int, advice: int | None) -> tuple[mmap.mmap, int]:
    """A mapping with every page written, and its address."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    if advice is not None:
        memory.madvise(advice)
    for offset in range(0, size, 4096):
        memory[offset] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if advice == HUGE_PAGES:
        # A page fault gets a huge page only where the kernel has one at hand; this makes them, or says why not.
        first = -address % HUGE
        memory.madvise(COLLAPSE, first, (size - first) // HUGE * HUGE)
    return memory, address


def transparent_kib(memory: mmap.mmap) -> int:
    """How much of the process lies in transparent huge pages, in KiB.

    Kernel 6.1 leaves out of smaps those that automatic NUMA balancing has marked, which it does to a process every
    second at most: an access takes the mark away, so one of two counts right after an access has all of them.
    """
    counts = []
    for _ in range(2):
        for offset in range(0, len(memory), 4096):
            memory[offset] = 1
        rollup = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
        counts.append(next(int(line.split()[1]) for line in rollup if line.startswith("AnonHugePages:")))
    return max(counts)


def main() -> None:
    """Touch, report, wait."""
    wanted = {
        "small": touched(4 * MIB, 0, NO_HUGE_PAGES),
        "transparent": touched(8 * MIB, 0, HUGE_PAGES),
        "hugetlb": touched(2 * HUGE, HUGETLB, None),
    }
    lines = {
        int(line.split()[0], 16): line for line in Path("/proc/self/numa_maps").read_text(encoding="utf-8").splitlines()
    }
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    report = {
        "cpus": status["Cpus_allowed_list"].strip(),
        "mappings": {name: lines[max(a for a in lines if a <= at)] for name, (_, at) in wanted.items()},
        "transparent_kib": transparent_kib(wanted["transparent"][0]),
    }
    print(json.dumps(report), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
