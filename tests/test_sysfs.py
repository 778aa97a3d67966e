import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from affinity.errors import InputError
from affinity.machine import narrowed
from affinity.sysfs import read_machine, this_machine
from tests.conftest import build_machine, need, write_sysfs


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4)),
    numbering=st.sampled_from(["block", "adjacent", "interleaved"]),
    masks=st.booleans(),
    online_file=st.booleans(),
)
def test_a_written_machine_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int, int, int],
    numbering: str,
    masks: bool,
    online_file: bool,
) -> None:
    machine = build_machine(*shape, numbering)
    root = tmp_path_factory.mktemp("tree")
    write_sysfs(machine, root, masks=masks, online_file=online_file)
    assert read_machine(root) == machine


def test_allowed_pus_are_kept_to_those_online(tmp_path: Path) -> None:
    write_sysfs(build_machine(1, 1, 4, 2), tmp_path)
    machine = narrowed(read_machine(tmp_path), frozenset((1, 5, 99)), frozenset((0, 7)))
    assert machine.allowed_pus == (1, 5)
    assert machine.allowed_nodes == (0,)
    assert [core.pus for core in machine.allowed_cores] == [(1, 5)]


def test_an_offline_pu_is_not_there(tmp_path: Path) -> None:
    write_sysfs(build_machine(1, 1, 4, 1), tmp_path, online_file=False)
    (tmp_path / "sys/devices/system/cpu/cpu2/online").write_text("0\n")
    assert read_machine(tmp_path).pus == (0, 1, 3)


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("sys/devices/system/cpu/online", "zero\n", "cpu/online"),
        ("sys/devices/system/cpu/online", "\n", "no online PU"),
        ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0-1\n", "thread_siblings_list contradicts"),
        ("sys/devices/system/cpu/cpu1/topology/physical_package_id", "x\n", "physical_package_id"),
    ],
)
def test_a_broken_tree_names_its_file(tmp_path: Path, path: str, text: str, named: str) -> None:
    write_sysfs(build_machine(1, 1, 2, 1), tmp_path)
    (tmp_path / path).write_text(text)
    with pytest.raises(InputError, match=named):
        read_machine(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no online PU"):
        read_machine(tmp_path)


def test_this_machine_is_what_the_kernel_lends() -> None:
    machine = this_machine()
    assert set(machine.allowed_pus) == os.sched_getaffinity(0)
    assert set(machine.allowed_pus) <= set(machine.pus)


def test_this_machine_agrees_with_hwloc() -> None:
    need("hwloc-nox", "hwloc-calc")

    def count(kind: str) -> int:
        return int(subprocess.run(["hwloc-calc", "-N", kind, "all"], capture_output=True, text=True, check=True).stdout)

    machine = this_machine()
    cores = len(machine.allowed_cores)
    assert (len({core.package for core in machine.allowed_cores}), cores, len(machine.allowed_pus)) == (
        count("package"),
        count("core"),
        count("pu"),
    )
