"""Ranks that are in different collectives over oneCCL, and ranks that are lost while rank 0 cannot judge."""

import random
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from cputrain.mpi.supervise.run import free_port
from tests.support.ccl_jobs import command, lines_of, ran_with_shm, started
from tests.support.commands import mpi_path
from tests.support.forked import Process, ended, forking_python

pytestmark = pytest.mark.slow

PROGRAM = "tests.support.ccl_differ"
QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
LIMIT_S = 240.0
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
KINDS = ("sizes", "types", "operators", "barrier", "roots", "long_lists", "rows", "skipped_layer")
"""One case of each kind of difference; the others are those of further collectives."""


@dataclass(frozen=True)
class Said:
    """What a rank says of a case: its error, after how many seconds, and whether the differing call had returned."""

    error: str
    seconds: float
    returned: bool


Found = dict[str, dict[int, Said]]


def said_by(*processes: Process) -> Found:
    """What the ranks say, by case and rank."""
    found: Found = {}
    for process in processes:
        end = ended(process, LIMIT_S)
        lines = lines_of(end.out)
        assert lines, (end.status, end.err)
        for line in lines:
            said = Said(line["error"], line["seconds"], line["returned"])
            found.setdefault(line["case"], {})[line["rank"]] = said
    return found


def cases_of(*names: str) -> list[str]:
    """The arguments of the program for cases that share a rank's interpreter: each with a port of its own, which no
    other test takes before its case begins."""
    ports = random.SystemRandom().sample(range(7_000, 10_000), len(names))
    return [f"{name}:{port}" for name, port in zip(names, ports, strict=True)]


def assert_differ(found: dict[int, Said], expected: str) -> None:
    assert set(found) == {0, 1}, (expected, found)
    for said in found.values():
        assert said.error.startswith("ccl: the ranks of group 0 differ: ") and expected in said.error, said
        assert "must call the same collectives in the same order, with the same sizes, types and options" in said.error
        assert said.seconds < 40  # the timeout is 60 s


@pytest.mark.long
def test_what_differs_in_any_collective_is_said_on_all_ranks() -> None:
    names = [name for name in DIFFERENT if name not in KINDS]
    with started(PROGRAM, *cases_of(*names), **QUIET) as processes:
        found = said_by(*processes)
    for name in names:
        assert_differ(found[name], DIFFERENT[name])


def test_what_differs_between_ranks_is_said_on_all_of_them_at_once(tmp_path: Path) -> None:
    """And no rank gets a sum of different things. A checkpoint's thread on the training's group is told to take one."""
    with started(PROGRAM, *cases_of(*KINDS, "checkpoint_thread"), CHECKPOINT=str(tmp_path), **QUIET) as processes:
        found = said_by(*processes)
    for name in KINDS:
        assert_differ(found[name], DIFFERENT[name])
    seen_by = (
        "rank 0 sends 8 bytes to rank 1, which expects 8, and expects 8 bytes from it, which sends 12",
        "rank 1 sends 12 bytes to rank 0, which expects 8, and expects 8 bytes from it, which sends 8",
    )
    assert any(sentence in found["rows"][0].error for sentence in seen_by), found["rows"]
    for said in found["checkpoint_thread"].values():
        assert "the ranks of group 0 differ: rank 0 in " in said.error and ", rank 1 in " in said.error, said
        assert "dcp.async_save's, a separate group (process_group=torch.distributed.new_group())" in said.error


def test_so_it_is_over_mpi() -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CCL_ATL_TRANSPORT": "mpi"}
    argv = ("mpirun", "-np", "2", *forking_python(), "-m", PROGRAM, "sizes")
    with command(*argv, **{**mpi_path("intelmpi"), **meeting, **QUIET}) as job:
        assert_differ(said_by(job)["sizes"], DIFFERENT["sizes"])


