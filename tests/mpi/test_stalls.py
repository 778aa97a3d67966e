"""Which rank keeps the others waiting: judged from collectives, stacks and CPU time, and found in real jobs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _cputrain_autoload import STACK_VARIABLE
from cputrain.mpi.supervise import activity, processes, ranks
from cputrain.mpi.supervise.activity import ActivityMeter, process_tree
from cputrain.mpi.supervise.processes import (
    ITS_DATA_THREAD,
    JobFailedError,
    RankExit,
    WatchedFiles,
    frames,
    read_stacks,
)
from cputrain.mpi.supervise.signals import RunningClock
from cputrain.mpi.supervise.stalls import (
    STARTING_S,
    WAITING_S,
    WITHOUT_STACK_S,
    RankState,
    Stall,
    StallWatch,
    describe_failure,
    describe_stall,
    find_absent_ranks,
    idle_ranks,
    ranks_outside,
    stopped_rank,
)
from cputrain.mpi.supervise.wire import Activity
from tests.support.commands import HANGS_S, mpi_path, needs_two_cores

IDLE, BUSY, STOPPED = Activity(idle_s=9.0), Activity(busy_s=9.0), Activity(stopped_s=11.0, idle_s=9.0)
WORKING = Activity(busy_s=1.0)  # a moment ago it waited for something
SAYS_WHETHER_IT_CATCHES = (
    "from cputrain.affinity.filesystem import handles_signal; print(handles_signal(os.getpid(), STACK_SIGNAL))"
)


def exited(rank: int, status: int, at: float = 0.0) -> RankExit:
    return RankExit(rank=rank, host="h1", status=status, time=at, log="l", tail=())


def rank_states(*doing: Activity | RankExit) -> tuple[RankState, ...]:
    return tuple(
        RankState(rank=rank, host="h1", exit=one)
        if isinstance(one, RankExit)
        else RankState(rank=rank, host="h1", activity=one)
        for rank, one in enumerate(doing)
    )


@pytest.mark.parametrize(
    ("doing", "awaited"),
    [
        ((IDLE, BUSY), (1,)),
        ((IDLE, IDLE, BUSY, IDLE), (2,)),
        ((IDLE, exited(1, 0)), (1,)),
        ((IDLE, WORKING), ()),
        ((IDLE, WORKING, BUSY, IDLE), ()),
        ((IDLE, BUSY, BUSY), ()),  # most of them compute: the idle one is another matter
        ((IDLE, IDLE), ()),
        ((BUSY, BUSY), ()),
        ((BUSY, exited(1, 0)), ()),  # rank 0 finishes its work alone
        ((IDLE, BUSY, exited(2, 0)), (1,)),
        ((IDLE, exited(1, 0), exited(2, 0)), ()),  # all but one have ended: so does the job
    ],
)
def test_without_collectives_and_stacks_the_few_that_are_not_idle_are_named(
    doing: tuple[Activity | RankExit, ...], awaited: tuple
) -> None:
    found = idle_ranks(rank_states(*doing), {})
    assert (tuple(one.rank for one in found.awaited) if found else ()) == awaited
    assert found is None or not found.proven


def at(number: int, *, waited_s: float = 0.0, group: str = "0", busy_s: float = 0.0, idle_s: float = 0.0) -> Activity:
    """A rank that has called so many collectives of a group, and may wait in the last one."""
    waits = {"collective": f"ALLREDUCE #{number}", "waited_s": waited_s, "number": number} if waited_s else {}
    return Activity(busy_s=busy_s, idle_s=idle_s, group=group if waits else "", calls=((group, number),), **waits)


POLLS = at(21, waited_s=9.0, busy_s=9.0)  # as oneCCL and MPI do


@pytest.mark.parametrize(
    ("doing", "awaited"),
    [
        ((POLLS, at(20, idle_s=9.0)), (1,)),  # blocked: before, the one that polls was blamed
        ((at(20, idle_s=9.0), POLLS, POLLS, POLLS), (0,)),
        ((POLLS, at(20, busy_s=9.0)), (1,)),
        ((POLLS, at(20)), (1,)),  # in swap, or slow: neither idle nor busy
        ((POLLS, at(20, idle_s=9.0), at(20, idle_s=9.0), at(20, busy_s=9.0)), (1, 2, 3)),
        ((POLLS, exited(1, 0)), ()),  # its collectives are unknown
        ((POLLS, POLLS), ()),  # all are there: a large message
        ((at(21, waited_s=3.0, busy_s=9.0), at(20, idle_s=3.0)), ()),  # not yet
        ((POLLS, at(7, group="1", idle_s=9.0)), ()),  # of another group
        # Rank 0 waits for rank 1, which waits in another group for rank 2.
        (
            (
                POLLS,
                Activity(collective="B #5", waited_s=9.0, group="1", number=5, calls=(("0", 20), ("1", 5))),
                at(4, group="1", idle_s=9.0),
            ),
            (2,),
        ),
        ((POLLS, Activity(collective="RECV #3", waited_s=9.0, calls=(("0", 20),)), at(20, idle_s=9.0)), (2,)),
        ((POLLS, Activity(collective="RECV #3", waited_s=9.0, calls=(("0", 20),)), POLLS), (1,)),  # the message is lost
    ],
)
def test_ranks_that_have_not_called_a_collective_are_named(
    doing: tuple[Activity | RankExit, ...], awaited: tuple
) -> None:
    found = find_absent_ranks(rank_states(*doing))
    assert (tuple(one.rank for one in found.awaited) if found else ()) == awaited


C10D = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3002 in all_reduce"
DDP = "/v/lib/python3.11/site-packages/torch/autograd/graph.py:865 in _engine_run_backward"
READS, SAVES = "/a/data.py:7 in __getitem__", "/v/site-packages/torch/distributed/checkpoint/filesystem.py:9 in _write"
STARTS = "/v/lib/python3.11/site-packages/torch/distributed/rendezvous.py:200 in _create_c10d_store"
HANDLE = "/a/train.py:30 in step, in wait()"
NEW_DDP = "/v/lib/python3.11/site-packages/torch/distributed/utils.py:286 in _verify_param_shape_across_processes"
MOVES = "/v/lib/python3.11/site-packages/torch/distributed/utils.py:90 in _to_kwargs"


@pytest.mark.parametrize(
    ("doing", "stacks", "awaited"),
    [
        ((IDLE, IDLE), (C10D, READS), (1,)),
        ((IDLE, IDLE), (READS, C10D), (0,)),
        ((IDLE, IDLE), (STARTS, READS), (1,)),
        ((IDLE, IDLE), (DDP, READS), (1,)),
        ((IDLE, BUSY), (DDP, DDP), (1,)),  # computes in its backward pass
        ((IDLE, IDLE), (HANDLE, READS), (1,)),
        ((IDLE, IDLE), (NEW_DDP, READS), (1,)),
        ((IDLE, IDLE), (MOVES, READS), ()),
        ((IDLE, IDLE), (C10D, SAVES), (1,)),  # writes a checkpoint
        ((IDLE, IDLE, IDLE, IDLE), (C10D, READS, READS, READS), (1, 2, 3)),  # one server, three ranks
        ((IDLE, BUSY, BUSY), (C10D, READS, READS), ()),  # the first one is early
        ((IDLE, IDLE), (C10D, C10D), ()),
        ((IDLE, IDLE), (READS, SAVES), ()),
        ((WORKING, IDLE), (C10D, READS), ()),  # rank 0 has just arrived
        ((IDLE, IDLE, IDLE), (C10D, READS, processes.NO_ANSWER), (1,)),
        ((IDLE, IDLE), (C10D, processes.NO_ANSWER), (1,)),  # such as one in a call to a dead file server
        ((IDLE, IDLE), (C10D, ""), (1,)),
        ((IDLE, exited(1, 0)), (C10D, ""), (1,)),
    ],
)
def test_ranks_whose_stacks_are_in_no_collective_are_named(
    doing: tuple[Activity | RankExit, ...], stacks: tuple[str, ...], awaited: tuple
) -> None:
    found = ranks_outside(rank_states(*doing), {rank: (line,) if line else () for rank, line in enumerate(stacks)})
    assert (tuple(one.rank for one in found.awaited) if found else ()) == awaited


def test_a_functional_collective_is_found_below_torch_s_operators() -> None:
    torch = "/v/lib/python3.11/site-packages/torch"
    operators = (f"{torch}/_ops.py:882 in redispatch", f"{torch}/_library/autograd.py:41 in forward_no_grad")
    waits = f"{torch}/distributed/_functional_collectives.py:142 in wait_tensor"
    for below in (waits, "/a/train.py:3 in step"):
        found = ranks_outside(
            rank_states(IDLE, IDLE), {0: (*operators, f"{torch}/_ops.py:9 in __call__", below), 1: (READS,)}
        )
        assert (found is not None and [one.rank for one in found.awaited] == [1]) == (below == waits)


def test_a_rank_that_sends_no_heartbeats_does_not_wait_in_the_last_one_s_collective() -> None:
    """One that was frozen within a collective, which its last heartbeat has just begun to wait in, or that has left."""
    file = os.memfd_create("state")
    beat = {"waits_in": "ALLREDUCE #21", "group": "0", "number": 21, "waited_s": 0.3, "groups": {"0": [[21, 5, 0]]}}
    meter = ActivityMeter(os.getpid(), 0.0, file)
    for second in range(1, 20):
        if second < 4:
            os.pwrite(file, f"{json.dumps({'count': second, **beat})}\n".encode(), 0)
        meter.read(float(second))
        assert (meter.activity.waited_s, meter.activity.calls) == (0.3 if second < 10 else 0.0, (("0", 21),))
    os.close(file)
    frozen = at(21, waited_s=meter.activity.waited_s, idle_s=9.0)
    said = StallWatch().take(rank_states(POLLS, frozen), 40.0, lambda _: {0: (C10D,), 1: (processes.NO_ANSWER,)})
    assert said is not None and said.startswith("rank 0 has waited 9 s for rank 1 on h1, which is blocked")


def test_a_stall_is_said_with_what_is_known_of_it() -> None:
    """By collectives, without a stack of the waiting rank; by stacks; by neither."""
    said = StallWatch().take(rank_states(POLLS, at(20, idle_s=9.0)), 40.0, lambda ranks: dict.fromkeys(ranks, (READS,)))
    assert said == f"rank 0 has waited 9 s for rank 1 on h1, which is blocked (rank 1 is at {READS})"
    said = StallWatch().take(rank_states(IDLE, IDLE), 40.0, lambda _: {0: (C10D,), 1: (READS,)})
    assert said == f"rank 0 has waited 9 s for rank 1 on h1, which is blocked (rank 1 is at {READS})"
    three = rank_states(IDLE, BUSY, IDLE, IDLE)
    said = StallWatch().take(three, 40.0, lambda _: {0: (C10D,), 1: (READS,), 2: (READS,), 3: (C10D,)})
    assert said is not None
    assert said.startswith("rank 0, rank 3 have waited 9 s for rank 1 on h1 (computes), rank 2 on h1 (is blocked) (")
    said = StallWatch().take(rank_states(IDLE, IDLE), 40.0, lambda _: {0: (READS,), 1: (SAVES,)})
    assert said == (
        "rank 0, rank 1 have been idle for 9 s, at different lines of code "
        f"(rank 0 is at {READS}, rank 1 is at {SAVES})"
    )
    assert StallWatch().take(rank_states(IDLE, IDLE), 40.0, lambda _: {0: (READS,), 1: (READS,)}) is None


def test_a_stopped_rank_is_named_unless_the_whole_job_is_suspended() -> None:
    found = stopped_rank(rank_states(IDLE, STOPPED, BUSY))
    assert found is not None and found.rank == 1
    assert stopped_rank(rank_states(STOPPED, STOPPED)) is None
    assert stopped_rank(rank_states(STOPPED, STOPPED, exited(2, 0))) is None
    assert stopped_rank(rank_states(IDLE, Activity(stopped_s=7.0))) is None


def test_a_failure_names_the_rank_that_was_waited_for() -> None:
    now, gave_up = rank_states(exited(0, 1, 30.0), BUSY), exited(0, 1, 30.0)
    before = rank_states(IDLE, BUSY)
    stall = Stall(waiting=before[:1], awaited=before[1:], rank_states=before)
    told = describe_failure(gave_up, now, stall, {1: ("train.py:3 in forever",)})
    assert told.splitlines() == [
        "rank 0 has waited 9 s for rank 1 on h1, which computes",
        "  Python stack of rank 1, innermost first:",
        "  | train.py:3 in forever",
        "then rank 0 on h1 exited with status 1; log l; it printed nothing",
    ]
    aborted = exited(0, -6, 30.0)  # as gloo's threads do when a timeout passes while the process exits
    told = describe_failure(aborted, rank_states(aborted, BUSY), stall, {1: ("train.py:3 in forever",)})
    assert (
        told.startswith("rank 0 has waited 9 s for rank 1 on h1") and "\nthen rank 0 on h1 was ended by SIGABRT" in told
    )
    own = exited(1, 1, 30.0)
    assert describe_failure(own, rank_states(IDLE, own), stall, {}).startswith("rank 1 on h1 exited with status 1")
    found = describe_failure(gave_up, rank_states(gave_up, STOPPED), None, {})
    assert found.startswith("rank 1 on h1 has been stopped for 11 s: find the sender of its SIGSTOP\nthen rank 0 on h1")
    killed = exited(0, -9, 30.0)
    assert describe_failure(killed, rank_states(killed, BUSY), stall, {}).startswith(
        "rank 0 on h1 was ended by SIGKILL"
    )


def test_a_failure_names_the_rank_that_had_just_left() -> None:
    failed = exited(0, 1, 30.0)
    told = describe_failure(failed, rank_states(failed, exited(1, 0, 29.0)), None, {})
    assert told.startswith("rank 1 on h1 exited with status 0 while 1 other still ran; then rank 0 on h1 exited with ")
    told = describe_failure(failed, rank_states(failed, exited(1, 0, 30.4)), None, {})
    assert told.startswith("rank 1 on h1 exited with status 0, and at the same time rank 0 on h1 exited with ")
    # Long ago; later; nearly all of them.
    for others in ((exited(1, 0, 5.0),), (exited(1, 0, 31.0),), (exited(1, 0, 29.0), exited(2, 0, 29.0))):
        assert describe_failure(failed, rank_states(failed, *others), None, {}).startswith("rank 0 on h1 exited with")


def test_a_stall_is_said_once_and_the_next_one_later() -> None:
    watch, stalled = StallWatch(), rank_states(IDLE, BUSY)
    stack = ("/usr/lib/python3.11/selectors.py:415 in select", "/a/lib/python3.11/site-packages/b.py:7 in c")
    shown = {0: ("/a/b.py:9 in wait",), 1: stack}
    assert watch.take(stalled, 1.0, lambda _: shown) == (
        "rank 0 has been idle for 9 s, and rank 1 on h1 computes or polls "
        "(rank 0 is at /a/b.py:9 in wait, rank 1 is at /a/lib/python3.11/site-packages/b.py:7 in c)"
    )
    assert watch.take(stalled, 3.0, lambda _: shown) is None
    assert watch.take(rank_states(WORKING, BUSY), 5.0, lambda _: shown) is None
    last = Stall(waiting=stalled[:1], awaited=stalled[1:], rank_states=stalled, proven=False)
    assert watch.before(12.0) == last and watch.before(20.0) is None
    assert watch.take(stalled, 30.0, lambda _: shown) is None, "it has to last twice as long"
    longer = rank_states(Activity(idle_s=2 * WAITING_S), Activity(busy_s=2 * WAITING_S))
    assert watch.take(longer, 38.0, lambda _: shown) is not None


def test_stacks_that_prove_a_stall_need_not_be_asked_for_again() -> None:
    """A request may interrupt the call in C that a rank is blocked in: then the next stack proves nothing."""
    blocked = rank_states(Activity(idle_s=5.0), Activity(idle_s=9.0), Activity(idle_s=7.0))
    told = StallWatch().take(blocked, 40.0, lambda _: {0: (C10D,), 1: (READS,), 2: (C10D,)})
    assert told is not None and told.startswith("rank 0, rank 2 have waited 5 s for rank 1 on h1, which is blocked (")


IMPORTS = ("/a/torch/_ops.py:9 in load", "<frozen importlib._bootstrap>:241 in _call_with_frames_removed")
COMPILES = ("/usr/lib/python3.11/subprocess.py:550 in run", "/a/kernels/build.py:128 in _compile")


@pytest.mark.parametrize("stack", [IMPORTS, COMPILES], ids=["imports", "compiles"])
def test_a_slow_start_is_no_stall_for_some_minutes(stack: tuple[str, ...]) -> None:
    starting = ("/kernels/build.py:",)
    watch, stalled, loop = StallWatch(starting), rank_states(IDLE, BUSY), ("/a/train.py:3 in forever",)
    assert watch.take(stalled, 1.0, lambda _: {0: (C10D,), 1: stack}) is None
    assert watch.take(stalled, 3.0, lambda _: {0: (C10D,), 1: loop}) is not None, "the start is over"
    watch = StallWatch(starting)
    assert watch.take(stalled, 1.0, lambda _: {0: (C10D,), 1: stack}) is None
    assert watch.take(stalled, STARTING_S, lambda _: {0: (C10D,), 1: stack}) is None
    assert watch.take(stalled, STARTING_S + 1.0, lambda _: {0: (C10D,), 1: stack}) is not None
    assert StallWatch().take(rank_states(IDLE, exited(1, 0)), 1.0, lambda _: {0: (C10D,)}) is not None, "it has left"


def said_and_asked(stack: tuple[str, ...]) -> tuple[int, int]:
    """The second in which a stall is told that lasts from a job's first one, and how often stacks were asked for."""
    watch, stalled, asked = StallWatch(), rank_states(IDLE, BUSY), []

    def stacks(ranks: Sequence[int]) -> dict[int, tuple[str, ...]]:
        asked.append(ranks)
        return {0: (C10D,), 1: stack}

    told = next(second for second in range(1, 1000) if watch.take(stalled, float(second), stacks))
    return told, len(asked)


