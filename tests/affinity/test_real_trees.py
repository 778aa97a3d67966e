"""/sys trees of real hosts, where they lie beside the checkout, against the counts of hwloc 2.9.0.

Every quirk in them is also made on the spot, in test_sysfs.py, test_numa.py, test_core_types.py and test_cgroup.py,
which need no such trees; test_against_hwloc.py compares more of smaller copies. docs/real-machines.md is the table of
all of them.
"""

from pathlib import Path

import pytest

from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import Machine

pytestmark = pytest.mark.slow

TREES = Path(__file__).parents[3] / "shared" / "hwloc"

# name: (packages, cores, PUs, NUMA nodes) allowed; then the same of the whole host where it differs. By hwloc.
ORACLE = {
    "128arm-2pa2n8cluster4co": ((2, 128, 128, 4),),
    "16amd64-8n2c-cpusets": ((6, 10, 10, 4), (8, 15, 15, 8)),
    "16em64t-4s2ca2c-cpusetreorder": ((4, 11, 11, 1), (4, 16, 16, 1)),
    "20em64t-hybrid-1p6c2t+2ca4co1t": ((1, 14, 20, 1),),
    "24em64t-2n6c2t+2mic.olddriver": ((2, 12, 24, 2),),
    "28em64t-2s2n7c-buggycoresiblings": ((4, 28, 28, 4),),
    "32amd64-4s2n4c-cgroup": ((1, 6, 6, 6), (4, 32, 32, 8)),
    "32em64t-2n8c+dax+nvme+mic+dimms": ((2, 16, 16, 2),),
    "32intel64-2p8co2t+8ve": ((2, 16, 32, 2),),
    "40intel64-2g2n4c+pcilocality": ((4, 40, 40, 4),),
    "64amd64-4p2n4ca2co": ((4, 64, 64, 8),),
    "64intel64-fakeKNL-A2A-cache": ((1, 16, 64, 1),),
    "64intel64-fakeKNL-SNC4-hybrid": ((1, 16, 64, 8),),
    "fakecpuid1f-64intel64-2p4d2n2c2t": ((4, 32, 64, 16),),
    "fakeheteromemtiers": ((1, 6, 6, 7),),
    "fakememinitiators-1np2c+1npp+gi": ((2, 8, 8, 6), (2, 8, 8, 11)),
    "gen-cts1-pascal": ((2, 36, 72, 2),),
    "gen-epyc-corona": ((2, 48, 96, 8),),
    "gen-g4dnmetal": ((2, 48, 96, 2),),
    "gen-knl-quad-cache": ((1, 68, 272, 1),),
    "gen-knl-snc4-flat": ((1, 68, 272, 8),),
    "nvidia-dgx-gb10": ((1, 20, 20, 1),),
    "offline-cpu0-node0": ((2, 17, 17, 1),),
}
# Where we count otherwise, and why.
OURS = {
    "28em64t-2s2n7c-buggycoresiblings": (
        ((2, 28, 28, 4),),
        "the kernel's core_siblings stop at the NUMA node; physical_package_id, which is right, says two packages",
    ),
    "64amd64-4p2n4ca2co": (
        ((4, 32, 64, 8),),
        "the two halves of a Bulldozer module share one vector unit: one core to a trainer, as thread_siblings say",
    ),
}
TABLE = Path(__file__).parents[2] / "docs" / "real-machines.md"
HEAD = """# Real machines

`/sys` and `/proc` trees of real hosts (and emulated ones, named fake), from hwloc's own tests and from machines that
LLNL's mpibind describes, read by `cputrain plan --machine TREE.tar.bz2` and by hwloc 2.9.0. Counts are packages /
cores / PUs / NUMA nodes that the process may use; after "of", the counts of the whole host if they differ.

| tree | hwloc | cputrain | verdict |
|---|---|---|---|"""
Counts = tuple[tuple[int, int, int, int], ...]


def counts_of(machine: Machine) -> Counts:
    """Packages, cores, PUs and NUMA nodes: allowed, then of the whole host where that differs."""
    cores = machine.allowed_cores
    packages = len({core.package for core in cores})
    allowed = (packages, len(cores), len(machine.allowed_pus), len(machine.allowed_nodes))
    whole = (len(machine.packages), len(machine.cores), len(machine.pus), len(machine.numa_nodes))
    return (allowed,) if whole == allowed else (allowed, whole)


def row(name: str, ours: Counts) -> str:
    shown = [" of ".join(" / ".join(map(str, part)) for part in counts) for counts in (ORACLE[name], ours)]
    verdict = "equal" if ours == ORACLE[name] else OURS[name][1]
    return f"| {name} | {shown[0]} | {shown[1]} | {verdict} |"


@pytest.mark.nightly
@pytest.mark.long
def test_trees_of_real_hosts_count_as_hwloc_counts(request: pytest.FixtureRequest) -> None:
    here = [name for name in ORACLE if (TREES / f"{name}.tar.bz2").is_file()]
    rows = [row(name, counts_of(find_machine(str(TREES / f"{name}.tar.bz2")))) for name in here]
    if request.config.getoption("--update-golden") and len(here) == len(ORACLE):
        TABLE.write_text("\n".join([HEAD, *rows]) + "\n")
    assert set(rows) <= set(TABLE.read_text().splitlines())


def test_the_table_has_every_tree() -> None:
    expected = [row(name, OURS[name][0] if name in OURS else ORACLE[name]) for name in ORACLE]
    assert TABLE.read_text() == "\n".join([HEAD, *expected]) + "\n"
