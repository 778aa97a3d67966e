"""Real bindings: processes print the mask that the kernel gave them."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.binding import (
    bind_process,
    bind_thread,
    binding_differences,
    observe_binding,
    running_on,
    set_memory_policy,
)
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.plan_file import plan_to_dict, request_to_json
from cputrain.affinity.planner.request import Request
from cputrain.affinity.planner.workload import RESNET50
from cputrain.affinity.rank import ENV
from cputrain.affinity.topology.sysfs import this_machine
from tests.support.commands import PPN, cputrain, here, mpi_path, need, needs_two_cores, refused

BIND = [sys.executable, "-m", "cputrain.affinity.bind"]
PRINT = "import os, json; print(json.dumps([sorted(os.sched_getaffinity(0)), dict(os.environ)]))"


def this_plan(ppn: int | None = None) -> Plan:
    return plan_machine(this_machine(), Request(ppn=ppn), Runtime())


def bind(plan: dict, tmp_path: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    argv = [*BIND, "--plan", str(path), *options, "--", sys.executable, "-c", PRINT]
    return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **env})


def test_each_worker_gets_its_pus_and_environment(tmp_path: Path) -> None:
    plan = this_plan()
    for worker in plan.workers:
        result = bind(plan_to_dict(plan), tmp_path, LOCAL_RANK=str(worker.local_rank))
        assert result.returncode == 0, result.stderr
        pus, env = json.loads(result.stdout)
        assert tuple(pus) == worker.pus
        assert dict(worker.env).items() <= env.items()
        assert env["AFFINITY_WORKER"] == str(worker.local_rank)


@pytest.mark.parametrize(
    "name", ["MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "PALS_LOCAL_RANKID"]
)
def test_the_local_rank_is_read_from_any_launcher_s_environment(tmp_path: Path, name: str) -> None:
    plan = this_plan()
    last = plan.workers[-1]
    result = bind(plan_to_dict(plan), tmp_path, **{name: str(last.local_rank)})
    assert tuple(json.loads(result.stdout)[0]) == last.pus


def test_a_user_s_preload_stays_behind_the_plan_s(tmp_path: Path) -> None:
    plan = plan_to_dict(this_plan())
    plan["workers"][0]["env"]["LD_PRELOAD"] = "libm.so.6"
    result = bind(plan, tmp_path, "--local-rank", "0", LD_PRELOAD="libdl.so.2")
    assert json.loads(result.stdout)[1]["LD_PRELOAD"] == "libm.so.6:libdl.so.2"


def test_ranks_of_a_pmix_launcher_without_mpi_say_what_to_give() -> None:
    """PMIx exports a rank, and has all other numbers in its server; mpirun of the same Open MPI exports them."""
    path = mpi_path("openmpi")
    prefix = Path(path["PATH"].partition(":")[0]).parent
    for program, numbers in (("prterun", None), ("mpirun", ["0", "1", "0", "1"])):
        argv = [str(prefix / "bin" / program), "--allow-run-as-root", "--prefix", str(prefix), "-n", "1"]
        command = [*BIND, "--plan-here", '{"ppn": 1}', "--", sys.executable, "-c", PRINT]
        result = subprocess.run([*argv, *command], capture_output=True, text=True, env={**os.environ, **path})
        if numbers is None:
            line = next(line for line in result.stderr.splitlines() if line.startswith("cputrain.affinity.bind: "))
            assert result.returncode == 2 and "PMIX_RANK is set, but no world size, " in line and "set RANK, " in line
        else:
            env = json.loads(result.stdout)[1]
            assert [env[name] for name in ENV.rank_names] == numbers


WRAPPERS = {
    "sudo": ["sudo", "-n"],
    "sudo -E": ["sudo", "-n", "-E"],
    "sudo -u": ["sudo", "-n", "-u", "root", "env"],
    "env": ["env", "-u", "NOTHING"],
    "nice": ["nice", "-n", "1"],
    "numactl": ["numactl", "--localalloc", "--"],
    "taskset": ["taskset", "-c", "{pus}"],
    "strace": ["strace", "-f", "-o", "/dev/null"],
    "time": ["/usr/bin/time", "-o", "/dev/null"],
    "gdb": ["gdb", "-q", "-batch", "-ex", "set startup-with-shell off", "-ex", "run", "--args"],
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_programs_that_start_the_program_leave_it_bound_and_with_its_variables(tmp_path: Path, name: str) -> None:
    """LD_PRELOAD, too, as of the allocator; sudo removes it from an environment even with -E."""
    if name.startswith("sudo"):
        need("sudo", "sudo")
        if subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode:
            pytest.skip(reason="needs the right to run sudo without a password")
    need(name, WRAPPERS[name][0])
    plan = plan_to_dict(this_plan())
    worker = this_plan().workers[-1]
    plan["workers"][-1]["env"]["LD_PRELOAD"] = "libm.so.6"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "print.py").write_text(f"import sys\nsys.stdout = open({str(tmp_path / 'found')!r}, 'w')\n{PRINT}\n")
    argv = [word.replace("{pus}", ",".join(map(str, worker.pus))) for word in WRAPPERS[name]]
    ranks = {"RANK": str(worker.local_rank), "WORLD_SIZE": str(len(plan["workers"]))}
    local = {"LOCAL_RANK": ranks["RANK"], "LOCAL_WORLD_SIZE": ranks["WORLD_SIZE"]}
    result = subprocess.run(
        [*BIND, "--plan", str(tmp_path / "plan.json"), "--", *argv, sys.executable, str(tmp_path / "print.py")],
        capture_output=True,
        text=True,
        env={**os.environ, **ranks, **local, "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"},
    )
    assert result.returncode == 0, result.stderr
    pus, env = json.loads((tmp_path / "found").read_text())
    expected = {**ranks, **local, "MASTER_PORT": "29511", "AFFINITY_WORKER": ranks["RANK"], "LD_PRELOAD": "libm.so.6"}
    expected |= {"AFFINITY_PLAN": str(tmp_path / "plan.json"), "OMP_NUM_THREADS": dict(worker.env)["OMP_NUM_THREADS"]}
    assert tuple(pus) == worker.pus
    assert expected.items() <= env.items()


def test_contradictions_are_reported_and_overridden_or_kept(tmp_path: Path) -> None:
    plan = plan_to_dict(this_plan(ppn=1))
    for options, threads, word in (
        ((), plan["workers"][0]["env"]["OMP_NUM_THREADS"], "overridden"),
        (("--keep-env",), "77", "kept"),
    ):
        result = bind(plan, tmp_path, *options, "--local-rank", "0", OMP_NUM_THREADS="77")
        assert json.loads(result.stdout)[1]["OMP_NUM_THREADS"] == threads
        assert f"inherited and {word}: OMP_NUM_THREADS=77" in result.stderr


def plan_with_a_core_more(pu: int) -> Plan:
    """A plan of this machine as it was before it lost a core, here one with that PU."""
    plan = this_plan(ppn=1)
    cores = (*plan.machine.cores, replace(plan.machine.cores[-1], pus=(pu,)))
    return replace(plan, machine=replace(plan.machine, cores=cores))


def planned_wrong(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A plan for one PU more than there are: the kernel silently gives those that exist."""
    pu = max(this_machine().pus) + 1
    plan = plan_to_dict(plan_with_a_core_more(pu))
    plan["workers"][0]["comm_pus"] = [pu]
    return bind(plan, tmp_path, *options, "--local-rank", "0")


