"""Where a process's memory lies: anonymous memory counts, in bytes, whatever the size of its pages."""

from dataclasses import replace

import pytest

from cputrain.affinity.kernel import Running, anonymous_bytes, comparison
from cputrain.affinity.planner import Request, Runtime, plan_machine
from cputrain.affinity.wording import MIB, first_named
from tests.support.machines import build_machine

LIBRARY = "7f0 bind:1 file=/usr/lib/libtorch_cpu.so mapped=9000 mapmax=2 active=0 N0=9000 kernelpagesize_kB=4"
WRITTEN_LIBRARY = "7f1 bind:1 file=/usr/lib/libc.so.6 anon=3 dirty=3 mapped=5 N0=2 N1=3 kernelpagesize_kB=4"
OWN_DATA = "7f2 bind:1 file=/usr/lib/libc.so.6 anon=2 dirty=2 N1=2 kernelpagesize_kB=4"
SHARED = "7f3 bind:1 file=/dev/shm/torch dirty=512 N0=512 kernelpagesize_kB=4"
HEAP = "55e bind:1 heap anon=100 dirty=100 active=0 N1=100 kernelpagesize_kB=4"
TRANSPARENT = "7f4 bind:1 anon=1024 dirty=1024 N0=512 N1=512 kernelpagesize_kB=4"
HUGETLB = "7f5 bind:1 file=/anon_hugepage\\040(deleted) huge anon=16 dirty=16 N0=16 kernelpagesize_kB=2048"


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (LIBRARY, {}),
        (WRITTEN_LIBRARY, {}),
        (OWN_DATA, {1: 8192}),
        (SHARED, {}),
        (HEAP, {1: 100 * 4096}),
        (TRANSPARENT, {0: 2 * MIB, 1: 2 * MIB}),
        (HUGETLB, {0: 32 * MIB}),
        ("7fff vdso=0 default", {}),
    ],
)
def test_anonymous_memory_counts_in_bytes(mapping: str, expected: dict[int, int]) -> None:
    assert anonymous_bytes(f"{mapping}\n") == expected


def running(*mappings: str) -> Running:
    """A process that is bound to node 1, with these mappings."""
    worker = plan_machine(build_machine(2, 1, 4, 1), Request(ppn=2), Runtime()).workers[1]
    bound = replace(worker, memory_policy="bind", memory_nodes=(1,))
    memory = anonymous_bytes("\n".join(mappings))
    return Running(pid=1, command="python", worker=bound, threads=(), memory_bytes=memory)


def test_libraries_on_other_nodes_are_no_difference() -> None:
    process = running(LIBRARY, WRITTEN_LIBRARY, SHARED, HEAP)
    assert not process.differs
    assert "differs" not in comparison([process])


def test_huge_pages_on_other_nodes_are_a_difference_of_their_size() -> None:
    process = running(HEAP, HUGETLB)
    assert process.differs
    assert "differs  32 MiB are on other nodes" in comparison([process])


def test_lists_in_messages_name_the_first_five() -> None:
    assert first_named(["a", "b"]) == "a, b"
    assert first_named(list("abcde")) == "a, b, c, d, e"
    assert first_named(list("abcdefgh")) == "a, b, c, d, e and 3 more"
