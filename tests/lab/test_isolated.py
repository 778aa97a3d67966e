"""CPUs that a real kernel isolates at boot: where it runs threads, and that plans bind each of them alone."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.lab import boot
from tests.lab.topologies import Node, Topology

ISOLATED = Topology(cores=6, nodes=(Node(cpus="0-5", mib=1536),), workers=(), words=("isolcpus=2-5",))


@pytest.mark.parametrize("kernel", [pytest.param("6.1", marks=pytest.mark.nightly), "newer"])
def test_each_thread_on_isolated_cpus_is_bound_alone(kernel: str, tmp_path: Path) -> None:
    boot.compile_modules("tests.lab.guest.isolated")
    command = f"{shlex.quote(sys.executable)} -S -m tests.lab.guest.isolated /mnt/results.json"
    boot.run(boot.Guest(topology=ISOLATED, kernel=kernel, command=command, exchange=tmp_path))
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["isolated"] == [2, 3, 4, 5] and found["by_default"] == [0, 1]
    assert len(found["free"]) == 1, "four threads that may run on four isolated CPUs stay where the first has started"
    assert found["alone"] == [2, 3, 4, 5]
    assert found["everything"] == [0, 1, 2, 3, 4, 5]
    assert found["all"]["pus"] == [[0], [1]]
    assert found["all"]["warnings"][0].startswith("CPUs 2-5 are isolated (isolcpus) and left out")
    assert found["requested"]["pus"] == [[2, 3, 4, 5]] and found["requested"]["pinned"] == [True]
    assert found["partition"] == [1, 2, 3, 4, 5]
