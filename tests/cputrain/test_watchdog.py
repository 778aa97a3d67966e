"""Who is silent, who is absent: the watchdog's judgement from beats."""

import os
import subprocess
import sys
from contextlib import ExitStack

from affinity.ranks.rank import Rank, rendezvous
from cputrain.comm.watchdog import Beat, Heard, absent_ranks, silent_rank
from mpi.supervise.local import free_port

STUCK = """
import threading, time
from torch.distributed import HashStore
from cputrain.comm.watchdog import Waiting, Watchdog
never = threading.Event()
Watchdog(
    HashStore(), rank=0, world_size=1, note=print,
    waits_in=lambda: Waiting("ALLREDUCE #3", 3, overdue_s=12.3), fail=lambda why: never.wait(),
)
never.wait()
"""
AT_THE_END = """
import os, signal
from affinity.planner.plan import Request, plan_machine
from affinity.planner.runtime import Runtime
from affinity.topology.sysfs import this_machine
from cputrain.comm.group import end_group, gather, naming_lost_peers, start_group
from affinity.ranks.rank import discover
rank = discover(os.environ)
group = start_group(rank, plan_machine(this_machine(), Request(ppn=1), Runtime()).workers[0], "gloo", 60.0)
gather(1)
if rank.rank == int(os.environ["LOST"]):
    os.kill(os.getpid(), signal.Signals[os.environ["BY"]])
with naming_lost_peers(rank.rank):
    end_group(group)
"""


def heard(at: float, waits_in: str | None = None, sequence: int = 0, *, left: bool = False) -> Heard:
    return Heard(beat=Beat(count=1, host="n1", waits_in=waits_in, sequence=sequence, left=left), at=at)


def test_the_longest_silent_rank_is_named_with_where_it_was() -> None:
    seen = {0: heard(99.0), 1: heard(80.0, "ALLREDUCE #4 (Float[3])", 4), 2: heard(84.0)}
    assert silent_rank(seen, 100.0, 15.0) == (
        "rank 1 on n1 has given no sign of life for 20 s: it was in ALLREDUCE #4 (Float[3]) when last heard of"
    )
    assert silent_rank(seen, 100.0, 25.0) is None


def test_a_rank_that_has_left_is_not_missed() -> None:
    assert silent_rank({0: heard(99.0), 1: heard(10.0, left=True)}, 100.0, 15.0) is None


def test_who_has_not_joined_the_newest_collective_is_named() -> None:
    seen = {0: heard(0, "ALLREDUCE #5", 5), 1: heard(0, "BROADCAST #4", 4), 2: heard(0), 3: heard(0, left=True)}
    assert absent_ranks(seen) == (
        "not joined by rank 1 on n1 (in BROADCAST #4), rank 2 on n1 (in no collective), rank 3 on n1 (has left)"
    )
    assert absent_ranks({0: heard(0), 1: heard(0)}) == ""
    assert "not all in the same one" in absent_ranks({0: heard(0, "ALLREDUCE #5", 5), 1: heard(0, "BROADCAST #5", 5)})
    many = {0: heard(0, "ALLREDUCE #1", 1), **{i: heard(0) for i in range(1, 20)}}
    assert absent_ranks(many).endswith("rank 5 on n1 (in no collective) and 14 more")


def test_a_backend_that_never_returns_does_not_keep_its_rank() -> None:
    """Neither from a collective that is overdue nor from failing it."""
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert (
        done.stderr == "cputrain: rank 0 waits in ALLREDUCE #3: "
        "it should have ended 12 s ago, and the backend does not return\n"
    )


def test_a_rank_that_is_lost_at_the_end_of_a_job_of_gloo_s_ends_the_other() -> None:
    """Three jobs at once, as all mostly wait: rank 0 stops, rank 1 stops, rank 1 is killed."""
    cases = {
        (0, "SIGSTOP"): ("cputrain: rank 1 waits in gloo's collective", "the job's store"),
        (1, "SIGSTOP"): ("cputrain: rank 0 waits in gloo's collective", "rank 1 on"),
        (1, "SIGKILL"): ("rank 0 lost a peer", "see the rank that ended first"),
    }
    waits = []
    with ExitStack() as stack:
        for lost, by in cases:
            port = free_port()
            for number in range(2):
                rank = Rank(rank=number, world_size=2, local_rank=number, local_world_size=2, launcher="env")
                env = {**os.environ, **rendezvous(rank, "127.0.0.1", port), "LOST": str(lost), "BY": by}
                argv = [sys.executable, "-c", AT_THE_END]
                process = stack.enter_context(subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True))
                stack.callback(process.kill)
                if number != lost:
                    waits.append(process)
        told = [process.communicate(timeout=90)[1] for process in waits]
    for says, process, text in zip(cases.values(), waits, told, strict=True):
        assert process.returncode == 1, text
        assert all(said in text for said in says), text
