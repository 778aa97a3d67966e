"""The NUMA nodes of a process's memory, from /proc/PID/numa_maps: a line for each mapping, its pages by node."""

import re

NODE_PAGES = re.compile(r" N(\d+)=(\d+)")
ANONYMOUS = re.compile(r" anon=(\d+)")
PAGE_KIB = re.compile(r" kernelpagesize_kB=(\d+)")


def pages_by_node(mapping: str) -> dict[int, int]:
    """NUMA node -> resident pages of one mapping, in its own page size."""
    return {int(node): int(count) for node, count in NODE_PAGES.findall(mapping)}


def anonymous_bytes(numa_maps: str) -> dict[int, int]:
    """NUMA node -> bytes of anonymous memory, in pages of any size: that is the memory that a policy places.

    Pages of files lie where they were first read, by whichever process, and shared memory where its first user touched
    it. A private mapping of a file may have both written pages and pages of the file; the kernel does not tell which of
    them lie on which node, so such a mapping does not count.
    """
    found: dict[int, int] = {}
    for mapping in numa_maps.splitlines():
        pages, anonymous, size = pages_by_node(mapping), ANONYMOUS.search(mapping), PAGE_KIB.search(mapping)
        if anonymous and size and int(anonymous[1]) >= sum(pages.values()):
            for node, count in pages.items():
                found[node] = found.get(node, 0) + count * int(size[1]) * 1024
    return found