def test_a_program_without_python_is_told_of_after_its_first_half_minute() -> None:
    told, asked = said_and_asked(())
    assert WITHOUT_STACK_S < told < 2 * WITHOUT_STACK_S and asked < 8
    told, asked = said_and_asked(IMPORTS)
    assert told == STARTING_S + 1 and asked < 10, "stacks that import are asked for ever less often"


@pytest.mark.parametrize("computing_s", [20, 40, 100, 400])
def test_ranks_that_wait_later_than_another_is_blocked_are_told_of_in_time(computing_s: int) -> None:
    """At first nothing proves that anyone waits for the blocked rank, and stacks are asked for ever less often."""
    watch, asked = StallWatch(), []

    def stacks(_: Sequence[int]) -> dict[int, tuple[str, ...]]:
        asked.append(second)
        place = (C10D,) if second >= computing_s else ("/a/train.py:3 in step",)
        return {0: place, 1: (READS,), 2: place}

    for second in range(1, computing_s + 60):
        late = Activity(busy_s=second) if second < computing_s else Activity(idle_s=second - computing_s)
        if watch.take(rank_states(late, Activity(idle_s=second), late), float(second), stacks):
            break
    assert second - computing_s <= WAITING_S + 2 and len(asked) < 15


@pytest.mark.parametrize("doing", [(IDLE, BUSY, BUSY), (IDLE, IDLE, IDLE)], ids=["coordinator", "servers"])
def test_stacks_of_a_job_with_idle_ranks_are_asked_for_once_a_minute_at_most(doing: tuple[Activity, ...]) -> None:
    watch, asked = StallWatch(), []

    def stacks(ranks: Sequence[int]) -> dict[int, tuple[str, ...]]:
        asked.append(ranks)
        return dict.fromkeys(ranks, (READS,))

    assert not any(watch.take(rank_states(*doing), float(second), stacks) for second in range(1, 3600))
    assert len(asked) < 70


