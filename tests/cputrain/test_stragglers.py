"""Slow ranks: who is slow, why, and what the kernel's counters say of a rank's cores."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cputrain.affinity.binding import threads_of
from cputrain.training.core_usage import CoreUsage, pus_left
from cputrain.training.step import EpochMetrics, StepResult, StepSettings
from cputrain.training.watchers import stragglers
from cputrain.training.watchers.stragglers import EVERY_STEPS, StepStats, StragglerWatch, find_stragglers, to_report
from tests.support.commands import needs_two_cores

TYPICAL = StepStats(
    step_s=0.4,
    data_wait_s=0.01,
    total_s=20.0,
    steal=0.0,
    others=0.01,
    mhz=2500.0,
    faults_per_s=0.0,
    read_s=0.02,
    threads=8.0,
)


def slow(**fields: float) -> StepStats:
    return TYPICAL._replace(**{"step_s": 0.5, **fields})


@pytest.mark.parametrize(
    ("pace", "kind"),
    [
        (slow(data_wait_s=0.1), "loader"),
        (slow(data_wait_s=0.1, others=0.9, left=2.0), "left"),  # what runs on its CPUs is none of its business
        (slow(data_wait_s=0.05, steal=0.2), "steal"),
        (slow(others=0.3), "others"),
        (slow(faults_per_s=400.0), "memory"),
        (slow(mhz=1800.0), "clock"),
        (slow(threads=6.0), "threads"),
        (slow(read_s=0.05), "bandwidth"),
        (slow(), "unknown"),
    ],
)
def test_the_cause_is_what_distinguishes_a_slow_rank_from_the_median_one(pace: StepStats, kind: str) -> None:
    found = find_stragglers([TYPICAL, TYPICAL, pace, TYPICAL])
    assert [(one.rank, one.kind) for one in found] == [(2, kind)]
    assert found[0].factor == pytest.approx(1.25)


def test_of_two_ranks_the_slower_one_is_named_and_a_slow_half_of_four() -> None:
    assert [one.rank for one in find_stragglers([slow(), TYPICAL])] == [0]
    assert [one.rank for one in find_stragglers([slow(), TYPICAL, slow(), TYPICAL])] == [0, 2]
    assert find_stragglers([TYPICAL._replace(step_s=0.45), TYPICAL]) == []
    assert find_stragglers([slow()] * 4) == []


def test_a_rank_that_has_left_its_cpus_is_named_even_if_it_slows_only_others() -> None:
    found = find_stragglers([slow(others=0.5), TYPICAL._replace(left=1.0)])
    assert [(one.rank, one.kind) for one in found] == [(0, "others"), (1, "left")]


def test_a_rank_is_named_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[StepStats] = [TYPICAL]
    monkeypatch.setattr(stragglers, "every_rank", lambda own: torch.tensor([own, *others], dtype=torch.float64))
    named: list[tuple[int, int]] = []

    def warn(step: int, what: str, *, rank: int, **_more: object) -> None:
        doing = "takes 1.25 times" if others[0].step_s > TYPICAL.step_s else "has left its CPUs, as"
        assert what.startswith(f"rank {rank} on n{rank + 1} {doing} ")
        named.append((step, rank))

    watch = StragglerWatch(hosts=("n1", "n2"), warn=warn, pus=(0,), read_s=lambda: 0.02)
    watch.usage = CoreUsage((0,), tmp_path)
    settings = StepSettings(images=8, passes=1, lr=0.1, weight_decay=0.0)
    result = StepResult(
        loss=1.0,
        data_wait_s=0.01,
        comm_wait_s=1.0,
        metrics=EpochMetrics(),
        finite=True,
        non_finite="",
        layer_ratios=(),
    )

    def window(first: int, other: StepStats, step_s: float = 0.4) -> None:
        others[:] = [other]
        for step in range(first, first + EVERY_STEPS):
            watch.after_step(step + 1, settings, result, step_s + 1.0)

    window(0, slow(others=0.5))
    window(50, slow(others=0.5))
    assert named == [(50, 1)]
    window(100, slow(steal=0.5))
    assert named[1:] == [(150, 1)], "another cause"
    window(150, TYPICAL)
    window(200, TYPICAL)
    window(250, slow(steal=0.5))
    assert named[2:] == [(300, 1)], "slow again"
    window(300, TYPICAL._replace(left=2.0))
    assert named[3:] == [(350, 1)], "not slow, but elsewhere"
    window(350, slow(steal=0.5, total_s=0.1))
    assert len(named) == 4, "steps that are too short to tell are counted with the next ones"


def test_a_rank_that_is_slow_in_every_other_comparison_is_named_ever_more_rarely() -> None:
    named: dict[tuple[int, str], int] = {}
    before: list[tuple[int, str]] = []
    times = []
    for comparison in range(1, 1001):
        found = find_stragglers([TYPICAL, slow() if comparison % 2 else TYPICAL])
        for one in to_report(found, slow=before, reported=named, comparison=comparison):
            named[one.rank, one.kind] = comparison
            times.append(comparison)
        before = [(one.rank, one.kind) for one in found]
    assert times == [1, 3, 7, 15, 31, 63, 127, 255, 511]


def made_root(root: Path, busy: int, steal: int) -> Path:
    """A host of two cores with two threads each, 0 and 2, 1 and 3; the ticks of PUs 0 and 2."""
    lines = ["cpu  1 1 1 1 1 1 1 1 0 0"]
    lines += [f"cpu{pu} {busy if pu in (0, 2) else 9999} 0 0 70 5 0 0 {steal} 0 0" for pu in range(4)]
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/stat").write_text("\n".join([*lines, "intr 1", ""]))
    for pu in range(4):
        folder = root / f"sys/devices/system/cpu/cpu{pu}"
        for part in ("topology", "cpufreq"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "topology/thread_siblings_list").write_text(f"{pu % 2},{pu % 2 + 2}\n")
        (folder / "cpufreq/scaling_cur_freq").write_text(f"{2_000_000 + pu * 100_000}\n")
    return root


def test_counters_of_a_core_include_its_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"monotonic": 0.0, "process_time": 0.0}
    for name in clock:
        monkeypatch.setattr(time, name, lambda name=name: clock[name])
    usage = CoreUsage((0,), made_root(tmp_path, busy=100, steal=0))
    clock.update(monotonic=10.0, process_time=4.0)
    made_root(tmp_path, busy=100 + 300, steal=50)  # 3 s on each thread of the core, and 0.5 s stolen
    used = usage.since_restart()
    assert used.others == pytest.approx((6.0 - 4.0) / 10.0) and used.steal == pytest.approx(0.1)
    assert used.mhz == 2000.0


def test_a_host_without_these_counters_is_no_error(tmp_path: Path) -> None:
    used = CoreUsage((0, 1), tmp_path).since_restart()
    assert (used.steal, used.others, used.mhz) == (0.0, 0.0, 0.0)


def test_a_rank_whose_cpus_are_changed_has_left_them() -> None:
    """As a rewritten cpuset moves all threads of a process; threads that begin and end are no change."""
    planned, team = (2, 3), {1: (2,), 2: (3,), 9: (2, 3)}
    assert pus_left(team, team, planned) == set()
    assert pus_left(team, {1: (2,), 2: (3,), 10: (2,)}, planned) == set(), "a thread has ended, another has begun"
    assert pus_left(team, dict.fromkeys(team, (0,)), planned) == {0, 2, 3}
    assert pus_left(team, dict.fromkeys(team, (2,)), planned) == {3}
    assert pus_left(team, dict.fromkeys(team, (0, 1, 2, 3)), planned) == {0, 1}
    assert pus_left({1: (0, 1, 2, 3)}, {1: (0, 1, 2, 3)}, planned) == set(), "it was never bound"
    assert pus_left({1: (2,), 3: (3,)}, {1: (2,)}, planned) == set(), "a loader's thread has ended"


@needs_two_cores
def test_a_moved_process_is_seen() -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    before = {thread.tid: thread.pus for thread in threads_of(os.getpid())}
    try:
        for tid in before:
            os.sched_setaffinity(tid, (first,))
        usage = CoreUsage((first,))
        assert usage.since_restart().left == 0
        for tid in before:
            os.sched_setaffinity(tid, (second,))
        assert usage.since_restart().left == 2
    finally:
        for tid, pus in before.items():
            os.sched_setaffinity(tid, pus)


def test_another_process_on_the_same_core_is_seen() -> None:
    pu = max(os.sched_getaffinity(0))
    usage = CoreUsage((pu,))
    code = f"import os\nos.sched_setaffinity(0, [{pu}])\nprint(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline, others = time.monotonic() + 60, 0.0
        while others <= 0.3 and time.monotonic() < deadline:
            usage.restart()
            time.sleep(1.0)
            others = usage.since_restart().others
        process.kill()
    assert others > 0.3
