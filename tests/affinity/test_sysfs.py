import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.plan_file import plan_from_dict, plan_to_json
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.hwloc import read_synthetic
from cputrain.affinity.topology.machine import Machine, name_cpus, narrow_machine, parse_list
from cputrain.affinity.topology.sysfs import read_machine, this_machine
from tests.support.commands import PYTHON, need
from tests.support.machines import build_machine, write_sysfs


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4)),
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
    machine = narrow_machine(read_machine(tmp_path), frozenset((1, 5, 99)), frozenset((0, 7)))
    assert machine.allowed_pus == (1, 5)
    assert machine.allowed_nodes == (0,)
    assert [core.pus for core in machine.allowed_cores] == [(1, 5)]


def test_an_offline_pu_is_not_there(tmp_path: Path) -> None:
    write_sysfs(build_machine(1, 1, 4, 1), tmp_path, online_file=False)
    (tmp_path / "sys/devices/system/cpu/cpu2/online").write_text("0\n")
    assert read_machine(tmp_path).pus == (0, 1, 3)


def container(root: Path, online: str, allowed: str) -> Path:
    """A tree of 2 packages of 8 cores with 2 threads as lxcfs shows it to a container: cpu/online has numbers of its
    own, every other file and the process's mask have the host's."""
    write_sysfs(build_machine(2, 1, 8, 2, "block"), root)
    (root / "sys/devices/system/cpu/online").write_text(f"{online}\n")
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/status").write_text(f"Cpus_allowed_list:\t{allowed}\nMems_allowed_list:\t0-1\n")
    return root


@pytest.mark.parametrize(
    ("online", "allowed"),
    [("0-3", "8-9,24-25"), ("0", "24"), ("0-3", "2-5"), ("0-1", "0,31"), ("0-7", "16-23"), ("0-31", "0-15,31")],
)
def test_what_the_kernel_s_mask_has_is_planned(online: str, allowed: str, tmp_path: Path) -> None:
    machine = read_machine(container(tmp_path, online, allowed))
    assert machine.allowed_pus == parse_list(allowed)
    assert len(machine.pus) == 32
    told = [f"lists {name_cpus(parse_list(online))}, but", f"{name_cpus(parse_list(allowed))}:"]
    named = [text for text in machine.warnings if all(part in text for part in told)]
    assert len(named) == (0 if online == "0-31" else 1)
    plan = plan_machine(machine, Request())
    assert {pu for worker in plan.workers for pu in worker.pus} <= {*parse_list(allowed)}
    assert all(text in plan.warnings for text in named)


def test_cpus_of_a_mask_that_are_offline_contradict_nothing(tmp_path: Path) -> None:
    """proc/self/status lists all CPUs that the kernel could ever have."""
    root = container(tmp_path, "0-15", "0-127")
    for pu in range(16, 32):
        (root / f"sys/devices/system/cpu/cpu{pu}/online").write_text("0\n")
    machine = read_machine(root)
    assert (machine.allowed_pus, machine.warnings) == (tuple(range(16)), ())


def test_a_cpuset_s_file_does_not_hide_what_the_mask_has(tmp_path: Path) -> None:
    root = container(tmp_path, "0-31", "8-9")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpuset.cpus.effective").write_text("0-1\n")
    assert read_machine(root).allowed_pus == (8, 9)


CPUSET = {"proc/self/cgroup": "0::/", "proc/mounts": "cgroup2 /sys/fs/c\\040g cgroup2 rw 0 0"}
NODES, SYS_CPU = "sys/devices/system/node", "sys/devices/system/cpu"
STATUS = "proc/self/status"


