"""What the kernel gave processes: their masks and threads, and where their memory lies."""

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cputrain.affinity.binding import (
    Thread,
    anonymous_bytes,
    memory_share,
    misallocated_memory,
    misplaced_threads,
    policy_in,
    threads_of,
)
from cputrain.affinity.bound_plan import Running, binding_report, inspect_process, running_processes
from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime, find_runtime, target_of
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.plan_file import plan_to_json
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.machine import format_list, name_cpus
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import MIB, first_named
from tests.support.commands import here
from tests.support.machines import build_machine

BIND = [sys.executable, "-m", "cputrain.affinity.bind", "--plan", "plan.json", "--local-rank", "0", "--"]
TEAM = """
import json, os, torch
from cputrain.affinity.bound_plan import bound_worker
from cputrain.affinity.binding import memory_share, misallocated_memory, misplaced_threads, team_of, threads_of
worker = bound_worker(os.environ)
torch.set_num_threads(worker.intra_op)
values = torch.empty(16 << 20)
team = team_of(lambda: values.fill_(1.0))
share = memory_share(values.data_ptr())
wrong = misplaced_threads(worker, team) + misallocated_memory(worker, share)
ids = {t.tid for t in team}
os.sched_setaffinity(team[-1].tid, worker.pus)
moved = misplaced_threads(worker, [t for t in threads_of(os.getpid()) if t.tid in ids])
print(json.dumps([[t.pus for t in team], wrong, share, moved]))
"""


def planned(place: Path, **fields: object) -> Plan:
    runtime = find_runtime(target_of(()), {}, ())
    plan = plan_machine(this_machine(), Request(**fields), runtime)
    (place / "plan.json").write_text(plan_to_json(plan))
    return plan


def bound(place: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BIND, sys.executable, "-c", code], cwd=place, capture_output=True, text=True)


@pytest.mark.parametrize("pin", [True, pytest.param(False, marks=pytest.mark.long)])
def test_each_openmp_thread_is_where_the_plan_has_it_until_it_is_moved(tmp_path: Path, pin: bool) -> None:
    """The team of torch's first parallel region, as the kernel has placed it; then one of its threads is moved."""
    worker = planned(tmp_path, ppn=1, pin_threads=pin, loader_cores=0).workers[0]
    result = bound(tmp_path, TEAM)
    assert result.returncode == 0, result.stderr
    pus, wrong, share, moved = json.loads(result.stdout)
    assert wrong == []
    assert len(pus) == worker.intra_op
    if pin:
        assert sorted(map(tuple, pus)) == [(pu,) for pu in worker.compute_pus]
    if pin and worker.intra_op > 1:
        assert "OpenMP threads planned on CPUs" in moved[0]
    assert sum(share.values()) == pytest.approx(1.0)


def test_differences_of_teams_and_pages_are_named() -> None:
    plan = plan_machine(build_machine(2, 1, 4, 1), Request(ppn=2), Runtime())
    worker = plan.workers[1]
    team = tuple(Thread(tid=i, name="t", pus=(pu,)) for i, pu in enumerate(worker.compute_pus))
    assert misplaced_threads(worker, team) == []
    assert misplaced_threads(worker, team[:-1])  # a thread too few
    assert misplaced_threads(worker, (*team[:-1], replace(team[-1], pus=(0,))))
    assert misallocated_memory(worker, {1: 0.97, 0: 0.03}) == []
    assert misallocated_memory(worker, {0: 0.5, 1: 0.5}) == [
        "memory planned on nodes 1, its pages are 50% on node 0, 50% on node 1"
    ]


def test_memory_share_of_a_real_allocation() -> None:
    data = bytearray(32 << 20)
    address = (ctypes.c_char * len(data)).from_buffer(data)
    share = memory_share(ctypes.addressof(address))
    assert sum(share.values()) == pytest.approx(1.0)
    assert set(share) <= {node.id for node in this_machine().numa_nodes}


