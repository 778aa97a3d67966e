"""Ranks that are in different collectives over oneCCL, and ranks that are lost while rank 0 cannot judge."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from cputrain.mpi.supervise import free_port
from tests.support.ccl_jobs import command, ended, lines_of, started
from tests.support.commands import mpi_path

pytestmark = pytest.mark.slow

PROGRAM = "tests.support.ccl_differ"
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
LIMIT_S = 240.0
AT_ONCE = 4
DIFFERENT = {
    "sizes": "rank 0 in ALLREDUCE #2 of group 0 (Float[8]), rank 1 in ALLREDUCE #2 of group 0 (Float[16])",
    "large_sizes": "rank 0 in ALLREDUCE #2 of group 0 (Float[200000]), rank 1 in ALLREDUCE #2 of group 0 (Float[2000])",
    "types": "rank 0 in ALLREDUCE #2 of group 0 (Float[8]), rank 1 in ALLREDUCE #2 of group 0 (Int[8])",
    "short_types": "rank 0 in ALLREDUCE #2 of group 0 (Half[8]), rank 1 in ALLREDUCE #2 of group 0 (BFloat16[8])",
    "operators": "rank 0 in ALLREDUCE #2 of group 0 (Float[8]), rank 1 in ALLREDUCE #2 of group 0 (Float[8] by max)",
    "barrier": "rank 0 in ALLREDUCE #2 of group 0 (Byte[1]), rank 1 in BARRIER #2 of group 0",
    "reduce_and_barrier": "rank 0 in REDUCE #2 of group 0 (Float[1]), rank 1 in BARRIER #2 of group 0",
    "broadcast_sizes": "rank 0 in BROADCAST #2 of group 0 (Float[8]), rank 1 in BROADCAST #2 of group 0 (Float[4])",
    "roots": "rank 0 in BROADCAST #2 of group 0 (Float[8]), rank 1 in BROADCAST #2 of group 0 (Float[8] of root 1)",
    "reduce_roots": "rank 0 in REDUCE #2 of group 0 (Float[8]), rank 1 in REDUCE #2 of group 0 (Float[8] of root 1)",
    "gather_roots": "rank 0 in GATHER #2 of group 0 (Float[4]), rank 1 in GATHER #2 of group 0 (Float[4] of root 1)",
    "all_gather_shapes": "rank 0 in ALLGATHER #2 of group 0 (Float[4]), rank 1 in ALLGATHER #2 of group 0 (Float[8])",
    "long_lists": "; of these, tensor 21 is Float[1000] on rank 0, Float[1001] on rank 1: all ranks",
    "longer_lists": "Float[1000], Float[1000], Float[1000], ...); the first 48 tensors are the same: all ranks",
    "rows": "rank 0 in ALLTOALL_BASE #2 of group 0 (Float[4]), rank 1 in ALLTOALL_BASE #2 of group 0 (Float[5])",
    "late_rows": "rank 0 in ALLTOALL_BASE #3 of group 0 (Float[4]), rank 1 in ALLTOALL_BASE #3 of group 0 (Float[0])",
    "gather_sizes": "rank 0 in GATHER #2 of group 0 (Float[4]), rank 1 in GATHER #2 of group 0 (Float[5])",
    "late_gather_sizes": "rank 0 in GATHER #3 of group 0 (Float[4] of root 1), rank 1 in GATHER #3 of group 0 (Float",
    "scatter_sizes": "rank 0 in SCATTER #2 of group 0 (Float[4], Float[4]), rank 1 in SCATTER #2 of group 0 (Float[5])",
    "uneven_batches": "rank 1 in BARRIER #",
    "skipped_layer": "rank 0 in _ALLGATHER_BASE #",
}


def errors_of(*processes: subprocess.Popen[bytes]) -> dict[int, tuple[str, float]]:
    """What each rank says, and after how many seconds."""
    ends = [ended(process, LIMIT_S) for process in processes]
    lines = [line for end in ends for line in lines_of(end.out)]
    assert lines, [(end.status, end.err[-2000:]) for end in ends]
    return {line["rank"]: (line["error"], line["seconds"]) for line in lines}


def test_what_differs_between_ranks_is_said_on_all_of_them_at_once() -> None:
    """And no rank gets a sum of different things. They mostly wait: some jobs at once."""
    names = list(DIFFERENT)
    found = {}
    for first in range(0, len(names), AT_ONCE):
        with ExitStack() as stack:
            batch = names[first : first + AT_ONCE]
            jobs = {name: stack.enter_context(started(PROGRAM, name, **QUIET)) for name in batch}
            found |= {name: errors_of(*processes) for name, processes in jobs.items()}
    for name, expected in DIFFERENT.items():
        assert set(found[name]) == {0, 1}
        for error, seconds in found[name].values():
            assert error.startswith("ccl: the ranks of group 0 differ: ") and expected in error, (name, error)
            assert "must call the same collectives in the same order, with the same sizes, types and options" in error
            assert seconds < 20
    seen_by = ("rank 0 has 8 bytes for rank 1, which expects 8, and expects 8 bytes of it, which has 12",)
    seen_by += ("rank 1 has 12 bytes for rank 0, which expects 8, and expects 8 bytes of it, which has 8",)
    assert any(sentence in found["rows"][0][0] for sentence in seen_by), found["rows"]


def test_so_it_is_over_mpi() -> None:
    with ExitStack() as stack:
        jobs = {}
        for name in ("sizes", "barrier", "roots"):
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CCL_ATL_TRANSPORT": "mpi"}
            argv = ("mpirun", "-np", "2", sys.executable, "-m", PROGRAM, name)
            jobs[name] = stack.enter_context(command(*argv, **{**mpi_path("intelmpi"), **meeting, **QUIET}))
        for name, job in jobs.items():
            found = errors_of(job)
            assert set(found) == {0, 1} and all(DIFFERENT[name] in error for error, _ in found.values()), found


def test_a_checkpoint_s_thread_on_the_training_s_group_is_told_to_take_its_own(tmp_path: Path) -> None:
    with started(PROGRAM, "checkpoint_thread", CHECKPOINT=str(tmp_path), **QUIET) as processes:
        found = errors_of(*processes)
    for error, _ in found.values():
        assert "the ranks of group 0 differ: rank 0 in " in error and ", rank 1 in " in error, error
        assert "dcp.async_save, a group of its own (process_group=torch.distributed.new_group())" in error


def test_who_is_absent_is_said_of_the_collective_s_own_group_also_where_rank_0_cannot_judge() -> None:
    """Rank 0 waits for a rank that is in another group's collective, also where no thread can sign heartbeats without
    Python; rank 0 is busy; rank 1 has left for good."""
    with ExitStack() as stack:
        other_groups = [
            stack.enter_context(started(PROGRAM, "other_group", ranks=3, **variables, **QUIET))
            for variables in ({}, {"WITHOUT_OPENSSL": "1"})
        ]
        busy = stack.enter_context(started(PROGRAM, "busy_first_rank", ranks=3, **QUIET))
        left = stack.enter_context(started(PROGRAM, "leaves", **QUIET))
        left_message = stack.enter_context(started(PROGRAM, "leaves_message", **QUIET))
        for other_group in other_groups:
            absent, _ = errors_of(other_group[0])[0]
            assert "Timed out after 10 s in ALLREDUCE #2 of group 0 (Float[3]); not joined by rank 1 on " in absent
            assert "(in no collective), rank 2 on " in absent and "(in ALLREDUCE #51 of group 1 (Float[3]))" in absent
            assert "rank 0 on" not in absent
        lost, seconds = errors_of(busy[1])[1]
        assert "rank 2 on " in lost and "has sent no heartbeat for" in lost and seconds < 20
        assert "rank 1 waits in ALLREDUCE #1 of group 1 (Float[3])" in lost
        waits, seconds = errors_of(left[0])[0]
        assert "rank 1 on " in waits and "(has left) never calls it" in waits and seconds < 20
        assert "rank 0 waits in ALLREDUCE #2 of group 0 (Float[3])" in waits
        waits, seconds = errors_of(left_message[0])[0]
        assert "nobody is left to answer: rank 1 on " in waits and "(has left)" in waits and seconds < 20
        assert "rank 0 waits in RECV #1 of group 0 (Float[3] from rank 1)" in waits


def test_whom_a_message_waits_for_is_said_at_its_timeout() -> None:
    with started(PROGRAM, "unanswered", ranks=3, **QUIET) as processes:
        (received, _), (sent, _) = (errors_of(process)[rank] for rank, process in enumerate(processes[:2]))
    assert "RECVANYSOURCE #1 of group 0 (Float[3] from any rank); it waits for rank 1 on " in received
    assert "(in SEND #1 of group 0 (Float[4194304] to rank 2)), rank 2 on " in received
    assert "SEND #1 of group 0 (Float[4194304] to rank 2); it waits for rank 2 on " in sent
    assert sent.endswith("(in no collective)")


def test_full_shared_memory_is_said_with_what_to_do_and_leaves_no_file() -> None:
    argv = (
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=2m none /dev/shm && "$@"',
        "sh",
    )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **QUIET}
    with command(*argv, sys.executable, "-m", PROGRAM, "full_memory", **alone) as process:
        (said,) = lines_of(ended(process, LIMIT_S).out)
    assert said["error"] == (
        "ccl: group 1 cannot share memory in /dev/shm: No space left on device: "
        "enlarge it (docker --shm-size=2g), or remove files from it"
    )
    assert said["left"] == []


def test_ranks_of_different_hosts_learn_it_by_their_heartbeats() -> None:
    """Without memory that both see: where the sum would be wrong in silence, and where oneCCL fails by itself."""
    alone = ("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
    with ExitStack() as stack:
        jobs = {}
        for name in ("types_once", "rows_once", "sizes"):
            common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "FI_TCP_IFACE": "lo", **QUIET}
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            argv = (*alone, sys.executable, "-m", PROGRAM, name)
            jobs[name] = [stack.enter_context(command(*argv, **common, RANK=str(rank))) for rank in range(2)]
        for error, seconds in errors_of(*jobs["types_once"]).values():
            assert "the ranks of group 0 differ at its collective #" in error and "rank 0 on " in error, error
            assert "rank 1 on " in error and seconds < 30
        error, seconds = errors_of(jobs["rows_once"][0])[0]
        assert "each rank must send in an all_to_all what the other expects" in error, error
        assert "the ranks of group 0 differ at its collective #" in error and seconds < 30
        error, _ = errors_of(jobs["sizes"][0])[0]
        assert "rank 0 on " in error and "in ALLREDUCE #2 of group 0 (Float[8])" in error, error
        assert "rank 1 on " in error
