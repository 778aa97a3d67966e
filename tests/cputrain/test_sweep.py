"""Sweeps and reproductions: their settings, results and tables."""

import csv
import io
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.terminal import align_columns
from cputrain.affinity.wording import GIB
from cputrain.cli.output import parse_clock
from cputrain.mpi.supervise.processes import JobFailedError, OutOfMemory, RankExit, describe_exit
from cputrain.recipe.schema import SweepSection
from cputrain.runs.events import elapsed
from cputrain.studies.reproduce import BatchResults, by_batch, large_batch_table, large_batch_verdict, with_seed
from cputrain.studies.sweep.find_batch import next_batch
from cputrain.studies.sweep.results import (
    by_group,
    compare_workers,
    comparison_rows,
    csv_text,
    results_text,
    stable_maximum,
)
from cputrain.studies.sweep.trainings import (
    RunResult,
    TrainingSetup,
    Variant,
    diverged_from,
    duration_text,
    group_by_seed,
    loss_curve,
    outcome_of,
    parse_workers,
    variants,
)


def test_a_sweep_is_every_run_with_every_combination_of_the_grid() -> None:
    section = SweepSection(
        runs=("optim.name=sgd schedule.peak_rate=0.5", "optim.name=adam schedule.peak_rate=1e-3"),
        grid={"batch.local": (32, 64), "optim.weight_decay": (1e-4, 0.0)},
    )
    made = variants(section, (), ())
    assert len(made) == 8
    assert made[0].arguments == (
        "optim.name=sgd",
        "schedule.peak_rate=0.5",
        "batch.local=32",
        "optim.weight_decay=0.0001",
    )
    assert made[0].label == "sgd peak_rate 0.5 local 32 weight_decay 0.0001"
    assert len({one.folder for one in made}) == 8 and "/" not in made[0].folder
    asked = variants(section, ("seed=1,2",), ())
    assert [one.arguments for one in asked] == [("seed=1",), ("seed=2",)], (
        "what is asked for is instead of the recipe's"
    )
    quoted = variants(SweepSection(), (), ("'data.path=a b' epochs=3",))
    assert quoted[0].arguments == ("data.path=a b", "epochs=3")


@pytest.mark.parametrize(
    ("grids", "runs", "expected"),
    [
        ((), (), "nothing to sweep over; pass --grid KEY=A,B,C or --run"),
        (("batch.local",), (), "--grid 'batch.local' is not KEY=A,B,C"),
        (("batch.local=1,,2",), (), "is not KEY=A,B,C"),
        ((), ("epochs 3",), "run 'epochs 3': 'epochs' is not KEY=VALUE"),
        (("epochs=3,3",), (), "the sweep contains epochs=3 twice"),
    ],
)
def test_wrong_grids_and_runs_are_rejected(grids: tuple[str, ...], runs: tuple[str, ...], expected: str) -> None:
    with pytest.raises(InputError) as error:
        variants(SweepSection(), grids, runs)
    assert expected in str(error.value)


def result(top1: float | None, seed: int = 1, rate: str = "0.1", optimizer: str = "lars", **more: Any) -> RunResult:
    settings = (("optim.name", optimizer), ("schedule.peak_rate", rate), ("seed", str(seed)))
    variant = Variant(settings=settings)
    asked = TrainingSetup(
        workers=2,
        local_batch=32,
        global_batch=64,
        epochs=5,
        optimizer=optimizer,
        weight_decay=1e-4,
        peak_rate=float(rate),
    )
    known = {"label": variant.label, "run": variant.folder, "settings": settings, "setup": asked, "top1": top1}
    return RunResult(**{**known, "status": "done" if top1 else "failed", **more})


EVALUATED: dict[str, Any] = {"epochs": (1, 2, 3), "eval_steps": (10, 20, 30), "elapsed_s": (5.0, 11.0, 17.0)}