FORBID = """
import ctypes, os, struct, sys
ALLOW, REFUSE, LOAD, EQUAL, RETURN = 0x7fff0000, 0x00050001, 0x20, 0x15, 0x06
number = {"x86_64": 238, "aarch64": 237}[os.uname().machine]
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_kernel_that_forbids_memory_policies_is_tolerated(tmp_path: Path) -> None:
    """A seccomp filter refuses set_mempolicy, as container runtimes do: this is reported, and the command runs."""
    plan = planned(tmp_path, ppn=1)
    nodes = this_machine().allowed_nodes[:1]
    bind = replace(plan.workers[0], memory_policy="bind", memory_nodes=nodes)
    (tmp_path / "plan.json").write_text(plan_to_json(replace(plan, workers=(bind,))))
    argv = [sys.executable, "-c", FORBID, *BIND, sys.executable, "-c", "print('went on')"]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "went on\n"), result.stderr
    assert result.stderr == "affinity: memory policy bind not applied: Operation not permitted\n"


def test_a_running_process_is_compared_with_its_plan(tmp_path: Path) -> None:
    worker = planned(tmp_path, ppn=1).workers[0]
    argv = [*BIND, sys.executable, "-c", "print(flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=tmp_path, **pipes) as process:
        process.stdout.readline()
        running = inspect_process(process.pid)
        assert running.worker == worker
        assert not running.misplaced_threads and not running.remote_bytes
        shown = here("doctor", "affinity", str(process.pid))
        assert shown.returncode == 0 and "planned  worker 0" in shown.stdout
        assert f"pid {process.pid}" in here("doctor", "affinity").stdout
        if len(worker.pus) > 1:
            plan = json.loads((tmp_path / "plan.json").read_text())
            plan["workers"][0].update(compute_pus=list(worker.pus[:1]), intra_op=1, comm_pus=[], loader_pus=[])
            (tmp_path / "plan.json").write_text(json.dumps(plan))
            assert "differs  thread" in binding_report([inspect_process(process.pid)])
            assert here("doctor", "affinity", str(process.pid)).returncode == 1
            show = [sys.executable, "-m", "cputrain.affinity", "show", "--pid", str(process.pid)]
            assert subprocess.run(show, capture_output=True).returncode == 1
        (tmp_path / "plan.json").write_text("{}")
        assert "planned  the plan" in binding_report([inspect_process(process.pid)]), "of another version, say"
        process.communicate(b"\n")


def test_processes_that_end_while_they_are_looked_at_are_left_out(tmp_path: Path) -> None:
    """Of a bound program that starts others all the time; what it was given has two lines and an escape sequence."""
    planned(tmp_path, ppn=1)
    code = "import subprocess, time\n# \x1b]0;title\x07\nprint(flush=True)\nwhile True: subprocess.run(['true'])"
    with subprocess.Popen([*BIND, sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        for _ in range(30):
            shown = binding_report(running_processes(()))
            assert f"pid {process.pid}: " in shown and shown.replace("\n", "").isprintable()
        assert all(line.startswith(("pid ", "  ")) for line in shown.splitlines())
        process.kill()


def test_a_process_that_does_not_exist_is_refused() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(InputError, match="cannot inspect process"):
        inspect_process(gone.pid)
    assert here("doctor", "affinity", str(gone.pid)).returncode == 2


def shown(*arguments: str, **options: Any) -> tuple[int, list[str]]:
    """Run `show` on plan.json, and return its status and lines."""
    argv = [sys.executable, "-m", "cputrain.affinity", "show", "plan.json", *arguments]
    result = subprocess.run(argv, capture_output=True, text=True, **options)
    return result.returncode, (result.stdout + result.stderr).splitlines()


@pytest.mark.parametrize(
    ("variables", "worker"), [({"LOCAL_RANK": "1"}, None), ({"AFFINITY_WORKER": "1"}, 1), ({}, 0), (None, 1)]
)
def test_a_process_is_compared_with_any_plan(
    tmp_path: Path, variables: dict[str, str] | None, worker: int | None
) -> None:
    """Its worker is named by variables (complete ones only), else by its mask; it runs on worker 0's CPUs."""
    workers = planned(tmp_path, ppn=2).workers
    if variables is None:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env = {**os.environ, **variables}
    on = ["taskset", "-c", format_list(workers[0].pus)]
    with subprocess.Popen([*on, "sleep", "60"], env=env) as process:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sleep"):
            time.sleep(0.02)
        status, lines = shown("--pid", str(process.pid), cwd=tmp_path)
        process.kill()
    index = 0 if worker is None else worker
    assert lines[1].startswith(f"  planned  worker {index}: {name_cpus(workers[index].pus)}, memory "), lines
    found = [line for line in lines if line.startswith("  differs")]
    assert status == bool(found) == (index == 1), lines
    if index == 1:
        assert re.fullmatch(rf"  differs  thread {process.pid} \(\S+\) may run on CPUs? \d[\d,-]*", found[0]), lines


