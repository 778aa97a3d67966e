"""Programs that know nothing of cputrain over the ccl backend: tests/support/ccl_stranger.py under several starters.

Each test runs its jobs side by side, as most of them wait.
"""

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from benchmarks.comm_soak import commands
from cputrain.comm.ccl.environment import SHM, sweep_segments
from cputrain.mpi.supervise.run import free_port
from tests.support import ccl_callbacks
from tests.support.ccl_jobs import command, lines_of, needs_ccl, started
from tests.support.commands import mpi_path
from tests.support.forked import Process, ended, forking_python, printed

pytestmark = needs_ccl
STRANGER = "tests.support.ccl_stranger"
QUIET = {"PYTHONWARNINGS": "ignore"}
LIMIT_S = 240.0
GOOD = [
    "a_group_is_made_while_a_collective_is_in_flight",
    "groups_of_gloo_go_on_beside",
    "inference_tensors_are_communicated",
    "a_wait_times_out_once",
    "data_loaders_fork",
    "a_forked_child_is_refused",
    "messages_are_matched",
    "a_group_is_destroyed_after_receives_from_any_source",
    "sparse_gradients_are_summed",
    "a_monitored_barrier_names_the_missing",
    "monitored_barriers_leave_nothing_in_the_store",
    *(act.__name__ for act in ccl_callbacks.ALL),
]


def passed(process: Process) -> list[str]:
    """What the tasks of a rank, or of all ranks of a launcher, have passed; they must end well."""
    end = ended(process, LIMIT_S)
    assert end.status == 0, end.out + end.err
    return [line["passed"] for line in lines_of(end.out)]


def mpirun(*arguments: str, ranks: int = 2) -> dict[str, object]:
    """The command of ranks under Intel MPI's mpirun, without anything else that would help."""
    argv = ("mpirun", "-np", str(ranks), *forking_python(), "-m", STRANGER, "ccl", *arguments)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {"argv": argv, "env": {**mpi_path("intelmpi"), **meeting, "CCL_ATL_TRANSPORT": "mpi"}}


@pytest.mark.long
@pytest.mark.nightly
def test_what_runs_over_gloo_runs_over_libfabric_and_over_mpi() -> None:
    """Groups in flight, inference mode, waits, data loaders, forks, messages, sparse sums: on 2 and 3 ranks."""
    over_mpi = mpirun("good")
    with ExitStack() as stack:
        ranks = stack.enter_context(started(STRANGER, "ccl", "good", ranks=3, **QUIET))
        under_mpi = stack.enter_context(command(*over_mpi["argv"], **over_mpi["env"], **QUIET))
        # Two of torchrun's agents on a host: each rank is the only one of its own.
        agents = stack.enter_context(started(STRANGER, "ccl", "beside", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **QUIET))
        for rank in ranks:
            assert passed(rank) == GOOD
        for rank in agents:
            assert passed(rank) == ["beside"]
        assert sorted(passed(under_mpi)) == sorted(2 * GOOD)


@pytest.mark.long
def test_mpi_ends_with_a_communicator_that_only_one_rank_has_left() -> None:
    """Rank 0 has asked all for a message; rank 2 sent none. Where rank 0 does not end MPI, mpirun kills the others."""
    left = mpirun("messages_are_left", ranks=3)
    with command(*left["argv"], **left["env"], **QUIET) as job:
        assert passed(job) == ["messages_are_left"] * 3


@pytest.mark.parametrize("status", [pytest.param(0, marks=pytest.mark.long), 3])
def test_over_mpi_a_rank_that_leaves_an_operation_in_flight_ends_with_its_own_status(status: int) -> None:
    """mpirun returns it; it would return 255 if the rank did not end MPI."""
    left = mpirun("leaves_in_flight", str(status))
    with command(*left["argv"], **left["env"], **QUIET) as job:
        end = ended(job, LIMIT_S)
    assert end.status == status, end.err