def test_a_difference_names_both_masks(tmp_path: Path) -> None:
    result = planned_wrong(tmp_path)
    assert result.returncode == 1
    assert "planned" in result.stderr and "actual" in result.stderr and "mask 0x" in result.stderr
    assert result.stderr.endswith("plan again on this host, or continue with --no-verify\n")
    assert len(result.stderr.strip().splitlines()) == 1


def test_no_verify_ignores_a_difference(tmp_path: Path) -> None:
    assert planned_wrong(tmp_path, "--no-verify").returncode == 0


def test_a_plan_for_foreign_pus_is_an_error(tmp_path: Path) -> None:
    plan = plan_to_dict(plan_with_a_core_more(900))
    plan["workers"][0].update(compute_pus=[900], comm_pus=[], loader_pus=[])
    result = bind(plan, tmp_path, "--local-rank", "0")
    assert result.returncode == 1
    assert "cannot bind to CPU 900" in result.stderr


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    plan = plan_to_dict(this_plan())
    assert "no local rank: LOCAL_RANK" in bind(plan, tmp_path).stderr
    assert bind(plan, tmp_path, "--local-rank", "99").returncode == 2
    missing = [sys.executable, "-m", "cputrain.affinity.bind", "--plan", "/nowhere", "--local-rank", "0", "--", "true"]
    assert subprocess.run(missing, capture_output=True).returncode == 2


