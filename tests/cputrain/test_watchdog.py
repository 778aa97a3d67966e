"""The watchdog: silent and absent ranks found from their heartbeats, and the end of a rank whose peer is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from cputrain.affinity.filesystem import read_stat
from cputrain.comm.store import SignedKeys
from cputrain.comm.watchdog import (
    HeartbeatThread,
    LastHeartbeat,
    PendingCollective,
    StoreHeartbeat,
    Watchdog,
    WatchedBackend,
    departed_rank,
    describe_absent,
    describe_peers,
    differing_ranks,
    is_scheduled,
    place_of_this_process,
    ranks_not_joined,
    silence_limit,
    silent_rank,
    watched_ranks,
)
from tests.support.ccl_jobs import needs_ccl, ran, started
from tests.support.forked import Ended, ended, forked

OTHER_VERSION = """
import json, logging, time
from torch.distributed import HashStore
from cputrain.comm import watchdog
from cputrain.comm.store import SignedKeys
from cputrain.comm.watchdog import HeartbeatThread, PendingCollective, place_of_this_process
from cputrain.comm.watchdog import Watchdog, WatchedBackend
watchdog.HEARTBEAT_S = 0.5
logging.basicConfig(format="%(message)s")
keys = SignedKeys(HashStore(), "token")
keys.set("heartbeat/1", json.dumps({"count": 1, "beats": [3]}))
keys.set("heartbeat/2", json.dumps([1]))
pending = lambda: PendingCollective("ALLREDUCE #3")
Watchdog(
    keys, ranks=(0, 1, 2), rank=0, timeout_s=60.0,
    sender=HeartbeatThread(keys, 0, place_of_this_process(native=False), pending),
    backend=WatchedBackend(pending=pending),
)
time.sleep(4)
"""
STUCK = """
import threading, time
from torch.distributed import HashStore
from cputrain.comm.watchdog import HeartbeatThread, PendingCollective, place_of_this_process
from cputrain.comm.store import SignedKeys
from cputrain.comm.watchdog import Watchdog, WatchedBackend
never = threading.Event()
keys = SignedKeys(HashStore(), "token")
pending = lambda: PendingCollective("ALLREDUCE #3", overdue_s=12.3)
Watchdog(
    keys, ranks=(0,), rank=0, timeout_s=60.0,
    sender=HeartbeatThread(keys, 0, place_of_this_process(native=False), pending),
    backend=WatchedBackend(pending=pending, abort=lambda reason: never.wait()),
)
never.wait()
"""
GONE = """
import sys, threading, time
from cputrain.comm import watchdog
from cputrain.comm.watchdog import PendingCollective
class Gone:
    def fail(self, *arguments):
        raise RuntimeError("Connection was closed")
    has = get = get_all = set = fail
begun = time.monotonic()
watchdog.LEAVING_S = 6.0
watchdog.Watchdog(
    Gone(), ranks=(0, 1), rank=1, timeout_s=60.0, sender=None,
    backend=watchdog.WatchedBackend(
        pending=lambda: PendingCollective(sys.argv[1]),
        abort=lambda reason: print(time.monotonic() - begun, flush=True),
    ),
)
threading.Event().wait()
"""
KEPT = """
import ctypes, json, os
from torch.distributed import HashStore
from cputrain.comm.ccl.environment import ensure_extension, find_libraries, load_extension
from cputrain.comm.store import SignedKeys, openssl_hmac
store = HashStore()
loaded = load_extension(ensure_extension(find_libraries(os.environ), os.environ))
loaded.HeartbeatSender(store, "beat", "token", '"host": "n1"', 0.1, *openssl_hmac(), -1)
ours, guessed = SignedKeys(store, "token"), SignedKeys(store, "guess")
before = json.loads(ours.get("beat"))["count"]
ctypes.PyDLL(None).sleep(3)  # without giving up Python's lock
said = {"counted": json.loads(ours.get("beat"))["count"] - before, "guessed": guessed.get("beat")}
store.set("forged", store.get("beat"))
said["forged"] = ours.get("forged")
os.write(1, json.dumps(said).encode())
os._exit(0)
"""
# Rank 1 is late for a collective of a second group, in which rank 0 does not wait at first, then for one of the first.
IN_FLIGHT = """
import json, os, threading, time, torch
import torch.distributed as dist
from cputrain.comm import ccl
dist.init_process_group("ccl")
second = dist.new_group()
dist.all_reduce(torch.ones(1))
dist.all_reduce(torch.ones(1), group=second)
rank, said = dist.get_rank(), {}
def look(name):
    said[name] = ccl._extension.pending_collective()[-1]
def look_later(seconds, name):
    threading.Timer(seconds, look, [name]).start()