def test_the_table_shows_settings_results_and_the_cause_of_each_end() -> None:
    best = result(90.0, **EVALUATED, top1s=(80.0, 91.0, 90.0), steps=30, wall_s=436.2, requested_s=600.0)
    other = result(92.0, seed=2, **EVALUATED, top1s=(70.0, 80.0, 92.0), steps=30, wall_s=430.0, requested_s=600.0)
    lost = result(None, rate="9", status="diverged", ended_by="rank 0: loss nan at step 4", steps=4)
    big = result(None, rate="8", status="does not fit", ended_by="needs 66.0 GiB | has 11.0 GiB", run="")
    groups = group_by_seed([best, other, lost, big])
    lines = results_text(groups).splitlines()
    assert lines[0] == (
        "all with workers 2, local batch 32, global batch 64, epochs 5, weight decay 0.0001, optimizer lars"
    )
    assert lines[1].split("  ")[0] == "peak rate" and "walltime requested" in lines[1] and "images/s" not in lines[1]
    assert "91.50 (91.00-92.00)  25 (20-30)  91.00 (90.00-92.00)" in lines[2] and "0:10:00" in lines[2]
    assert lines[2].endswith("done") and lines[3].endswith("diverged") and lines[4].endswith("does not fit")
    assert lines[5:] == [
        "lars peak_rate 9: diverged: rank 0: loss nan at step 4",
        "lars peak_rate 8: does not fit: needs 66.0 GiB | has 11.0 GiB",
    ]
    expected = by_group(groups).markdown().splitlines()
    assert expected[1] == "|" + "---|" * (expected[0].count("|") - 1) and len(expected) == 5
    assert "needs 66.0 GiB \\| has 11.0 GiB" in expected[4]
    rows = list(csv.DictReader(io.StringIO(csv_text([best, other, lost, big]))))
    assert [row["seed"] for row in rows] == ["1", "2", "1", "1"]
    first = {"weight decay": "0.0001", "steps": "30", "max accuracy %": "91.0", "at step": "20"}
    first |= {"walltime requested": "0:10:00", "walltime used": "0:07:16", "result file": f"{best.run}/events.jsonl"}
    assert {key: rows[0][key] for key in first} == first and rows[3]["ended by"] == "needs 66.0 GiB | has 11.0 GiB"


def test_trainings_that_differ_by_their_seed_are_one_line() -> None:
    groups = group_by_seed([result(90.0), result(92.0, seed=2), result(50.0, rate="0.2"), result(None, seed=3)])
    assert [group.label for group in groups] == ["lars peak_rate 0.1", "lars peak_rate 0.2"]
    lines = results_text(groups).splitlines()
    assert "91.00 (90.00-92.00)" in lines[2] and lines[2].endswith("2 done, failed")
    assert lines[3].split() == ["0.2", "50.00", "done"]


def test_generated_data_is_named_in_the_table() -> None:
    assert results_text(group_by_seed([result(90.0, data="synthetic data")])).splitlines()[1].split()[-3:-1] == [
        "synthetic",
        "data",
    ]


def test_the_cause_of_a_failed_training_is_one_line() -> None:

    def outcome(status: int, *tail: str, shortage: OutOfMemory | None = None) -> tuple[str, str]:
        cause = RankExit(rank=1, host="n07", status=status, time=0.0, log="l", tail=tail, shortage=shortage)
        return outcome_of(JobFailedError(describe_exit(cause), cause=cause))

    shortage = OutOfMemory(used_bytes=0, limit_bytes=4 * GIB, whole="control group")
    assert outcome(-9, "step 3", shortage=shortage) == (
        "out of memory",
        "rank 1 on n07 killed by SIGKILL: out of memory: the 4.0 GiB of its control group",
    )
    status, why = outcome(-9, "step 3")
    assert status == "failed" and "no out-of-memory kill" in why
    refused = "RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
    assert outcome(1, "epoch 1", refused) == ("out of memory", f"allocation failed: {refused}")
    expected = "rank 0: loss nan at step 4, none in any layer, learning rate 1: lower schedule.peak_rate"
    assert outcome(1, "epoch 1", f"cputrain: {expected}") == ("diverged", expected)
    assert outcome(1, "epoch 1", "cputrain: rank 0: photo.jpg: mend it") == ("failed", "rank 0: photo.jpg: mend it")
    assert outcome(1, "epoch 1", "KeyError: 3") == (
        "failed",
        "rank 1 on n07 exited with status 1; log l; its last line: KeyError: 3",
    )
    assert outcome_of(RunError("no agent")) == ("failed", "no agent")