def test_a_rank_that_others_await_since_it_was_stopped_is_told_of_as_stopped() -> None:
    for stopped_s, told in (
        (6.0, nullcontext()),
        (8.0, pytest.raises(JobFailedError, match="rank 1 on h1 has been stopped")),
    ):
        awaited = rank_states(IDLE, Activity(idle_s=stopped_s, stopped_s=stopped_s))
        with told:
            StallWatch().check(awaited, 40.0, lambda _: {0: (C10D,)})
        assert StallWatch().take(awaited, 40.0, lambda _: {0: (C10D,)}) is None


@given(st.lists(st.floats(0.01, 60.0), max_size=50))
def test_pauses_of_the_process_do_not_count(steps: list[float]) -> None:
    """Between two looks at the clock that are more than five seconds apart, the process did not run."""
    at = [100.0]
    clock = RunningClock(lambda: at[0])
    start, ran = clock.now(), 0.0
    for step in steps:
        at[0] += step
        ran += step if step <= 5.0 else 0.0
        assert clock.now() - start == pytest.approx(ran)


CHILD = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {!r}]); p.wait()"
LOOPS = "print(flush=True)\nwhile True: pass"
STOPS = "import os; print(flush=True); os.kill(os.getpid(), 19)"
WAITS = "import time; print(flush=True); time.sleep(60)"