@pytest.mark.long
def test_messages_between_some_ranks_do_not_confuse_who_has_joined_a_collective() -> None:
    """Neither a timeout's message nor PyTorch's comparison of what ranks call; a callback that waits for a collective
    which fails with its own ends at the timeout too."""
    some = ("ccl", "messages_between_some")
    with ExitStack() as stack:
        missing = stack.enter_context(started(STRANGER, *some, ranks=3, MISSING="1", **QUIET))
        compared = stack.enter_context(started(STRANGER, *some, ranks=3, TORCH_DISTRIBUTED_DEBUG="DETAIL", **QUIET))
        callbacks = stack.enter_context(started(STRANGER, "ccl", "callbacks_fail", **QUIET))
        for rank in (missing[0], missing[2]):
            (said,) = lines_of(ended(rank, LIMIT_S).out)
            assert "in ALLREDUCE #1 of group 1" in said["error"] and "not joined by rank 1 on" in said["error"]
            assert "rank 2" not in said["error"] and "rank 0" not in said["error"]
        for rank in compared:
            assert passed(rank) == ["messages_between_some"]
        assert "Timed out after 4 s in ALLREDUCE #1" in lines_of(ended(callbacks[0], 60).out)[0]["error"]


@pytest.mark.long
def test_a_timeout_does_not_name_a_rank_that_has_just_joined() -> None:
    """Some seconds before a timeout, or where the timeout itself is only some seconds."""
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(started(STRANGER, "ccl", "joins_late", ranks=3, TIMEOUT_S=limit, LATE_S=late, **QUIET))
            for limit, late in (("12", "8"), ("5", "0.5"))
        ]
        for ranks in jobs:
            for rank in ranks[:2]:
                (said,) = lines_of(ended(rank, LIMIT_S).out)
                assert "in ALLREDUCE #2 of group 1" in said["error"] and "; not joined by rank 2 on" in said["error"]
                assert "rank 0 on" not in said["error"] and "rank 1 on" not in said["error"], said


@pytest.mark.long
@pytest.mark.nightly
def test_several_of_oneccl_s_threads_may_be_requested_where_no_core_is_theirs() -> None:
    """By CCL_WORKER_COUNT, which accelerate and transformers want to be set: none starts, and all goes on as before."""
    with started(STRANGER, "ccl", "good", CCL_WORKER_COUNT="4", **QUIET) as ranks:
        assert [passed(rank) for rank in ranks] == [GOOD] * 2


def test_a_group_of_some_ranks_of_a_gloo_world_starts_under_mpirun() -> None:
    """MPI would wait at its start for the third rank."""
    argv = ("mpirun", "-np", "3", *forking_python(), "-m", STRANGER, "gloo", "some")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with command(*argv, **mpi_path("intelmpi"), **meeting, **QUIET) as process:
        end = ended(process, LIMIT_S)
    assert end.status == 0, end.err
    said = sorted((line["rank"], line["transport"]) for line in lines_of(end.out))
    assert said == [(0, "ofi"), (1, "ofi"), (2, None)]


@pytest.mark.long
@pytest.mark.nightly
def test_late_ranks_long_calls_and_suspensions_end_no_healthy_job() -> None:
    """A rank is later than oneCCL waits, keeps the GIL for 20 s, or the whole job is stopped for 20 s and goes on; what
    watched a world that has ended does not take the next one's store for lost."""
    spawn = (sys.executable, "-m", STRANGER, "spawn", "gil")
    with ExitStack() as stack:
        suspended = stack.enter_context(started(STRANGER, "ccl", "suspended", **QUIET))
        late = stack.enter_context(started(STRANGER, "ccl", "late", CCL_KVS_GET_TIMEOUT="3", **QUIET))
        second = stack.enter_context(started(STRANGER, "gloo", "again", PORT=str(free_port()), **QUIET))
        # mp.spawn's ranks know RANK and WORLD_SIZE only.
        spawned = stack.enter_context(command(*spawn, PORT=str(free_port()), **QUIET))
        gloo = stack.enter_context(command(*spawn[:-1], "beside", PORT=str(free_port()), **QUIET))
        while not all(lines_of(printed(rank)[0]) for rank in suspended):
            assert all(rank.poll() is None for rank in suspended), [printed(rank)[1] for rank in suspended]
            time.sleep(0.1)
        time.sleep(1)
        for rank in suspended:
            os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(20)
        for rank in suspended:
            os.kill(rank.pid, signal.SIGCONT)
        assert [passed(rank) for rank in late] == [["late"]] * 2
        assert [passed(rank) for rank in second] == [["again"]] * 2
        assert passed(spawned) == ["gil"] * 2
        assert passed(gloo) == ["beside"] * 2
        for rank in suspended:
            end = ended(rank, LIMIT_S)
            assert end.status == 0 and lines_of(end.out)[-1]["passed"] == "suspended", end.err