@pytest.mark.parametrize(
    ("files", "facts", "named"),
    [
        pytest.param(
            {**CPUSET, "sys/fs/c g/cpuset.cpus.effective": "8-9", f"{SYS_CPU}/online": "0-1"},
            {"allowed_pus": (8, 9)},
            "online lists CPUs 0-1, but the kernel lets this process run on CPUs 8-9",
            id="lxcfs, without a mask",
        ),
        pytest.param(
            {**CPUSET, "sys/fs/c g/cpuset.cpus.effective": "0-1", STATUS: "Cpus_allowed_list:\t0-3"},
            {"allowed_pus": (0, 1, 2, 3)},
            "cpuset has CPUs 0-1, but the kernel also lets this process run on CPUs 2-3",
            id="mask beyond the cpuset",
        ),
        pytest.param(
            {STATUS: "Cpus_allowed:\t00000303\nMems_allowed:\t1"},
            {"allowed_pus": (0, 1, 8, 9), "allowed_nodes": (0,)},
            None,
            id="masks without lists",
        ),
        pytest.param(
            {STATUS: "Mems_allowed_list:\t5"},
            {"allowed_nodes": (0, 1)},
            "memory of NUMA nodes 5, but the host has nodes 0-1",
            id="memory of absent nodes",
        ),
        pytest.param(
            {STATUS: "Cpus_allowed_list:\t4-7\nMems_allowed_list:\t0"},
            {"allowed_nodes": (0,)},
            "CPUs 4-7 have no memory next to them",
            id="memory of the other package",
        ),
        pytest.param(
            {f"{NODES}/node1/meminfo": "Node 1 MemTotal: 0 kB"},
            {"allowed_nodes": (0, 1)},
            "CPUs 4-7,12-15 have no memory next to them",
            id="node without memory",
        ),
        pytest.param(
            {f"{NODES}/node0/meminfo": None, f"{NODES}/node1/meminfo": None},
            {},
            "the memory size of this host is unknown",
            id="memory unknown",
        ),
        pytest.param(
            {f"{SYS_CPU}/cpu3/topology": None, f"{SYS_CPU}/cpu11/topology/thread_siblings_list": "11"},
            {"packages": (0, 1)},
            "CPUs 3 have no topology, unlike the others",
            id="a CPU without topology",
        ),
        pytest.param(
            {f"{SYS_CPU}/cpu7/topology/physical_package_id": "-1"},
            {"packages": (0, 1)},
            None,
            id="a core without package",
        ),
        pytest.param(
            {f"{NODES}/node0/cpulist": "0-7", f"{NODES}/node1/cpulist": "8-15"},
            {},
            "CPUs 0-15 share cores across NUMA nodes",
            id="siblings in two nodes",
        ),
        pytest.param(
            {f"{SYS_CPU}/online": None, f"{SYS_CPU}/cpu*": None, STATUS: "Cpus_allowed_list:\t0-3"},
            {"allowed_pus": (0, 1, 2, 3)},
            "online lists no CPU, but",
            id="no folder of a CPU",
        ),
    ],
)
def test_gaps_and_contradictions_of_a_host_s_files_are_named(
    files: dict[str, str | None], facts: dict[str, object], named: str | None, tmp_path: Path
) -> None:
    """2 packages of 4 cores with 2 threads; `files` are the ones that differ, None for those that are missing."""
    write_sysfs(build_machine(2, 1, 4, 2), tmp_path)
    for name, content in files.items():
        for path in tmp_path.glob(name) if content is None else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if content is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{content}\n")
    machine = read_machine(tmp_path)
    assert {name: getattr(machine, name) for name in facts} == facts
    assert sum(named is not None and named in text for text in machine.warnings) == (named is not None)
    assert len(machine.warnings) == (named is not None)
    assert {pu for worker in plan_machine(machine).workers for pu in worker.pus} <= {*machine.allowed_pus}