def test_memory_policy_is_set_and_read_back() -> None:
    """In a process of its own: the policy would stay with this one."""
    nodes = this_machine().allowed_nodes[:1]
    code = (
        "from cputrain.affinity.binding import set_memory_policy\n"
        "from cputrain.affinity.binding import observe_binding\n"
        f"print(set_memory_policy('bind', {nodes!r}), observe_binding().memory_policy, observe_binding().memory_nodes)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed in (f"None bind {nodes!r}", "Operation not permitted None ()")


def test_an_absent_memory_node_is_refused_by_the_kernel() -> None:
    assert set_memory_policy("bind", (1000,)) in ("Invalid argument", "Operation not permitted")
    assert set_memory_policy("bind", (2000,)) == "Invalid argument"


def test_observed_differences_are_named() -> None:
    worker = this_plan(ppn=1).workers[0]
    observed = observe_binding()
    assert binding_differences(worker, replace(observed, pus=worker.pus)) == []
    assert (
        "memory planned"
        in binding_differences(replace(worker, memory_policy="bind"), replace(observed, pus=worker.pus))[0]
    )


def test_running_on_moves_and_returns() -> None:
    before = os.sched_getaffinity(0)
    one = (min(before),)
    with running_on(one):
        assert os.sched_getaffinity(0) == set(one)
    assert os.sched_getaffinity(0) == before
    with running_on(()):
        assert os.sched_getaffinity(0) == before


def test_cpus_that_do_not_exist_are_refused() -> None:
    worker = replace(this_plan(ppn=1).workers[0], compute_pus=(900,), comm_pus=(), loader_pus=())
    with pytest.raises(RunError, match="900"):
        bind_process(worker)
    with pytest.raises(InputError):
        plan_machine(this_machine(), Request(ppn=10_000), Runtime())


def test_a_host_can_plan_itself(tmp_path: Path) -> None:
    """Each worker makes the same plan in memory, binds by it, and what it becomes can read it there."""
    read = (
        "import os, json; from cputrain.affinity.bound_plan import bound_worker; w = bound_worker(os.environ); "
        "print(json.dumps([w.local_rank, w.pus == tuple(sorted(os.sched_getaffinity(0)))]))"
    )
    request = request_to_json(Request(ppn=PPN, local_batch=32, workload=RESNET50))
    for local_rank in range(PPN):
        argv = [sys.executable, "-m", "cputrain.affinity.bind", "--plan-here", request, "--local-rank", str(local_rank)]
        result = subprocess.run([*argv, "--", sys.executable, "-c", read], capture_output=True, text=True, cwd=tmp_path)
        assert json.loads(result.stdout) == [local_rank, True], result.stderr
    assert not list(tmp_path.iterdir())
    wrong = [
        sys.executable,
        "-m",
        "cputrain.affinity.bind",
        "--plan-here",
        '{"pnp": 2}',
        "--local-rank",
        "0",
        "--",
        "true",
    ]
    refused = subprocess.run(wrong, capture_output=True, text=True)
    assert refused.returncode == 2 and "is not a request for a plan" in refused.stderr


def test_launch_lets_hosts_plan_themselves(tmp_path: Path) -> None:
    launch = ("launch", "--plan-on-host", "--ppn", str(PPN), "--output", "out", "--", sys.executable, "-c", PRINT)
    result = cputrain(*launch, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("AFFINITY_PLAN") == PPN
    assert "--plan-on-host needs the same --ppn N" in refused(
        here("launch", "--plan-on-host", "--", "true", cwd=tmp_path)
    )


@needs_two_cores
def test_a_rank_s_wrapper_starts_what_plans_inside_the_rank_s_cores() -> None:
    """Children cannot read a plan in memory; they are the rank all the same, with its cores."""
    inner = (
        "import os, json; from cputrain.affinity.bound_plan import bound_worker; "
        "from cputrain.affinity.bound_plan import plan_for_rank; "
        "from cputrain.affinity.planner.plan import Request; "
        "from cputrain.affinity.rank import rank_from_env; rank = rank_from_env(os.environ); "
        "plan, index = plan_for_rank(Request(), rank, (), os.environ); "
        "print(json.dumps([bound_worker(os.environ) is None, plan.workers[index].pus, [*os.sched_getaffinity(0)]]))"
    )
    wrapper = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    argv = [sys.executable, "-m", "cputrain.affinity.bind", "--plan-here", request_to_json(Request(ppn=2)), "--"]
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    result = subprocess.run(
        [*argv, sys.executable, "-c", wrapper], capture_output=True, text=True, env={**os.environ, **rank}
    )
    assert result.returncode == 0, result.stderr
    unreadable, planned, given = json.loads(result.stdout)
    assert unreadable and sorted(planned) == sorted(given)


def test_a_thread_whose_cpus_have_left_the_cpuset_goes_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    lost = (4000, 4001)

    def bind_twice() -> set[int]:
        bind_thread(lost)
        bind_thread(lost, 1)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(bind_twice).result()
    assert here == os.sched_getaffinity(0)
    (said,) = caplog.messages
    assert said.startswith("cputrain: threads for CPUs 4000-4001 stay on CPUs ")