def test_the_kernel_tells_what_a_rank_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five programs, each followed from its first line on: whether it is busy, idle, stopped."""
    programs = {
        LOOPS: (True, False, False),
        CHILD.format(LOOPS): (True, False, False),
        WAITS: (False, True, False),
        STOPS: (False, True, True),
        CHILD.format(STOPS): (False, True, True),
    }
    monkeypatch.setattr(activity, "READ_S", 0.7)
    with ExitStack() as stack:
        argvs = [(sys.executable, "-c", code) for code in programs]
        started = [stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE)) for argv in argvs]
        for process in started:
            stack.callback(process.kill)
            process.stdout.readline()
        meters = [ActivityMeter(process.pid, time.monotonic()) for process in started]
        busy = [False] * len(meters)  # in any interval: a busy host may take the CPUs away in the last
        for _ in range(3):
            time.sleep(activity.READ_S)
            for number, meter in enumerate(meters):
                meter.read(time.monotonic())
                busy[number] |= meter.activity.busy_s > 0
        found = [meter.activity for meter in meters]
        children = [pid for process in started for pid in process_tree(process.pid)[1:]]
        stack.callback(lambda: [os.kill(pid, signal.SIGKILL) for pid in children])
    seen = [(some, one.idle_s > 0, one.stopped_s > 0) for some, one in zip(busy, found, strict=True)]
    assert seen == [*programs.values()]


@pytest.mark.parametrize(
    ("cores", "idle_s", "busy_s"),
    [
        ((0.1, 0.1, 0.1, 0.1, 0.1), 4.0, 0.0),
        ((0.0, 0.1, 0.1, 0.3, 0.0), 4.0, 0.0),  # some work on a crowded host for a second
        ((0.0, 0.1, 0.1, 0.3, 0.3), 0.0, 0.0),
        ((0.0, 0.0, 0.0, 0.0, 0.9), 0.0, 1.0),
        ((0.9, 0.9, 0.9, 0.9, 0.0), 0.0, 0.0),  # what its threads did before is unknown
        ((0.9, 0.9, 0.9, 0.0, 0.0), 1.0, 0.0),
    ],
)
def test_a_rank_is_idle_while_it_needs_little_of_a_core(
    cores: tuple[float, ...], idle_s: float, busy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = [activity.ProcessTime(cpu_s=sum(cores[:second]), threads={}, stopped=False) for second in range(6)]
    read = iter(used)
    monkeypatch.setattr(activity, "read_process", lambda _: next(read))
    monkeypatch.setattr(activity, "read_tree", lambda _: used[second])
    meter = ActivityMeter(1, 0.0)
    for second in range(1, 6):
        meter.read(float(second))
    assert (meter.activity.idle_s, meter.activity.busy_s) == (idle_s, busy_s)


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_process_that_ends_while_it_is_read_is_no_error(all_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its folder is gone once it is opened: an agent would end its rank."""
    found = activity.read_stat(os.getpid())
    monkeypatch.setattr(activity, "read_stat", lambda _: found)

    def gone(path: Path, *_: object, **__: object) -> str:
        raise ProcessLookupError(path)

    for name in ("iterdir", "glob", "read_text"):
        monkeypatch.setattr(Path, name, gone)
    read = activity.read_process(os.getpid(), all_threads=all_threads)
    assert read == activity.ProcessTime(cpu_s=found.cpu_s, threads={}, stopped=False)
    assert processes.data_thread(os.getpid()) is None