@pytest.mark.parametrize(("text", "seconds"), [("0:10:00", 600), ("01:30:05", 5405), ("2-00:00:01", 172801)])
def test_time_limits_are_parsed_as_schedulers_write_them(text: str, seconds: int) -> None:
    assert parse_clock(text) == seconds


@pytest.mark.parametrize("text", ["10", "0:00:00", "1:60:00", "10:00", "x"])
def test_other_texts_are_rejected_as_time_limits(text: str) -> None:
    with pytest.raises(InputError, match=f"--time '{text}' is not a time limit: give HH:MM:SS"):
        parse_clock(text)


@given(seconds=st.integers(1, 10**6 - 1))
def test_a_clock_is_read_back(seconds: int) -> None:
    assert parse_clock(duration_text(seconds)) == seconds


def test_worker_counts_are_parsed_as_a_list() -> None:
    assert parse_workers("1,2,4") == (1, 2, 4)
    for wrong in ("1,", "0,1", "a", "1 2"):
        with pytest.raises(InputError, match="is not a list of worker counts, as in 1,2,4"):
            parse_workers(wrong)


PERCENTS = st.lists(st.integers(0, 400).map(lambda quarter: quarter / 4), min_size=1, max_size=20)


@given(values=PERCENTS)
def test_the_stable_maximum_is_the_first_epoch_that_the_rule_describes(values: list[float]) -> None:
    def stable(index: int) -> bool:
        return values[index] >= max(values) - 0.5 and all(later >= values[index] - 1.0 for later in values[index:])

    assert stable_maximum(values) == next((index for index in range(len(values)) if stable(index)), None)
    assert stable_maximum(sorted(values)) is not None, "what only rises is stable somewhere"
    assert stable_maximum([value + 3 for value in values]) == stable_maximum(values)
    assert stable_maximum([*values, max(values)]) is not None


def test_a_peak_that_does_not_last_is_no_stable_maximum() -> None:
    assert stable_maximum([50.0, 90.0, 88.0, 89.5, 89.75, 89.6]) == 3
    assert stable_maximum([50.0, 90.0, 60.0]) is None and stable_maximum([]) is None


def plural(workers: int, batch: int, top1s: tuple[float, ...], images_per_s: float) -> RunResult:
    settings = (("plan.ppn", str(workers)), ("batch.local", str(batch)))
    setup = replace(result(1.0).setup, workers=workers, local_batch=batch, global_batch=workers * batch)
    variant = Variant(settings=settings)
    known = {"label": variant.label, "run": variant.folder, "settings": settings, "setup": setup, "status": "done"}
    return RunResult(
        **known, **EVALUATED, top1s=top1s, images_per_s=images_per_s, wall_s=100.0 / workers, epoch_s=30.0 / workers
    )


def test_worker_counts_are_compared_with_the_smallest_of_the_same_training() -> None:
    results = [
        plural(1, 50, (80.0, 90.0, 90.2), 100.0),
        plural(2, 50, (70.0, 80.0, 90.0), 180.0),
        plural(4, 50, (70.0, 91.0, 80.0), 300.0),
        plural(2, 500, (60.0, 70.0, 80.0), 400.0),
    ]
    rows = compare_workers(results)
    assert [(row.workers, row.stable_epoch, row.stable_s) for row in rows] == [
        (1, 2, 11.0),
        (2, 3, 17.0),
        (4, None, None),
    ]
    assert [(row.speedup, row.efficiency) for row in rows] == [(1.0, 1.0), (1.8, 0.9), (3.0, 0.75)]
    shown = comparison_rows(rows).cells
    assert shown[0][0] == "workers" and shown[2][:4] == ("2", "100", "0:00:50", "15")
    assert compare_workers(results[2:]) == (), "a count alone is compared with nothing"


def test_pauses_between_starts_do_not_count_as_training_time() -> None:
    times = [("start", 100.0), ("epoch", 110.0), ("start", 500.0), ("epoch", 512.0), ("end", 513.0)]
    events = [{"event": event, "time": time} for event, time in times]
    assert elapsed(events) == [0.0, 10.0, 10.0, 22.0, 23.0] and elapsed([]) == []


