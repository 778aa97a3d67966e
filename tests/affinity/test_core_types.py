"""Hybrid processors, dies and caches, from trees written here."""

from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.hwloc import read_synthetic
from cputrain.affinity.topology.machine import Machine, ordered_cores
from cputrain.affinity.topology.sysfs import read_machine
from tests.support.machines import build_machine, write_sysfs

MACHINES = Path(__file__).parents[1] / "machines"


def hybrid() -> Machine:
    """4 fast cores of two PUs, 8 slow ones of one."""
    machine = build_machine(1, 1, 12, 1)
    fast = [replace(machine.cores[i], pus=(2 * i, 2 * i + 1)) for i in range(4)]
    slow = [replace(machine.cores[i], pus=(4 + i,), speed=0.6) for i in range(4, 12)]
    pus = tuple(range(16))
    node = replace(machine.numa_nodes[0], pus=pus)
    return replace(machine, cores=ordered_cores(fast + slow), numa_nodes=(node,), allowed_pus=pus)


def put(root: Path, path: str, text: str) -> None:
    file = root / "sys/devices" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def speeds(root: Path) -> list[float]:
    return [core.speed for core in read_machine(root).cores]


@pytest.mark.parametrize("masks", [False, True])
def test_dies_caches_and_core_types_read_back(tmp_path: Path, masks: bool) -> None:
    made = read_synthetic("pack:2 die:2 l3:2 l2:3 core:2 pu:2")
    write_sysfs(made, tmp_path / "a", masks=masks)
    stated = tuple(replace(node, memory_assumed=False) for node in made.numa_nodes)
    assert read_machine(tmp_path / "a") == replace(made, numa_nodes=stated), "the kernel states the memory"
    write_sysfs(hybrid(), tmp_path / "b", masks=masks)
    assert read_machine(tmp_path / "b") == hybrid()


def test_favored_cores_are_not_a_type_of_their_own(tmp_path: Path) -> None:
    """One core type, two of the cores allowed a higher clock and a higher peak."""
    write_sysfs(build_machine(1, 1, 4, 1), tmp_path)
    for pu in range(4):
        put(tmp_path, f"system/cpu/cpu{pu}/acpi_cppc/nominal_perf", "30")
        put(tmp_path, f"system/cpu/cpu{pu}/acpi_cppc/highest_perf", "70" if pu < 2 else "64")
        put(tmp_path, f"system/cpu/cpu{pu}/cpufreq/cpuinfo_max_freq", "5200000" if pu < 2 else "5000000")
    assert speeds(tmp_path) == [1.0] * 4


def test_intel_s_lists_give_the_core_types_and_clocks_their_speed(tmp_path: Path) -> None:
    write_sysfs(build_machine(1, 1, 4, 1), tmp_path)
    put(tmp_path, "cpu_core/cpus", "0-1")
    put(tmp_path, "cpu_atom/cpus", "2-3")
    for pu, clock in enumerate((5200000, 5000000, 3600000, 3600000)):
        put(tmp_path, f"system/cpu/cpu{pu}/cpufreq/cpuinfo_max_freq", str(clock))
    assert speeds(tmp_path) == pytest.approx([1.0, 1.0, 0.787 * 3.6 / 5.0, 0.787 * 3.6 / 5.0])


@pytest.mark.parametrize(
    ("measure", "figures"), [("acpi_cppc/highest_perf", (64, 39, 24)), ("cpufreq/cpuinfo_max_freq", (5000, 3600, 2100))]
)
def test_slow_cores_among_those_of_one_name_are_a_type_of_their_own(tmp_path: Path, measure: str, figures) -> None:
    """Meteor Lake: kernels count its two low-power cores to cpu_atom; two of the fast ones are favored."""
    write_sysfs(build_machine(1, 1, 10, 1), tmp_path)
    put(tmp_path, "cpu_core/cpus", "0-3")
    put(tmp_path, "cpu_atom/cpus", "4-9")
    for pu in range(10):
        figure = figures[(pu >= 4) + (pu >= 8)] * (1.05 if pu < 2 else 1)
        put(tmp_path, f"system/cpu/cpu{pu}/{measure}", str(round(figure)))
    fast, slow, slowest = figures
    work = 0.787 if measure.startswith("cpufreq") else 1.0
    expected = [1.0] * 4 + [work * slow / fast] * 4 + [work * slowest / fast] * 2
    assert speeds(tmp_path) == pytest.approx(expected)


def test_the_scheduler_s_capacities_come_first(tmp_path: Path) -> None:
    write_sysfs(hybrid(), tmp_path)
    for pu in range(16):
        put(tmp_path, f"system/cpu/cpu{pu}/cpu_capacity", "1024" if pu < 8 else "512")
    assert speeds(tmp_path) == [1.0] * 4 + [0.5] * 8


@pytest.mark.parametrize("description", ["nvidia-dgx-gb10.tar.xz", "linux__nvidia-dgx-gb10.xml"])
@pytest.mark.parametrize(("ppn", "threads"), [(None, [9, 9]), (2, [9, 9]), (4, [5, 5, 5, 5])])
def test_all_cores_of_a_gb10_have_work_and_each_worker_cores_of_one_type(description: str, ppn, threads) -> None:
    machine = find_machine(str(MACHINES / description))
    speed = {pu: core.speed for core in machine.cores for pu in core.pus}
    made = plan_machine(machine, Request(ppn=ppn))
    assert [worker.intra_op for worker in made.workers] == threads
    assert all(len({speed[pu] for pu in worker.compute_pus}) == 1 for worker in made.workers)
    assert sum(len(worker.pus) for worker in made.workers) == 20


def test_nearly_equal_capacities_are_one_type(tmp_path: Path) -> None:
    """As on NVIDIA's GB10: five capacities, two designs of cores."""
    write_sysfs(build_machine(1, 1, 10, 1), tmp_path)
    for pu, capacity in enumerate((718, 718, 997, 997, 997, 731, 731, 1017, 1017, 1024)):
        put(tmp_path, f"system/cpu/cpu{pu}/cpu_capacity", str(capacity))
    assert sorted(speeds(tmp_path)) == [718 / 997] * 4 + [1.0] * 6


def test_intel_s_types_without_figures_have_assumed_speeds(tmp_path: Path) -> None:
    write_sysfs(build_machine(1, 1, 4, 1), tmp_path)
    put(tmp_path, "cpu_core/cpus", "0-1")
    put(tmp_path, "cpu_atom/cpus", "2-3")
    put(tmp_path, "system/cpu/cpu0/acpi_cppc/highest_perf", "<unsupported>")
    assert speeds(tmp_path) == [1.0, 1.0, 0.61, 0.61]