def test_a_process_of_no_worker_differs(tmp_path: Path) -> None:
    planned(tmp_path, ppn=2)
    with subprocess.Popen(["sleep", "60"]) as process:
        status, lines = shown("--pid", str(process.pid), cwd=tmp_path)
        process.kill()
    assert (status, len(lines)) == (1, 4), lines
    assert re.match(r"  differs  no worker of the plan: no rank variable, and CPUs \S+ are no worker's", lines[3])


def test_processes_that_cannot_be_compared_are_named_in_one_line(tmp_path: Path) -> None:
    planned(tmp_path, ppn=1)
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # keeps it as a zombie
        status, lines = shown("--pid", str(ended.pid), cwd=tmp_path)
    assert status == 2 and re.fullmatch(rf"affinity: cannot inspect process {ended.pid} \(.*\): name one of .*", *lines)
    status, lines = shown("plan.json", "--pid", str(os.getpid()), cwd=tmp_path)
    assert status == 2 and re.fullmatch("affinity: --pid with two plans: give one plan, .*", *lines)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_another_user_s_process_is_refused_in_one_line() -> None:
    code = f"""
import os, sys
from cputrain.affinity.bound_plan import inspect_process
os.setresuid(65534, 65534, 65534)
try:
    inspect_process({os.getpid()})
except Exception as error:
    print(type(error).__name__, error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == (
        f"InputError cannot inspect process {os.getpid()} (Permission denied): name one of your running processes\n"
    ), result.stderr


STACK = "7ffc93a5d000 {} stack anon=3 dirty=3 active=0 N0=3 kernelpagesize_kB=4"


@pytest.mark.parametrize(
    ("listed", "policy"),
    [
        ("default", ("default", ())),
        ("bind:0-1,4", ("bind", (0, 1, 4))),
        ("prefer:1", ("preferred", (1,))),
        ("interleave:0-3", ("interleave", (0, 1, 2, 3))),
        ("bind=static:2", ("bind=static", (2,))),
        ("prefer (many):0,2", ("preferred (many)", (0, 2))),
        ("weighted interleave:0-1", ("weighted interleave", (0, 1))),
        ("local", ("local", ())),
    ],
)
def test_the_policy_of_the_stack_is_the_process_s(listed: str, policy: tuple[str, tuple[int, ...]]) -> None:
    other = "7f0 bind:7 file=/usr/lib/stack.so anon=1 N0=1 kernelpagesize_kB=4"
    assert policy_in("\n".join((other, STACK.format(listed), LIBRARY))) == policy


def test_the_kernel_s_policy_is_read_where_it_may_be_set(tmp_path: Path) -> None:
    code = "from cputrain.affinity.binding import *; print(set_memory_policy('interleave', (0,)), flush=True)"
    argv = [sys.executable, "-c", f"{code}; input()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        refused = process.stdout.readline() != "None\n"
        worker = planned(tmp_path, ppn=1).workers[0]
        running = replace(inspect_process(process.pid), worker=worker)
        process.communicate("\n")
    if refused or running.memory_policy is None:
        assert running.memory_policy in ("default", None)
    else:
        assert (running.memory_policy, running.policy_nodes) == ("interleave", (0,))
        assert "memory policy is interleave 0" in running.differences


def test_threads_of_this_process() -> None:
    assert os.getpid() in {thread.tid for thread in threads_of(os.getpid())}


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
    assert "differs" not in binding_report([process])


def test_huge_pages_on_other_nodes_are_a_difference_of_their_size() -> None:
    process = running(HEAP, HUGETLB)
    assert process.differs
    assert "differs  32 MiB are on other nodes" in binding_report([process])


def test_lists_in_messages_name_the_first_five() -> None:
    assert first_named(["a", "b"]) == "a, b"
    assert first_named(list("abcde")) == "a, b, c, d, e"
    assert first_named(list("abcdefgh")) == "a, b, c, d, e and 3 more"
