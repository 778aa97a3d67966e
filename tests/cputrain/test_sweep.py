"""Sweeps and reproductions: their trainings, results and tables."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinity.errors import InputError
from affinity.text_table import align_columns
from cputrain.recipe.schema import SweepSection
from cputrain.reproduce.large_batch import (
    BatchResults,
    by_batch,
    large_batch_table,
    large_batch_verdict,
    with_all_seeds,
    with_seed,
)
from cputrain.sweep import RunResult, TrainingSetup, Variant, group_by_seed, variants
from cputrain.sweep.clock import clock, parse_clock
from cputrain.sweep.outcomes import outcome_of
from cputrain.sweep.results import diverged_from, elapsed, loss_curve
from cputrain.sweep.search import next_batch
from cputrain.sweep.tables import csv_text, markdown, table
from cputrain.sweep.variants import parse_workers
from cputrain.sweep.workers import compare, comparison_rows, stable_maximum
from tests.cputrain.test_training import SMALL as TRAINING
from tests.support.commands import cputrain, refused
from tests.support.images import write_images

SMALL = (*TRAINING, "plan.ppn=1")


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
        ((), (), "nothing to sweep over: give --grid KEY=A,B,C or --run"),
        (("batch.local",), (), "--grid 'batch.local' is not KEY=A,B,C"),
        (("batch.local=1,,2",), (), "is not KEY=A,B,C"),
        ((), ("epochs 3",), "run 'epochs 3': 'epochs' is not KEY=VALUE"),
        (("epochs=3,3",), (), "the sweep has epochs=3 twice"),
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
    lines = table(groups).splitlines()
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
    expected = markdown(groups).splitlines()
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
    lines = table(groups).splitlines()
    assert "91.00 (90.00-92.00)" in lines[2] and lines[2].endswith("2 done, failed")
    assert lines[3].split() == ["0.2", "50.00", "done"]


def test_generated_data_is_named_in_the_table() -> None:
    assert table(group_by_seed([result(90.0, data="synthetic data")])).splitlines()[1].split()[-3:-1] == [
        "synthetic",
        "data",
    ]


def test_the_cause_of_a_failed_training_is_one_line() -> None:
    killed = "rank 1 on n07 was ended by SIGKILL; log run/logs/rank-1.log; its last lines:\n  | step 3"
    assert outcome_of(killed, oom_killed=True) == (
        "out of memory",
        "rank 1 on n07 killed by SIGKILL: out of memory (see dmesg, or memory.events of its cgroup)",
    )
    assert (
        outcome_of(killed, oom_killed=False)[0] == "failed"
        and "no out-of-memory kill" in outcome_of(killed, oom_killed=0)[1]
    )
    exited = "rank 0 on n07 exited with status 1; log l; its last lines:\n  | epoch 1\n  | "
    refused = "RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
    assert outcome_of(exited + refused, oom_killed=False) == ("out of memory", f"allocation failed: {refused}")
    expected = "rank 0: loss nan at step 4, none in any layer, learning rate 1: lower schedule.peak_rate"
    assert outcome_of(f"{exited}cputrain: {expected}", oom_killed=False) == ("diverged", expected)
    assert outcome_of(f"{exited}cputrain: rank 0: photo.jpg: mend it", oom_killed=False) == (
        "failed",
        "rank 0: photo.jpg: mend it",
    )
    assert outcome_of(f"{exited}KeyError: 3", oom_killed=False) == (
        "failed",
        "rank 0 on n07 exited with status 1; log l",
    )


@pytest.mark.parametrize(("text", "seconds"), [("0:10:00", 600), ("01:30:05", 5405), ("2-00:00:01", 172801)])
def test_time_limits_are_parsed_as_schedulers_write_them(text: str, seconds: int) -> None:
    assert parse_clock(text) == seconds


@pytest.mark.parametrize("text", ["10", "0:00:00", "1:60:00", "10:00", "x"])
def test_other_texts_are_rejected_as_time_limits(text: str) -> None:
    with pytest.raises(InputError, match=f"--time '{text}' is not a time limit: give HH:MM:SS"):
        parse_clock(text)


@given(seconds=st.integers(1, 10**6 - 1))
def test_a_clock_is_read_back(seconds: int) -> None:
    assert parse_clock(clock(seconds)) == seconds


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


def counted(workers: int, batch: int, top1s: tuple[float, ...], images_per_s: float) -> RunResult:
    settings = (("plan.ppn", str(workers)), ("batch.local", str(batch)))
    setup = replace(result(1.0).setup, workers=workers, local_batch=batch, global_batch=workers * batch)
    variant = Variant(settings=settings)
    known = {"label": variant.label, "run": variant.folder, "settings": settings, "setup": setup, "status": "done"}
    return RunResult(
        **known, **EVALUATED, top1s=top1s, images_per_s=images_per_s, wall_s=100.0 / workers, epoch_s=30.0 / workers
    )


def test_worker_counts_are_compared_with_the_smallest_of_the_same_training() -> None:
    results = [
        counted(1, 50, (80.0, 90.0, 90.2), 100.0),
        counted(2, 50, (70.0, 80.0, 90.0), 180.0),
        counted(4, 50, (70.0, 91.0, 80.0), 300.0),
        counted(2, 500, (60.0, 70.0, 80.0), 400.0),
    ]
    rows = compare(results)
    assert [(row.workers, row.stable_epoch, row.stable_s) for row in rows] == [
        (1, 2, 11.0),
        (2, 3, 17.0),
        (4, None, None),
    ]
    assert [(row.speedup, row.efficiency) for row in rows] == [(1.0, 1.0), (1.8, 0.9), (3.0, 0.75)]
    shown = comparison_rows(rows)
    assert shown[0][0] == "workers" and shown[2][:4] == ("2", "100", "0:00:50", "15")
    assert compare(results[2:]) == (), "a count alone is compared with nothing"


def test_pauses_between_starts_do_not_count_as_training_time() -> None:
    times = [("start", 100.0), ("epoch", 110.0), ("start", 500.0), ("epoch", 512.0), ("end", 513.0)]
    events = [{"event": event, "time": time} for event, time in times]
    assert elapsed(events) == [0.0, 10.0, 10.0, 22.0, 23.0] and elapsed([]) == []


def test_a_loss_has_diverged_from_where_it_never_comes_back() -> None:
    assert diverged_from([2.0, 30.0, 1.0]) is None, "it came back"
    assert diverged_from([2.0, 3.0, 30.0, None, 25.0]) == 2
    assert diverged_from([]) is None and diverged_from([None, None]) == 0
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
    made = BatchResults(batch=batch, optimizer=optimizer, tried=(result(top1s[0]), result(1.0, rate="9")))
    return with_all_seeds(made, [result(top1, seed=2) for top1 in top1s[1:]])


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
    assert [(c.batch, c.optimizer, c.rate) for c in found] == chosen
    assert with_seed(found[0].best.settings, 3).arguments == ("optim.name=momentum", "schedule.peak_rate=0.2", "seed=3")
    rows = large_batch_table([with_all_seeds(c, []) for c in found])
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
        "does not hold here (LARS within 1 point where momentum loses more"
    )
    assert "4,096: LARS -3.10, momentum -4.10" in large_batch_verdict(both_lose)
    both_hold = [base, cell(1024, "momentum", 97.0), cell(1024, "lars", 99.0)]
    assert large_batch_verdict(both_hold).startswith("does not hold here")
    diverged = [base, cell(4096, "momentum", None), cell(4096, "lars", 98.5)]
    assert large_batch_verdict(diverged).startswith("holds: at 4,096 LARS is 0.60")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", train=9, val=7)
    return tmp_path


def test_a_sweep_trains_what_is_not_done_and_shows_it_all(place: Path) -> None:
    """One training diverges, one asks for more images than there are: they are rows, the others are done, and stay so
    in a second call."""
    rates = ("--run", "schedule.peak_rate=0.01", "--run", "schedule.peak_rate=0.02", "--run", "schedule.peak_rate=1e30")
    ran = cputrain("sweep", "imagefolder", *SMALL, *rates, "--run", "batch.local=600", cwd=place)
    assert ran.returncode == 1, ran.stderr
    assert "4/4  batch.local=600  (invalid: batch.local=600 on 1 worker needs 600 images per step" in ran.stdout
    assert "3/4  schedule.peak_rate=1e30" in ran.stdout and "lower schedule.peak_rate" in ran.stderr
    folder = place / "runs/imagefolder-sweep"
    expected = json.loads((folder / "sweep.json").read_text())
    assert [run["status"] for run in expected["runs"]] == ["done", "done", "diverged", "invalid"]
    assert "lower schedule.peak_rate" in expected["runs"][2]["ended_by"]
    assert len(expected["runs"][0]["top1s"]) == 2 and expected["runs"][0]["top1"] == expected["runs"][0]["top1s"][-1]
    picture = (folder / "sweep.svg").read_text()
    assert "<svg" in picture and picture.count("peak_rate") >= 2
    before = (folder / "schedule.peak_rate=0.01/events.jsonl").read_bytes()
    again = cputrain("sweep", "imagefolder", *SMALL, *rates[:4], cwd=place)
    assert again.returncode == 0, again.stderr
    assert (folder / "schedule.peak_rate=0.01/events.jsonl").read_bytes() == before
    assert [line.split()[0] for line in again.stdout.splitlines()[-4:-2]] == ["0.01", "0.02"]
    other = cputrain("sweep", "imagefolder", *SMALL, *rates[:4], "epochs=3", cwd=place)
    assert "holds a run of another recipe: name another folder with --output" in refused(other)


def test_a_sweep_is_checked_before_it_starts(place: Path) -> None:
    shown = cputrain("sweep", "imagefolder", *SMALL, "--grid", "batch.local=3,6", "--dry-run", cwd=place)
    assert shown.returncode == 0 and "2/2  batch.local=6  (global batch 6, 8 steps)" in shown.stdout
    none = cputrain("sweep", "imagefolder", *SMALL, "--grid", "batch.local=600,700", cwd=place)
    assert refused(none).startswith("cputrain: none of 2 trainings can start here: batch.local=600 on 1 worker")
    wrong = cputrain("sweep", "imagefolder", *SMALL, "--grid", "batch.locla=6,9", cwd=place)
    assert "unknown key 'batch.locla'" in refused(wrong)
    for options, expected in (
        (("--memory", "2"), "--memory goes only with --find-batch"),
        (("--find-batch", "--workers", "1,2"), "--find-batch goes only with --memory and --output"),
        (("--workers", "two"), "--workers 'two' is not a list of worker counts"),
        (("--time", "soon", "--grid", "seed=1,2"), "--time 'soon' is not a time limit"),
    ):
        assert expected in refused(cputrain("sweep", "imagefolder", *SMALL, *options, cwd=place))
    assert not (place / "runs").exists()


# Networks whose steps take a moment; the whole epoch is one step, and nothing but the limit ends it.
TINY = ("data.path=images", "model.name=lenet", "model.zero_gamma=none", "data.crop=32", "schedule.warmup_epochs=0")


def test_the_same_training_on_several_worker_counts_is_compared(place: Path) -> None:
    counts = ("--workers", "1,2", "batch.local=6", "plan.threads=1", "epochs=2", "--output", "compared")
    ran = cputrain("sweep", "imagefolder", *TINY, *counts, cwd=place)
    assert ran.returncode == 0, ran.stderr
    assert "stable maximum: the first epoch whose validation accuracy is within 0.5 points" in ran.stdout
    expected = json.loads((place / "compared/workers.json").read_text())
    one, two = expected["trainings"]
    assert [(row["workers"], row["global_batch"], row["status"]) for row in (one, two)] == [
        (1, 6, "done"),
        (2, 12, "done"),
    ]
    assert one["speedup"] == 1 and two["speedup"] == pytest.approx(two["images_per_s"] / one["images_per_s"])
    assert one["turnaround_s"] > 2 * one["epoch_s"] > 0 and expected["rule"] in ran.stdout
    names = {path.name for path in (place / "compared").iterdir() if path.is_file()}
    ends = ("csv", "md", "json", "svg")
    assert names == {f"{name}.{end}" for name in ("sweep", "workers") for end in ends}
    rows = list(csv.DictReader((place / "compared/sweep.csv").open()))
    assert [row["walltime used"] for row in rows] == [clock(one["turnaround_s"]), clock(two["turnaround_s"])]


def test_a_time_limit_stops_a_training_saved_and_is_a_row(place: Path) -> None:
    """The epochs have one step each, at which a notice must be heard too."""
    asked = (
        *TINY,
        "batch.local=27",
        "plan.ppn=1",
        "epochs=1000000",
        "checkpoint.every_epochs=null",
        "--grid",
        "seed=1",
    )
    into = ("--output", "limited")
    for limit in ("0:00:12", "0:01:00", "0:04:00"):  # a loaded machine takes long to start; a larger limit goes on
        ran = cputrain("sweep", "imagefolder", *asked, "--time", limit, *into, cwd=place)
        assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
        row = next(csv.DictReader((place / "limited/sweep.csv").open()))
        assert row["status"] == "time limit" and row["walltime requested"] == limit
        assert row["ended by"] == f"stopped by SIGUSR1 after --time {parse_clock(limit)} s"
        if row["steps"]:
            break
    saved = list((place / "limited/seed=1/checkpoints").glob(f"step-*{row['steps']}.pt"))
    assert int(row["steps"]) > 0 and row["max accuracy %"] and len(saved) == 1
    again = cputrain("sweep", "imagefolder", *asked, "--time", limit, *into, cwd=place)
    assert again.returncode == 1 and "1/1  seed=1\n" not in again.stdout + again.stderr and "time limit" in again.stdout


# Unknown to the planner, which refuses nothing then; 1.03 GiB for one image, 0.6 GiB for each more.
LARGE = (*TINY[:1], "model.name=torchvision:squeezenet1_1", *TINY[2:3], "data.crop=1024", "schedule.warmup_epochs=0")
LARGE_GIB = 1.2


def test_the_largest_batch_is_tried_in_real_processes_under_a_limit(place: Path) -> None:
    tried = ("batch.local=1", "plan.ppn=1", "--find-batch", "--memory", str(LARGE_GIB), "--output", "found")
    ran = cputrain("sweep", "imagefolder", *LARGE, *tried, cwd=place)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "largest that trains: batch.local=1 (global batch 1) in DRAM" in ran.stdout
    assert "next larger: 2: out of memory: allocation failed: " in ran.stdout
    fits, fails = csv.DictReader((place / "found/find-batch.csv").open())
    assert fits["result"] == "trains" and fails["result"] == "out of memory"
    assert 0.5 < float(fits["peak RSS GiB"]) <= LARGE_GIB and float(fails["peak RSS GiB"]) <= LARGE_GIB
    known = ("batch.local=20", "data.crop=256", "--find-batch", "--memory", str(LARGE_GIB), "--output", "refused")
    ran = cputrain("sweep", "imagefolder", *SMALL, *known, cwd=place)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "next larger: 20: does not fit: resnet18 at 256 x 256 with 20 images per step needs 1.6" in ran.stdout
    none = cputrain("sweep", "imagefolder", *TINY, "data.crop=512", *known[2:], cwd=place)
    assert "lenet at 512 x 512 with 1 images per step needs 6.49 GiB; --memory leaves " in refused(none)


@pytest.fixture
def memory_group() -> Generator[Path, None, None]:
    """A memory control group of LARGE_GIB, v2 or v1; skips where none can be made."""
    roots = {Path("/sys/fs/cgroup"): "memory.max", Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes"}
    for root, name in roots.items():
        group = root / f"cputrain-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / name).is_file():
            (group / name).write_text(str(round(LARGE_GIB * (1 << 30))))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip(reason="needs a control group that limits memory: root, and the memory controller")


def test_a_training_that_the_kernel_kills_for_its_memory_is_a_row(place: Path, memory_group: Path) -> None:
    asked = ("plan.ppn=1", "epochs=1", "max_steps=1", "evaluate.every_epochs=null", "--grid", "batch.local=27,1")
    inside = ("sh", "-c", f'echo $$ > {memory_group}/cgroup.procs; exec "$@"', "sh", sys.executable, "-m", "cputrain")
    ran = subprocess.run(
        (*inside, "sweep", "imagefolder", *LARGE, *asked, "--output", "killed"),
        cwd=place,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1, ran.stderr
    killed, done = csv.DictReader((place / "killed/sweep.csv").open())
    assert killed["status"] == "out of memory" and "killed by SIGKILL: out of memory (see dmesg" in killed["ended by"]
    assert done["status"] == "done" and done["steps"] == "1", "the sweep goes on"


def test_ratios_are_written_at_an_interval_and_shown_as_a_table(place: Path) -> None:
    lars = (
        "optim.name=lars",
        "schedule.peak_rate=0.005",
        "log_norms_every_steps=3",
        "output=run",
        "data.last_batch=drop",
    )
    trained = cputrain("train", "imagefolder", *SMALL, *lars, cwd=place)
    assert trained.returncode == 0, trained.stderr
    shown = cputrain("bench", "optimizer", "--ratios", "run", cwd=place)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("step 6, learning rate ") and lines[1].split()[:3] == ["layer", "|w|", "|g|"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    w, g, ratio, trust = map(float, rows["layer3.0.conv1.weight"])
    assert ratio == pytest.approx(w / g, rel=1e-2)
    assert trust == pytest.approx(0.001 * w / (g + 5e-5 * w), rel=1e-2)
    assert rows["bn1.weight"][-1] == "1" and len(rows) == 62
    early = cputrain("bench", "optimizer", "--ratios", "run", "--step", "4", cwd=place)
    assert refused(early).endswith("run has recorded no norms at step 4: its steps are 3, 6")
    assert "holds no run" in refused(cputrain("bench", "optimizer", "--ratios", "images", cwd=place))