if rank == 0:
    work = dist.all_reduce(torch.ones(1), group=second, async_op=True)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        pass
    look("computes")
for _ in range(10):
    time.sleep(0.1)
    dist.all_reduce(torch.ones(1))
if rank == 0:
    look("goes on")
    look_later(2.0, "waits for a future")
    work.get_future().wait()
    look_later(1.0, "waits in a call")
else:
    time.sleep(2.2)
    dist.all_reduce(torch.ones(1), group=second)
    time.sleep(1.2)
dist.all_reduce(torch.ones(1))
look("has waited")
dist.destroy_process_group()
os.write(1, json.dumps(said).encode() if rank == 0 else b"")
"""
AT_THE_END = """
import os, signal
from cputrain.affinity.planner.plan import Request, plan_machine
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.comm.group import end_group, all_gather, convert_lost_peer_errors, start_group
from cputrain.affinity.rank import rank_from_env
rank = rank_from_env(os.environ)
group = start_group(rank, plan_machine(this_machine(), Request(ppn=1), Runtime()).workers[0], "gloo", 60.0, os.environ)
all_gather(1)
if rank.rank == int(os.environ["LOST"]):
    os.kill(os.getpid(), signal.Signals[os.environ["BY"]])
with convert_lost_peer_errors(rank.rank):
    end_group(group)
"""


def last(
    at: float, waits_in: str | None = None, *, left: bool = False, balance: int = 0, **groups: tuple[int, ...]
) -> LastHeartbeat:
    """A rank's last heartbeat; `groups`: the number and digest of its last collective of each, then of earlier ones."""
    place = {"host": "n1", "kernel": "k1", "pid": 1, "started": 0, "native": True}
    called = {
        group: [(number, digest, balance) for number, digest in zip(places[::2], places[1::2], strict=True)]
        for group, places in groups.items()
    }
    heartbeat = StoreHeartbeat(**place, count=1, waits_in=waits_in, groups=called, left=left)
    return LastHeartbeat(heartbeat=heartbeat, at=at)


def test_the_longest_silent_rank_is_named_with_its_last_collective() -> None:
    seen = {0: last(99.0), 1: last(80.0, "ALLREDUCE #4 (Float[3])"), 2: last(84.0)}
    assert silent_rank(seen, 100.0, lambda _: 15.0) == (
        "rank 1 on n1 has sent no heartbeat for 20 s, last seen in ALLREDUCE #4 (Float[3])"
    )
    assert silent_rank(seen, 100.0, lambda _: 25.0) is None


def test_a_rank_that_has_left_does_not_count_as_silent() -> None:
    assert silent_rank({0: last(99.0), 1: last(10.0, left=True)}, 100.0, lambda _: 15.0) is None


def test_a_rank_that_lives_here_has_all_of_the_timeout_and_a_stopped_or_unseen_one_has_not() -> None:
    here = place_of_this_process(native=False)
    assert silence_limit(here, here.kernel, 60.0) == 60.0
    assert silence_limit(here, "another kernel", 60.0) == 60.0  # its beats may wait for Python
    assert silence_limit(replace(here, native=True), "another kernel", 60.0) == 15.0
    assert silence_limit(replace(here, started=here.started - 1), here.kernel, 60.0) == 6.0  # its PID went to another
    with subprocess.Popen(["sleep", "60"]) as process:
        text = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8")
        started = int(text.rpartition(")")[2].split()[19])
        assert is_scheduled(process.pid, started)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert not is_scheduled(process.pid, started)
        process.kill()
    assert not is_scheduled(process.pid, started)


def test_a_rank_that_is_stopped_and_continued_all_the_time_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process, ThreadPoolExecutor() as pool:
        started = read_stat(process.pid).started
        judged = pool.submit(lambda: [is_scheduled(process.pid, started) for _ in range(2)])
        while not judged.done():
            for number, seconds in ((signal.SIGSTOP, 0.3), (signal.SIGCONT, 0.03)):
                process.send_signal(number)
                time.sleep(seconds)
        process.kill()
    assert judged.result() == [True] * 2


