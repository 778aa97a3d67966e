"""Programs that know nothing of cputrain over the ccl backend: tests/support/ccl_stranger.py under several starters.

Each test runs its jobs side by side, as most of them wait.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

from cputrain.comm.ccl.segments import SHM, sweep_segments
from mpi.supervise.local import free_port
from tests.support.ccl_jobs import command, ended, lines_of, printed, started
from tests.support.commands import mpi_path

STRANGER = "tests.support.ccl_stranger"
QUIET = {"PYTHONWARNINGS": "ignore"}
LIMIT_S = 240.0
GOOD = [
    "a_group_is_made_while_a_collective_is_in_flight",
    "inference_tensors_are_communicated",
    "a_wait_times_out_once",
    "data_loaders_fork",
    "a_forked_child_is_refused",
    "messages_are_matched",
    "sparse_gradients_are_summed",
    "a_monitored_barrier_names_the_missing",
]


def passed(process: subprocess.Popen[bytes]) -> list[str]:
    """What the tasks of a rank, or of all ranks of a launcher, have passed; they must end well."""
    end = ended(process, LIMIT_S)
    assert end.status == 0, end.out + end.err[-3000:]
    return [line["passed"] for line in lines_of(end.out)]


def mpirun(*arguments: str) -> dict[str, object]:
    """The command of two ranks under Intel MPI's mpirun, without anything else that would help."""
    argv = ("mpirun", "-np", "2", sys.executable, "-m", STRANGER, "ccl", *arguments)
    return {"argv": argv, "env": {**mpi_path("intelmpi"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}}


def test_what_runs_over_gloo_runs_over_libfabric_and_over_mpi() -> None:
    """Groups in flight, inference mode, waits, data loaders, forks, messages, sparse sums: on 2 and 3 ranks."""
    over_mpi = mpirun("good")
    with ExitStack() as stack:
        ranks = stack.enter_context(started(STRANGER, "ccl", "good", ranks=3, **QUIET))
        under_mpi = stack.enter_context(command(*over_mpi["argv"], **over_mpi["env"], **QUIET))
        for rank in ranks:
            assert passed(rank) == GOOD
        assert sorted(passed(under_mpi)) == sorted(2 * GOOD)


def test_late_ranks_long_calls_and_suspensions_end_no_healthy_job() -> None:
    """A rank is later than oneCCL waits, keeps the GIL for 20 s, or the whole job is stopped for 20 s and goes on."""
    spawn = (sys.executable, "-m", STRANGER, "spawn", "gil")
    with ExitStack() as stack:
        suspended = stack.enter_context(started(STRANGER, "ccl", "suspended", **QUIET))
        late = stack.enter_context(started(STRANGER, "ccl", "late", CCL_KVS_GET_TIMEOUT="3", **QUIET))
        # mp.spawn's ranks know RANK and WORLD_SIZE only.
        spawned = stack.enter_context(command(*spawn, PORT=str(free_port()), **QUIET))
        while not all(lines_of(printed(rank)[0]) for rank in suspended):
            time.sleep(0.1)
        time.sleep(1)
        for rank in suspended:
            os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(20)
        for rank in suspended:
            os.kill(rank.pid, signal.SIGCONT)
        assert [passed(rank) for rank in late] == [["late"]] * 2
        assert passed(spawned) == ["gil"] * 2
        for rank in suspended:
            end = ended(rank, LIMIT_S)
            assert end.status == 0 and lines_of(end.out)[-1]["passed"] == "suspended", end.err


def test_a_lost_rank_ends_a_sub_group_of_a_gloo_world_and_a_lost_store_is_an_error() -> None:
    with ExitStack() as stack:
        # libfabric's shared memory, whose segments a killed rank leaves behind.
        world = stack.enter_context(started(STRANGER, "gloo", "killed", CCL_ATL_SHM="1", FI_PROVIDER="shm", **QUIET))
        store = stack.enter_context(started(STRANGER, "ccl", "store_gone", **QUIET))
        lost, gone = ended(world[0], LIMIT_S), ended(store[1], LIMIT_S)
        left = list(SHM.glob(f"{world[1].pid}:*"))
    assert left and sweep_segments() > 0 and not any(path.exists() for path in left)
    said = lines_of(lost.out)[0]
    assert "rank 1 on" in said["error"] and "no heartbeat" in said["error"] and said["seconds"] < 30
    assert gone.status == 0, gone.err  # no abort
    error = lines_of(gone.out)[0]["error"]
    assert "the job's store is gone" in error and "while group 1 was created" in error and "\n" not in error