CROWDED = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def loop():
    print(flush=True)
    while True: pass
thread = threading.Thread(target=loop)
thread.start()
thread.join()
"""


def test_a_thread_that_waits_for_a_core_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight on one core, in each of which the main thread sleeps."""
    monkeypatch.setattr(activity, "READ_S", 0.7)
    with ExitStack() as stack:
        started = [subprocess.Popen([sys.executable, "-c", CROWDED], stdout=subprocess.PIPE) for _ in range(8)]
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)
            process.stdout.readline()
        meter = ActivityMeter(started[0].pid, time.monotonic())
        idle_s = []
        for _ in range(4):
            time.sleep(activity.READ_S)
            meter.read(time.monotonic())
            idle_s.append(meter.activity.idle_s)
    assert idle_s == [0.0] * 4


SHOWING = """
import os, sys
from _cputrain_autoload import offer_stack
if "offer" in sys.argv:
    offer_stack(os.environ)
def forever():
    print(flush=True)
    sum(x for x in iter(int, 1))  # in C and Python by turns
forever()
"""


@pytest.mark.parametrize("words", [("offer",), ()])
def test_the_stack_of_a_rank_that_offers_it_is_read_while_it_computes(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STACK_ANSWER_S", HANGS_S)
    files = WatchedFiles.create()
    argv = [sys.executable, "-c", SHOWING, *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env={**os.environ, **files.variables}, pass_fds=(files.stack,), stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stacks = [stack for _ in range(2) for stack in read_stacks([([process.pid], files)])]
        assert process.poll() is None, "one that offers none does not get the signal, which would end it"
        process.kill()
    files.close()
    for stack in stacks:
        assert [frame.rpartition(" ")[2] for frame in stack][-2:] == (["forever", "<module>"] if words else [])


READING = """
import ctypes, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from _cputrain_autoload import offer_stack
from cputrain.affinity.binding import DATA_THREAD, name_thread
offer_stack(os.environ)
def read():
    print(flush=True)
    # Keeps the interpreter's lock, and is continued after a signal.
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
pool = ThreadPoolExecutor(1, initializer=name_thread, initargs=(DATA_THREAD,))
pool.submit(print, end="").result()
pool.submit(read if sys.argv[1] == "busy" else lambda: print(flush=True)).result()
time.sleep(600)
"""


AT_WORK = "its data thread at <string>:10 in read"


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_a_data_thread_at_work_is_in_the_stack(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STACK_ANSWER_S", HANGS_S)
    files = WatchedFiles.create()
    argv = [sys.executable, "-c", READING, state]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env={**os.environ, **files.variables}, pass_fds=(files.stack,), stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (stack,) = read_stacks([([process.pid], files)])
        process.kill()
    files.close()
    assert [line for line in stack if line.startswith(ITS_DATA_THREAD)] == ([AT_WORK] if state == "busy" else [])
    assert "<module>" in " ".join(stack)
    awaited = rank_states(at(21, waited_s=9.0), at(20, idle_s=9.0))
    line = describe_stall(Stall(waiting=awaited[:1], awaited=awaited[1:], rank_states=awaited), {1: stack})
    assert line.endswith(f", {AT_WORK})") == (state == "busy")


def test_the_stack_of_a_rank_that_runs_rarely_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs for a fraction of a millisecond at a time, and writes for longer; its data thread is asked after that."""
    monkeypatch.setattr(processes, "STACK_ANSWER_S", HANGS_S)
    files = WatchedFiles.create()
    deep = "def deep(n): return deep(n - 1) if n else pool.submit(read).result()\ndeep(40)\n"
    argv, pipe = [sys.executable, "-c", READING.partition("pool.submit(read")[0] + deep], subprocess.PIPE
    with subprocess.Popen(argv, env={**os.environ, **files.variables}, pass_fds=(files.stack,), stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(lambda: [read_stacks([([process.pid], files)])[0] for _ in range(3)])
            while not reading.done():
                process.send_signal(signal.SIGCONT)
                time.sleep(0.0001)
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.05)
        process.kill()
    files.close()
    for stack in reading.result():
        assert len(stack) == processes.MAX_FRAMES + 1 and stack[-2:] == ("<string>:13 in deep", AT_WORK)


def test_a_rank_that_does_not_answer_in_time_is_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it has worked since."""
    answers = iter([[("train.py:3 in forever",)], [(processes.NO_ANSWER,)], [(processes.NO_ANSWER,)]])
    monkeypatch.setattr(ranks, "read_stacks", lambda _: next(answers))
    with (tmp_path / "out").open("w") as out:
        supervisor = ranks.RankSupervisor(tmp_path / "logs", out, out)
        try:
            supervisor.start(0, ("sleep", "60"), os.environ, label="")
            assert [supervisor.stacks([0]) for _ in range(2)] == [{0: ("train.py:3 in forever",)}] * 2
            supervisor.ranks[0].stacked_at -= 60.0
            assert supervisor.stacks([0]) == {0: (processes.NO_ANSWER,)}
        finally:
            supervisor.stop(0.1)
            supervisor.close()


def test_no_stack_is_offered_into_another_file(tmp_path: Path) -> None:
    with (tmp_path / "mine").open("w") as file:
        code = "import os; from _cputrain_autoload import STACK_SIGNAL, offer_stack; offer_stack(os.environ); "
        argv = [sys.executable, "-c", code + SAYS_WHETHER_IT_CATCHES]
        for number in (str(file.fileno()), "977", "x", ""):
            env = {**os.environ, STACK_VARIABLE: number}
            done = subprocess.run(argv, env=env, pass_fds=(file.fileno(),), capture_output=True, text=True)
            assert done.stdout == "False\n", done.stderr


def test_a_program_that_imports_torch_offers_its_stack() -> None:
    files = WatchedFiles.create()
    code = "import torch, os; from _cputrain_autoload import STACK_SIGNAL; " + SAYS_WHETHER_IT_CATCHES
    env = {**os.environ, **files.variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, pass_fds=(files.stack,), capture_output=True, text=True
    )
    files.close()
    assert done.stdout == "True\n", done.stderr


def test_frames_are_taken_from_faulthandler_s_text() -> None:
    text = 'Stack (most recent call first):\n  File "/a b.py", line 5 in f\n  File "<string>", line 6 in <module>\n'
    assert frames(text) == ("/a b.py:5 in f", "<string>:6 in <module>")


# Ends once the test has seen that rank 0 waits.
GIVES_UP = """
given_s = time.monotonic() + 240
while not os.path.exists(sys.argv[1]) and time.monotonic() < given_s:
    time.sleep(0.2)
sys.exit("gave up")
"""
LOOP = (
    """
import os, sys, time
from _cputrain_autoload import offer_stack
offer_stack(os.environ)  # as `import torch` does
def forever():
    while True: pass
if os.environ["RANK"] == "1":
    forever()
"""
    + GIVES_UP
)
EARLY = (
    """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit()
"""
    + GIVES_UP
)
STOP = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(300)"


def errors_of(job: subprocess.Popen[str], told: Path) -> str:
    """All of a job's stderr; its rank 0 gives up once a stall has been told."""
    lines = [""]
    while " has been idle " not in lines[-1] and (line := job.stderr.readline()):
        lines.append(line)
    told.touch()
    lines.append(job.stderr.read())
    job.wait(HANGS_S)
    return "".join(lines)


@needs_two_cores
def test_a_launch_names_the_rank_that_stalls_it(tmp_path: Path) -> None:
    """Three jobs at once, as they mostly wait: rank 1 loops, has left with status 0, is stopped."""
    argv = (sys.executable, "-m", "cputrain", "launch", "--ppn", "2", "--output")
    jobs = {}
    for name, code in (("loop", LOOP), ("early", EARLY), ("stop", STOP)):
        command = (*argv, name, "--", sys.executable, "-c", code, f"{name}-told")
        pipe = subprocess.PIPE
        jobs[name] = subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    pids = dict(jobs["stop"].stdout.readline().split(" pid ") for _ in range(2))
    os.kill(int(pids["[1]"]), signal.SIGSTOP)
    stopped = time.monotonic()
    with ThreadPoolExecutor() as pool:  # at the same time: a stall that lasts is told again
        stalled = {name: pool.submit(errors_of, jobs[name], tmp_path / f"{name}-told") for name in ("loop", "early")}
    errors = {name: one.result() for name, one in stalled.items()}
    errors["stop"] = jobs["stop"].communicate(timeout=HANGS_S)[1]
    assert time.monotonic() - stopped < 240  # 15 on a machine that is not busy; its ranks sleep for 300
    assert "cputrain: rank 1 on " in errors["stop"] and " has been stopped for " in errors["stop"]
    assert [job.returncode for job in jobs.values()] == [1, 1, 1]
    for name, doing in (("loop", "computes or polls"), ("early", "has exited with status 0")):
        lines = [line for line in errors[name].splitlines() if line.startswith("cputrain: rank 0 has been idle ")]
        assert len(lines) == 2 and all(doing in line for line in lines), "while it happens, and at the end"
        assert "\nthen rank 0 on" in errors[name] and "  | gave up" in errors[name]
    assert " rank 1 is at <string>:6 in forever)\n" in errors["loop"], "while it happens"
    assert errors["loop"].count("  | <string>:6 in forever\n") == 1, "and at the end all of it"


@needs_two_cores
@pytest.mark.long
def test_a_monitor_names_the_rank_that_stalls_a_job(tmp_path: Path) -> None:
    """As on several hosts: each rank behind an agent. Rank 1 loops, and in another job is stopped."""
    env = {**os.environ, **mpi_path("mpich")}
    argv = (sys.executable, "-m", "cputrain", "launch", "--launcher", "mpich", "--ppn", "2", "--output")
    pipe = subprocess.PIPE
    loop, stop = (
        subprocess.Popen(
            (*argv, name, "--", sys.executable, "-c", code, "told"),
            cwd=tmp_path,
            env=env,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for name, code in (("loop", LOOP), ("stop", STOP))
    )
    pids = dict(stop.stdout.readline().split(" pid ") for _ in range(2))
    os.kill(int(next(pid for label, pid in pids.items() if label.endswith(":1]"))), signal.SIGSTOP)
    stopped = time.monotonic()
    assert "cputrain: rank 1 on " in (error := stop.communicate(timeout=60)[1]) and " has been stopped for " in error
    assert time.monotonic() - stopped < 60, "with the end of all agents"
    error = errors_of(loop, tmp_path / "told")
    assert loop.returncode == stop.returncode == 1
    assert " rank 1 is at <string>:6 in forever)\n" in error and "  | <string>:6 in forever\n" in error
    assert "rank 0 has been idle " in error and " computes or polls" in error and "\nthen rank 0 on" in error