def test_ranks_that_have_not_joined_a_collective_of_their_group_are_named() -> None:
    """Numbers of other groups do not count; one that is in another collective of the same number has not joined."""
    waits = PendingCollective("ALLREDUCE #5 of group a", 0.0, "a", 5, 55)
    seen = {
        0: last(0, "ALLREDUCE #5 of group a", a=(5, 55)),
        1: last(0, "BROADCAST #4 of group a", a=(4, 44)),
        2: last(0, "ALLREDUCE #51 of group b", a=(4, 44), b=(51, 1)),
        3: last(0, left=True, a=(4, 44)),
        4: last(0, "ALLREDUCE #9 of group a", a=(9, 99)),
        5: last(0, a=(5, 55)),
        6: last(0, "BARRIER #5 of group a", a=(5, 50)),
    }
    assert describe_absent(ranks_not_joined(seen, waits, range(8)), watcher=0) == (
        "not joined by rank 1 on n1 (in BROADCAST #4 of group a), rank 2 on n1 (in ALLREDUCE #51 of group b), "
        "rank 3 on n1 (has left), rank 6 on n1 (in BARRIER #5 of group a), rank 7 (no heartbeat yet)"
    )
    assert describe_absent(ranks_not_joined(seen, waits, (0, 4, 5)), watcher=0) == "all of its ranks have joined"
    assert describe_absent(ranks_not_joined(seen, waits, (0, 4, 7)), watcher=7) == "all of its ranks have joined"
    joins = {**seen, 1: last(0, "ALLREDUCE #5 of group a", a=(5, 56))}  # a rank that was in another one before
    assert ranks_not_joined(joins, waits, (0, 1)) == []
    assert departed_rank(seen, waits, range(8)) == "rank 3 on n1 (has left) never calls it"
    assert departed_rank(seen, waits, (0, 1, 4)) is None
    assert departed_rank(seen, PendingCollective("the destruction of group a"), range(8)) is None
    message = PendingCollective("RECV #1 of group a", peers=(3, 7))
    assert describe_peers(seen, message.peers) == "it waits for rank 3 on n1 (has left), rank 7 (no heartbeat yet)"
    assert departed_rank(seen, message, ()) is None
    assert departed_rank(seen, message._replace(peers=(3,)), ()) == "nobody is left to answer: rank 3 on n1 (has left)"
    many = {0: last(0, a=(5, 55)), **{i: last(0) for i in range(1, 20)}}
    found = describe_absent(ranks_not_joined(many, waits, range(20)), watcher=0)
    assert found.endswith("rank 5 on n1 (in no collective) and 14 more")


def nobody(_: str) -> tuple[int, ...]:
    return ()


def test_ranks_differ_where_their_collectives_up_to_the_same_number_do() -> None:
    same = {0: last(0, a=(5, 55), b=(2, 9)), 1: last(0, a=(6, 66), b=(2, 9)), 2: last(0, a=(5, 55))}
    assert differing_ranks(same, nobody) is None
    at_different_moments = {0: last(0, a=(70, 1, 64, 5)), 1: last(0, a=(90, 2, 64, 5)), 2: last(0, a=(64, 5))}
    assert differing_ranks(at_different_moments, nobody) is None
    found = differing_ranks({**at_different_moments, 3: last(0, a=(100, 3, 64, 6))}, nobody)
    assert found is not None and found.startswith("the ranks of group a differ at its collective #64 or before: rank")
    of_two_worlds = {0: last(0, **{"1@5e": (64, 5)}), 1: last(0, **{"1@a7": (64, 6)})}
    assert differing_ranks(of_two_worlds, nobody) is None
    found = differing_ranks({**of_two_worlds, 2: last(0, **{"1@a7": (64, 5)})}, nobody)
    assert found is not None and found.startswith("the ranks of group 1 differ at its collective #64 or before: rank 2")
    found = differing_ranks({**same, 3: last(0, "BARRIER #2 of group b", b=(2, 8))}, nobody)
    assert found is not None and found.startswith(
        "the ranks of group b differ at its collective #2 or before: rank 3 on n1 (in BARRIER #2 of group b), rank"
    )


def test_ranks_differ_where_one_sends_in_an_all_to_all_what_another_does_not_expect() -> None:
    """Where all of a group have been heard of: what some of them exchange need not add up to 0."""
    seen = {0: last(0, a=(5, 1), balance=7), 1: last(0, a=(5, 1), balance=2**64 - 9), 2: last(0, a=(5, 1), balance=2)}
    assert differing_ranks(seen, lambda _: range(3)) is None
    assert differing_ranks({**seen, 2: last(0, a=(6, 2), balance=3)}, lambda _: range(3)) is None
    found = differing_ranks({**seen, 2: last(0, a=(5, 1), balance=3)}, lambda _: range(3))
    assert found is not None and found.startswith("the ranks of group a differ at its collective #5 or before: rank 0")
    assert "each rank must send in an all_to_all what the other expects" in found
    assert differing_ranks({**seen, 2: last(0, a=(5, 1), balance=3)}, lambda _: range(4)) is None