def test_a_container_s_cpu_list_does_not_hide_this_process_s_mask(tmp_path: Path) -> None:
    """As under lxcfs: another file lies over the kernel's cpu/online."""
    if os.geteuid() != 0:
        pytest.skip(reason="needs root (mount)")
    (tmp_path / "online").write_text("1000\n")
    show = "from cputrain.affinity.topology.sysfs import this_machine as m; print(m().allowed_pus, m().warnings[0])"
    script = f'mount --bind {tmp_path}/online /sys/devices/system/cpu/online && exec "$0" -c "$1"'
    ran = subprocess.run(["unshare", "-m", "sh", "-c", script, sys.executable, show], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{tuple(sorted(os.sched_getaffinity(0)))} ")
    assert "lists CPU 1000, but the kernel lets this process run on CPUs" in ran.stdout


def isolated_tree(root: Path, isolated: str, allowed: str = "0-7") -> Machine:
    """8 cores on a node, some isolated."""
    write_sysfs(build_machine(1, 1, 8, 1), root)
    (root / "sys/devices/system/cpu/isolated").write_text(f"{isolated}\n")
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/status").write_text(f"Cpus_allowed_list:\t{allowed}\n")
    return read_machine(root)


@pytest.mark.parametrize(
    ("isolated", "allowed", "planned", "warned"),
    [
        ("2-7", "0-7", "0-1", "CPUs 2-7 are isolated (isolcpus) and left out: {cores=2-7} uses them"),
        ("4-7", "0-5", "0-3", "CPUs 4-5 are isolated (isolcpus) and left out"),
        ("2-7", "2-7", "2-7", "is bound to one"),
        ("", "0-7", "0-7", ""),
        ("6-7", "0-5", "0-5", ""),
    ],
)
def test_isolated_cpus_are_left_out_or_bound_singly(
    isolated: str, allowed: str, planned: str, warned: str, tmp_path: Path
) -> None:
    machine = isolated_tree(tmp_path, isolated, allowed)
    assert machine.isolated_pus == parse_list(isolated)
    plan = plan_machine(machine, Request(pin_threads=False))
    used = {pu for worker in plan.workers for pu in worker.pus}
    assert used == {*parse_list(planned)}
    assert [warned in text for text in plan.warnings] == ([True] if warned else [])
    for worker in plan.workers:
        alone = len(worker.pus) == 1 or "OMP_PLACES" in dict(worker.env)
        assert alone or used.isdisjoint(machine.isolated_pus)
    assert plan_from_dict(json.loads(plan_to_json(plan))) == plan


def test_a_kernel_without_a_set_of_isolated_cpus_isolates_none(tmp_path: Path) -> None:
    """As in github.com/prometheus/node_exporter/issues/3152."""
    machine = isolated_tree(tmp_path, f"{'(null)':>250}")
    assert machine.isolated_pus == () and plan_machine(machine, Request()).warnings == ()


def test_requested_isolated_cpus_are_planned_each_thread_on_its_own(tmp_path: Path) -> None:
    machine = isolated_tree(tmp_path, "2-7")
    (worker,) = plan_machine(machine, Request(cores=(2, 3, 4, 5), ppn=1, pin_threads=False)).workers
    assert dict(worker.env)["OMP_PLACES"] == "{2}:4:1"


def test_a_cgroup_s_isolated_partition_isolates(tmp_path: Path) -> None:
    write_sysfs(build_machine(1, 1, 4, 1), tmp_path)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpuset.cpus.effective").write_text("1-2\n")
    partition = tmp_path / "sys/fs/cgroup/cpuset.cpus.partition"
    for text, isolated in (("isolated", (1, 2)), ("isolated invalid (Cpus not exclusive)", ()), ("root", ())):
        partition.write_text(f"{text}\n")
        assert read_machine(tmp_path).isolated_pus == isolated


@pytest.mark.parametrize("isolated", ["", "0-999"])
def test_loader_threads_on_isolated_cpus_have_one_each(isolated: str, tmp_path: Path) -> None:
    if os.geteuid() != 0 or len(os.sched_getaffinity(0)) < 2:
        pytest.skip(reason="needs root (mount) and two CPUs")
    (tmp_path / "isolated").write_text(f"{isolated}\n")
    show = (
        "import os; from cputrain.affinity.binding import bind_thread\n"
        "pus = tuple(sorted(os.sched_getaffinity(0)))\n"
        "for number in range(len(pus) + 1): bind_thread(pus, number); print(len(os.sched_getaffinity(0)))"
    )
    script = f'mount --bind {tmp_path}/isolated /sys/devices/system/cpu/isolated && exec "$0" -c "$1"'
    ran = subprocess.run(["unshare", "-m", "sh", "-c", script, sys.executable, show], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    count = len(os.sched_getaffinity(0))
    assert ran.stdout.split() == [str(1 if isolated else count)] * (count + 1)


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("sys/devices/system/cpu/online", "zero\n", "cpu/online"),
        ("sys/devices/system/cpu/online", "\n", "no online CPU"),
        ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0-1\n", "thread_siblings_list contradicts"),
        ("sys/devices/system/cpu/cpu1/topology/physical_package_id", "x\n", "physical_package_id"),
    ],
)
def test_a_broken_tree_names_its_file(tmp_path: Path, path: str, text: str, named: str) -> None:
    write_sysfs(build_machine(1, 1, 2, 1), tmp_path)
    (tmp_path / path).write_text(text)
    with pytest.raises(InputError, match=named):
        read_machine(tmp_path)


