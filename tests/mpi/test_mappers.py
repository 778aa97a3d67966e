"""256 hosts of 2 x 24 cores, mapped by the launchers' own mappers without starting anything: as planned."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import parse_list
from cputrain.mpi.launch_command import find_launcher
from tests.support.commands import HANGS_S, mpi_path
from tests.support.jobs import job_of, written

# hwloc's description of the machine, for mappers that would otherwise inspect this one.
SYNTHETIC = "pack:2 [numa] l3:1 core:24 pu:2(indexes=2*48:48*1)"
HOSTS = tuple(f"10.9.{i // 200}.{i % 200 + 1}" for i in range(256))
PLAN = plan_machine(find_machine("skx-8160-2s"), Request(ppn=4, nodes=256), Runtime())
RANKS = [host for host in HOSTS for _ in range(4)]


def mapped(name: str, binder: str, folder: Path, *options: str) -> str:
    """What a launcher prints of its map of the job."""
    path = {**os.environ, **mpi_path(name)}
    job = job_of(folder, ("true",), PLAN, HOSTS, binder=binder)
    command = written(job, find_launcher(name.removesuffix("4"), path), ("true",))
    # Intel MPI goes on after its map: there is no ssh for it then.
    alone = {"HWLOC_SYNTHETIC": SYNTHETIC, "HWLOC_THISSYSTEM": "1", "I_MPI_HYDRA_BOOTSTRAP_EXEC": "/bin/false"}
    env = {**path, **dict(command.variables), **alone}
    argv = [command.argv[0], *options, *command.argv[1:]]
    result = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=HANGS_S)
    return result.stdout + result.stderr


def test_open_mpi_5_binds_each_rank_to_its_cores(tmp_path: Path) -> None:
    output = mapped("openmpi", "launcher", tmp_path, "--display", "map", "--do-not-launch")
    found = re.findall(
        r"Data for proc: \S+,(\d+)\]\s+Pid.*\s+State.*\s+Binding: package\[\d\]\[core:L([\d,-]+)\]", output
    )
    assert len(found) == 1024, output[-2000:]
    logical = {pu: i for i, core in enumerate(PLAN.machine.cores) for pu in core.pus}
    planned = [tuple(sorted({logical[pu] for pu in worker.pus})) for worker in PLAN.workers]
    assert [parse_list(cores) for _, cores in sorted(found, key=lambda pair: int(pair[0]))] == planned * 256
    assert re.findall(r"Data for node: (\S+)", output) == list(HOSTS)


@pytest.mark.parametrize("name", ["openmpi", "openmpi4"])
def test_open_mpi_fills_host_by_host(name: str, tmp_path: Path) -> None:
    show = ("--display", "map") if name == "openmpi" else ("--display-map",)
    ranks: dict[int, str] = {}
    host = ""
    for line in mapped(name, "self", tmp_path, *show, "--do-not-launch").splitlines():
        if node := re.search(r"Data for node: (\S+)", line):
            host = node.group(1)
        elif rank := re.search(r"Process rank: (\d+)|Data for proc: \S+,(\d+)\]", line):
            ranks[int(rank.group(1) or rank.group(2))] = host
    assert [ranks[i] for i in range(1024)] == RANKS


def test_intel_mpi_fills_host_by_host(tmp_path: Path) -> None:
    output = mapped("intelmpi", "launcher", tmp_path, "-print-rank-map")
    ranks: dict[int, str] = {}
    for host, numbers in re.findall(r"^\((10\.\S+?):([\d,]+)\)$", output, re.MULTILINE):
        ranks |= dict.fromkeys(parse_list(numbers), host)
    assert [ranks.get(i) for i in range(1024)] == RANKS, output[:500]