def test_a_loss_has_diverged_from_where_it_never_comes_back() -> None:
    assert diverged_from([2.0, 30.0, 1.0]) is None, "it came back"
    assert diverged_from([2.0, 3.0, 30.0, None, 25.0]) == 2
    assert diverged_from([]) is None and diverged_from([None, None]) == 0
    assert diverged_from([-1.0, -3.0, -0.5]) is None and diverged_from([0.0, 2.0]) is None, "no factor tells"
    assert loss_curve([(1, 2.0), (2, 3.0), (3, None)]) == ((1, 2.0), (2, 3.0))
    long = loss_curve([(step, 1.0) for step in range(1, 1001)])
    assert len(long) == 100 and long[-1] == (1000, 1.0)


@given(fits=st.integers(0, 500), start=st.integers(1, 600), most=st.none() | st.integers(1, 600))
def test_the_search_ends_next_to_the_largest_batch_that_trains(fits: int, start: int, most: int | None) -> None:
    tried: dict[int, bool] = {}
    while (batch := next_batch(tried, start, most)) is not None:
        assert batch not in tried and 1 <= batch <= (most or batch)
        tried[batch] = batch <= fits
    assert len(tried) <= 22
    good = max((batch for batch, trained in tried.items() if trained), default=0)
    bad = min((batch for batch, trained in tried.items() if not trained), default=None)
    assert good == most if bad is None else bad - good <= max(1, good // 8)


def test_columns_are_aligned() -> None:
    assert align_columns([("a", "bb"), ("ccc", "d")], numbers=True) == "a    bb\nccc   d"


def cell(batch: int, optimizer: str, *top1s: float | None) -> BatchResults:
    others = tuple(result(top1, seed=2) for top1 in top1s[1:])
    return BatchResults(
        batch=batch, optimizer=optimizer, tried=(result(top1s[0]), result(1.0, rate="9")), others=others
    )


def test_each_optimizer_is_judged_at_its_best_rate_of_each_batch() -> None:
    tried = [
        (64, result(99.0, rate="0.1", optimizer="momentum")),
        (4096, result(None, rate="0.6", optimizer="momentum")),
        (4096, result(94.0, rate="0.04", optimizer="momentum")),
        (4096, result(98.5, rate="10")),
        (64, result(99.2, rate="0.2", optimizer="momentum")),
    ]
    found = by_batch(tried)
    chosen = [(64, "momentum", "0.2"), (4096, "momentum", "0.04"), (4096, "lars", "10")]
    assert [(c.batch, c.optimizer, c.lr) for c in found] == chosen
    assert with_seed(found[0].best.settings, 3).arguments == ("optim.name=momentum", "schedule.peak_rate=0.2", "seed=3")
    rows = large_batch_table(found).cells
    assert rows[1][:6] == ("64", "1", "momentum", "0.2", "99.20", "")
    assert rows[2] == ("4,096", "64", "momentum", "0.04", "94.00", "-5.20", "0.6: diverged")


def test_the_claim_holds_only_where_one_keeps_and_the_other_loses() -> None:
    base = cell(64, "momentum", 99.0, 99.2)
    small = [cell(1024, "momentum", 98.9), cell(1024, "lars", 99.2)]
    held = [base, *small, cell(4096, "momentum", 95.0), cell(4096, "lars", 98.4, 98.4)]
    assert large_batch_verdict(held) == (
        "holds: at 4,096 LARS is 0.70 points below the baseline of 99.10 %, momentum at its best rate 4.10 below"
    )
    better = [*held, cell(8192, "momentum", 92.0), cell(8192, "lars", 99.3)]
    assert large_batch_verdict(better).startswith("holds: at 8,192 LARS is 0.20 points above the baseline"), (
        "the largest"
    )
    both_lose = [base, cell(4096, "momentum", 95.0), cell(4096, "lars", 96.0)]
    assert large_batch_verdict(both_lose).startswith(
        "does not hold here (LARS within 1 point at a batch at which momentum loses more"
    )
    assert "4,096: LARS -3.10, momentum -4.10" in large_batch_verdict(both_lose)
    both_hold = [base, cell(1024, "momentum", 97.0), cell(1024, "lars", 99.0)]
    assert large_batch_verdict(both_hold).startswith("does not hold here")
    diverged = [base, cell(4096, "momentum", None), cell(4096, "lars", 98.5)]
    assert large_batch_verdict(diverged).startswith("holds: at 4,096 LARS is 0.60")