@pytest.mark.parametrize("listed", ["1\n", None])
def test_a_sibling_that_knows_nothing_of_it_is_refused(tmp_path: Path, listed: str | None) -> None:
    """CPU 0 lists CPUs 0-1; CPU 1 lists itself alone, or its file is missing."""
    write_sysfs(build_machine(1, 1, 2, 1), tmp_path)
    siblings = tmp_path / "sys/devices/system/cpu"
    (siblings / "cpu0/topology/thread_siblings_list").write_text("0-1\n")
    if listed is None:
        (siblings / "cpu1/topology/thread_siblings_list").unlink()
    else:
        (siblings / "cpu1/topology/thread_siblings_list").write_text(listed)
    with pytest.raises(InputError, match=r"cpu0/topology lists CPU 1 as .*, but cpu1/topology does not list CPU 0"):
        read_machine(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no online CPU"):
        read_machine(tmp_path)


def test_this_machine_has_the_cpus_that_the_kernel_allows() -> None:
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


def rich_tree(root: Path) -> None:
    """A tree with a file of every sort that is read."""
    machine = read_synthetic(
        "pack:2 die:2 l3:1 l2:1 core:1 pu:2", name="t", model="m", isa=("avx2",), memory_bytes=4096
    )
    slow = replace(machine.cores[-1], speed=0.5)
    write_sysfs(replace(machine, cores=(*machine.cores[:-1], slow)), root)
    memory_only = root / "sys/devices/system/node/node2"
    (memory_only / "access1/initiators/node0").mkdir(parents=True)
    (memory_only / "access1/initiators/read_bandwidth").write_text("1000\n")
    (memory_only / "cpulist").write_text("\n")
    (memory_only / "meminfo").write_text("Node 2 MemTotal: 4096 kB\n")
    for node, text in enumerate(("10 20 11", "20 10 20", "11 20 10")):
        (root / f"sys/devices/system/node/node{node}/distance").write_text(text + "\n")
    for path, text in (
        ("sys/devices/virtual/memory_tiering/memory_tier4/nodelist", "0-2\n"),
        ("sys/fs/cgroup/job/cpuset.cpus.effective", "0-7\n"),
        ("sys/fs/cgroup/job/cpuset.mems.effective", "0-2\n"),
        ("sys/fs/cgroup/job/cpu.max", "800000 100000\n"),
        ("sys/fs/cgroup/job/memory.max", "1048576\n"),
        ("proc/self/cgroup", "0::/job\n"),
        ("proc/self/cpuset", "/job\n"),
        ("proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"),
    ):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def files_of_a_sort(root: Path) -> list[Path]:
    """The tree's files, of the CPUs those of the first one, of its sibling and of the last and slow core."""
    cpus = re.compile("/cpu[2-5]/")
    return sorted(path for path in root.rglob("*") if path.is_file() and not cpus.search(str(path)))


@pytest.mark.parametrize("damage", [b"", b"\n", b"x,y z\n", b"-3\n", b"7-2\n", b"\xff\xfe\x00", b"999999999999\n"])
def test_any_damaged_file_is_named_or_harmless(tmp_path: Path, damage: bytes) -> None:
    """Whatever one file of a tree is turned into, the machine is read and can be planned, or the file is named."""
    rich_tree(tmp_path)
    plan_machine(read_machine(tmp_path), Request(), Runtime())
    named = 0
    for path in files_of_a_sort(tmp_path):
        whole = path.read_bytes()
        path.write_bytes(damage)
        try:
            plan_machine(read_machine(tmp_path), Request(), Runtime())
        except InputError as error:
            message = str(error)
            harmless = ("is available to this process", "no online CPU")
            assert str(path) in message or any(text in message for text in harmless), (path, message)
            named += 1
        path.write_bytes(whole)
    assert named > 3


@pytest.fixture
def whole_tree(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A rich tree and its files; each example puts back what it has changed."""
    rich_tree(tmp_path)
    return tmp_path, sorted(path for path in tmp_path.rglob("*") if path.is_file())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data(), text=st.text("0123456789,-abcdef \n", max_size=12))
def test_odd_texts_are_named_or_harmless(whole_tree: tuple[Path, list[Path]], data: st.DataObject, text: str) -> None:
    root, files = whole_tree
    path = data.draw(st.sampled_from(files))
    whole = path.read_bytes()
    path.write_text(text)
    try:
        plan_machine(read_machine(root), Request(), Runtime())
    except InputError as error:
        assert str(root) in str(error) or "is available to this process" in str(error)
    finally:
        path.write_bytes(whole)


def test_a_nul_byte_at_the_end_of_a_file_is_no_error(tmp_path: Path) -> None:
    """As some Arm servers' kernels write lists of CPUs."""
    machine = build_machine(2, 1, 4, 2)
    write_sysfs(machine, tmp_path)
    for path in (tmp_path / "sys").rglob("*list"):
        path.write_bytes(path.read_bytes() + b"\0")
    assert read_machine(tmp_path) == machine


@pytest.mark.parametrize("sets", ["package_cpus_list", "core_siblings", None])
def test_packages_without_numbers_are_told_apart_by_their_cpus(tmp_path: Path, sets: str | None) -> None:
    write_sysfs(build_machine(8, 1, 4, 1), tmp_path)
    for pu in range(32):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{pu}/topology"
        (topology / "physical_package_id").write_text("-1\n")
        first = pu // 4 * 4
        if sets is not None:
            written = f"{first}-{first + 3}" if sets.endswith("list") else f"{15 << first:x}"
            (topology / sets).write_text(f"{written}\n")
    machine = read_machine(tmp_path)
    assert machine.packages == (tuple(range(8)) if sets else (0,))
    assert [core.package for core in machine.cores] == [i // 4 if sets else 0 for i in range(32)]


def test_nobody_needs_to_read_all_that_is_printed() -> None:
    command = f"{PYTHON} -m cputrain.affinity plan --machine 'pack:8 core:64 pu:2' | head -1; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ran.stderr == "" and ran.stdout.splitlines()[-1] in ("0", "141")


def test_a_pipe_by_a_description_s_name_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.xml")
    with pytest.raises(InputError, match=r"is neither lstopo's XML nor a tarball"):
        find_machine(str(tmp_path / "m.xml"))


def test_names_that_a_terminal_would_obey_are_shown_as_codes(tmp_path: Path) -> None:
    write_sysfs(build_machine(1, 1, 2, 1), tmp_path)
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Xeon \x1b]0;title\x07\n")
    (tmp_path / "proc/sys/kernel/hostname").write_text("n1\nexit 7\x1b[2J\n")
    machine = read_machine(tmp_path)
    assert (machine.name, machine.model) == ("n1\\nexit 7", "Xeon \\x1b]0;title\\x07")