@given(st.integers(1, 2000))
def test_every_rank_is_watched_by_a_few_others_of_all_hosts(count: int) -> None:
    ranks = range(count)
    for rank in (0, count // 2, count - 1):
        watched = watched_ranks(ranks, rank)
        assert rank in watched and 0 in watched and min(count, 8) <= len(watched) <= 17
        assert all(rank in watched_ranks(ranks, other) for other in watched if other or (not rank % 16 and count <= 16))


def said_at_a_timeout(watched: tuple[int, ...], pending: PendingCollective) -> set[str]:
    """What a watchdog of these ranks says of a collective of ranks 0, 1 and 2 that is about to time out."""
    keys, texts, asked = SignedKeys(HashStore(), "token"), list[str](), threading.Semaphore(0)

    def members(_: str) -> tuple[int, ...]:
        asked.release()
        return (0, 1, 2)

    backend = WatchedBackend(
        pending=lambda: pending, members=members, set_absent_ranks=lambda _, text: texts.append(text)
    )
    sender = HeartbeatThread(keys, 0, place_of_this_process(native=False), lambda: pending)
    watchdog = Watchdog(keys, ranks=watched, rank=0, timeout_s=60.0, sender=sender, backend=backend)
    assert all(asked.acquire(timeout=60) for _ in range(4)), "two checks, each before and after it tells the backend"
    watchdog.stop()
    return set(texts)


@pytest.mark.slow
def test_who_is_absent_is_said_of_groups_all_of_whose_ranks_are_watched() -> None:
    """No heartbeats of others come here: a gloo world has a watchdog for each of its groups."""
    pending = PendingCollective("ALLREDUCE #5 of group b", group="b@1", number=5)
    assert said_at_a_timeout((0, 1), pending) == set()
    assert said_at_a_timeout((0, 1, 2), pending) == {
        "not joined by rank 1 (no heartbeat yet), rank 2 (no heartbeat yet)"
    }


def test_a_backend_that_never_returns_does_not_keep_its_rank_alive() -> None:
    """Neither from a collective that is overdue nor from failing it."""
    assert ran(STUCK, limit_s=60) == Ended(
        status=1,
        out="",
        err="cputrain: rank 0 waits in ALLREDUCE #3: it timed out 12 s ago, and the backend does not return\n",
    )


def test_a_heartbeat_of_another_version_ends_no_rank_and_is_said_once() -> None:
    done = ran(OTHER_VERSION)
    assert done.status == 0 and done.err == (
        "cputrain: cannot parse the heartbeats of rank 1, rank 2, so these ranks are not watched: "
        "install the same version of cputrain on all hosts\n"
    )


@pytest.mark.long
def test_a_rank_that_leaves_has_more_time_after_the_end_of_the_store_than_one_that_waits_for_a_collective() -> None:
    names = ("ALLREDUCE #3", "the destruction of group 0")
    with ExitStack() as stack:
        processes = [stack.enter_context(forked("-c", GONE, name)) for name in names]
        waits, leaves = (ended(process, 60) for process in processes)
    assert (waits.status, leaves.status) == (1, 1)
    assert float(leaves.out) > max(6.0, float(waits.out) + 2.0)
    assert "rank 1 waits in ALLREDUCE #3: the job's store is gone" in waits.err


@needs_ccl
def test_the_ccl_backend_s_heartbeats_go_on_while_a_call_keeps_python() -> None:
    done = ran(KEPT)
    assert done.status == 0, done.err
    said = json.loads(done.out)
    assert said.pop("counted") > 5
    assert said == {"guessed": None, "forged": None}  # as store.py signs and reads


@needs_ccl
@pytest.mark.slow
def test_a_rank_that_computes_or_goes_on_does_not_wait_in_what_is_in_flight() -> None:
    with started("-c", IN_FLIGHT) as ranks:
        ends = [ended(rank) for rank in ranks]
    assert [end.status for end in ends] == [0, 0], ends
    said = json.loads(ends[0].out)
    assert said["computes"] < 0.5 and said["goes on"] < 0.5 and said["has waited"] == 0.0, said
    assert said["waits for a future"] > 0.5 and said["waits in a call"] > 0.5, said


@pytest.mark.long
def test_a_rank_lost_at_the_end_of_a_gloo_job_ends_the_other() -> None:
    """Three jobs at once, as all mostly wait: rank 0 stops, rank 1 stops, rank 1 is killed."""
    cases = {
        (0, "SIGSTOP"): ("cputrain: rank 1 waits in gloo's collective", "the job's store"),
        (1, "SIGSTOP"): ("cputrain: rank 0 waits in gloo's collective", "rank 1 on"),
        (1, "SIGKILL"): ("rank 0 lost a peer", "see the rank that ended first"),
    }
    with ExitStack() as stack:
        jobs = [stack.enter_context(started("-c", AT_THE_END, LOST=str(lost), BY=by)) for lost, by in cases]
        ends = [ended(job[1 - lost], 90) for job, (lost, _) in zip(jobs, cases, strict=True)]
    for expected, end in zip(cases.values(), ends, strict=True):
        assert end.status == 1 and all(part in end.err for part in expected), end