@pytest.mark.long
def test_who_is_absent_is_said_of_the_collective_s_own_group_also_where_rank_0_cannot_judge() -> None:
    """Rank 0 waits for a rank that is in another group's collective, also where no thread can sign heartbeats without
    Python; rank 0 is busy; rank 1 has left for good; whom a message waits for is said at its timeout."""
    found: Found = {}
    # Nine processes at a time: the groups of more take too long to be created on a busy host.
    for names in (
        ("busy_first_rank", "other_group", "leaves"),
        ("other_group_without_openssl", "unanswered", "leaves_message"),
    ):
        with started(PROGRAM, *cases_of(*names), ranks=3, **QUIET) as processes:
            found |= said_by(*processes)
    for name in ("other_group", "other_group_without_openssl"):
        absent = found[name][0].error
        assert "Timed out after 10 s in ALLREDUCE #2 of group 0 (Float[3]); not joined by rank 1 on " in absent
        assert "(in no collective), rank 2 on " in absent and "(in ALLREDUCE #51 of group 1 (Float[3]))" in absent
        assert "rank 0 on" not in absent
    lost = found["busy_first_rank"][1]
    assert "rank 2 on " in lost.error and "has sent no heartbeat for" in lost.error and lost.seconds < 40
    assert "rank 1 waits in ALLREDUCE #1 of group 1 (Float[3])" in lost.error
    waits = found["leaves"][0]
    assert "rank 1 on " in waits.error and "(has left) never calls it" in waits.error and waits.seconds < 40
    assert "rank 0 waits in ALLREDUCE #2 of group 0 (Float[3])" in waits.error
    waits = found["leaves_message"][0]
    assert "nobody is left to answer: rank 1 on " in waits.error and "(has left)" in waits.error and waits.seconds < 40
    assert "rank 0 waits in RECV #1 of group 0 (Float[3] from rank 1)" in waits.error
    received, sent = (found["unanswered"][rank].error for rank in range(2))
    assert "RECVANYSOURCE #1 of group 0 (Float[3] from any rank); it waits for rank 1 on " in received
    assert "(in SEND #1 of group 0 (Float[4194304] to rank 2)), rank 2 on " in received
    assert "SEND #1 of group 0 (Float[4194304] to rank 2); it waits for rank 2 on " in sent
    assert sent.endswith("(in no collective)")


def test_full_shared_memory_is_said_with_what_to_do_and_leaves_no_file() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **QUIET}
    program = f"import sys; sys.argv = ['', 'full_memory']\nimport {PROGRAM}"
    (said,) = lines_of(ran_with_shm("2m", program, **alone).out)
    assert said["error"] == (
        "ccl: group 1 cannot share memory in /dev/shm, No space left on device: "
        "enlarge it (docker --shm-size=2g), or remove files from it"
    )
    assert said["left"] == []


@pytest.mark.long
def test_ranks_of_different_hosts_that_differ_get_no_result() -> None:
    """Without memory that both see. Where all have called both kinds before, they learn it by their heartbeats;
    a collective that nobody waits for yet keeps no message back, and one that is refused ends nothing."""
    alone = ("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "FI_TCP_IFACE": "lo", **QUIET}
    argv = (*alone, sys.executable, "-m", PROGRAM)
    differing, legal = ("sizes", "types", "barrier", "one_way"), ("message_between", "refused_type", "refused_start")
    names = cases_of(*differing, "known_types", *legal)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(command(*argv, *names, MASTER_ADDR="127.0.0.1", **common, RANK=str(rank)))
            for rank in range(2)
        ]
        found = said_by(*ranks)
    for name in differing:
        assert set(found[name]) == {0, 1}, (name, found)
        assert not any(said.returned for said in found[name].values()), (name, found[name])
        assert any("the ranks of group 0 differ at its collective #2 " in said.error for said in found[name].values())
    for said in found["known_types"].values():
        assert said.returned and "the ranks of group 0 differ at its collective #" in said.error, said
        assert "rank 0 on " in said.error and "rank 1 on " in said.error and said.seconds < 30, said
    for name in legal:
        assert {rank: said.error for rank, said in found[name].items()} == {0: "", 1: ""}, found