@pytest.mark.long
def test_a_group_of_the_next_world_is_not_taken_for_one_of_its_name() -> None:
    """torch numbers the groups of every world from 0 on."""
    with started(STRANGER, "ccl", "next_world", ranks=3, PORT=str(free_port()), **QUIET) as ranks:
        assert [passed(rank) for rank in ranks] == [["next_world"]] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    "starter", ["launch", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("torchrun", "mpirun", "spawn"))]
)
def test_memory_does_not_grow_with_sizes_that_never_repeat(starter: str, tmp_path: Path) -> None:
    """With oneCCL's own cache of buffers it grows by hundreds of MiB."""
    argv = commands(2000, str(tmp_path / "run"))[starter]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PORT": str(free_port())}
    path = mpi_path("intelmpi") if starter == "mpirun" else {}
    with command(*argv, **meeting, **path, **QUIET) as process:
        end = ended(process, LIMIT_S)
    assert end.status == 0, end.err
    grown = [line["grown_mib"] for line in lines_of(end.out)]
    assert len(grown) == 2 and max(grown) < 50, grown


@pytest.mark.long
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
    assert "the job's store is gone" in error and "group 1 cannot be created: " in error and "\n" not in error


@pytest.mark.long
def test_a_rank_that_is_lost_before_it_makes_a_group_is_named_without_a_local_rank_too() -> None:
    """Scripts that start their ranks with mp.spawn have none."""
    with started(STRANGER, "ccl", "killed_before", LOCAL_RANK="", PYTHONUNBUFFERED="", **QUIET) as ranks:
        end = ended(ranks[0], 60)  # the group's timeout is 120 s
    assert end.status == 1 and "Traceback" not in end.err, end.err
    assert end.out == "printed before\n"
    assert "rank 0 waits in the creation of group 1" in end.err and "rank 1 on" in end.err and "no heartbeat" in end.err


@pytest.mark.long
def test_a_process_forks_while_oneccl_is_stuck() -> None:
    """Or while a heartbeat is being written."""
    with ExitStack() as stack:
        (beating,) = stack.enter_context(started(STRANGER, "ccl", "fork_while_beating", ranks=1, **QUIET))
        ranks = stack.enter_context(started(STRANGER, "ccl", "fork_while_stuck", **QUIET))
        assert passed(beating) == ["fork_while_beating"]
        end = ended(ranks[0], LIMIT_S)
    assert end.status == 0, end.err
    assert lines_of(end.out) == [{"rank": 0, "passed": "fork_while_stuck", "stuck": True}]


@pytest.mark.long
def test_a_store_that_outlives_a_job_s_ranks_does_not_confuse_those_that_come_next() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with started(STRANGER, "ccl", "killed", STORE_PORT=str(store.port), **QUIET) as ranks:
        assert "no heartbeat" in lines_of(ended(ranks[0], LIMIT_S).out)[0]["error"]
    with started(STRANGER, "ccl", "waits", STORE_PORT=str(store.port), **QUIET) as ranks:
        for rank in ranks:
            assert passed(rank) == ["waits"]
