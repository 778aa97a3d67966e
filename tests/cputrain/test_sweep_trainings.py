"""Sweeps that train: what is done, rejected, stopped, killed or too large for memory, as a user meets it."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cputrain.cli.output import parse_clock
from cputrain.studies.sweep.trainings import duration_text
from tests.support.commands import cputrain, here, refused
from tests.support.control_group import inside, memory_group
from tests.support.forked import in_fork
from tests.support.trainings import RESNET18, SMALL

SWEPT = (*(setting for setting in SMALL if not setting.startswith("output=")), "plan.ppn=1")


@pytest.mark.long
def test_a_sweep_trains_what_is_not_done_and_shows_it_all(place: Path) -> None:
    """One training diverges, one asks for more images than there are: they are rows, the others are done, and stay so
    in a second call."""
    rates = ("--run", "schedule.peak_rate=0.01", "--run", "schedule.peak_rate=0.02", "--run", "schedule.peak_rate=1e30")
    ran = in_fork("sweep", "imagefolder", *SWEPT, *rates, "--run", "batch.local=600", cwd=place)
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
    again = in_fork("sweep", "imagefolder", *SWEPT, *rates[:4], cwd=place)
    assert again.returncode == 0, again.stderr
    assert (folder / "schedule.peak_rate=0.01/events.jsonl").read_bytes() == before
    assert [line.split()[0] for line in again.stdout.splitlines()[-4:-2]] == ["0.01", "0.02"]
    other = here("sweep", "imagefolder", *SWEPT, *rates[:4], "epochs=3", cwd=place)
    assert "contains a run of another recipe; choose another folder with --output" in refused(other)


def test_a_sweep_is_checked_before_it_starts(place: Path) -> None:
    shown = here("sweep", "imagefolder", *SWEPT, "--grid", "batch.local=3,6", "--dry-run", cwd=place)
    assert shown.returncode == 0 and "2/2  batch.local=6  (global batch 6, 8 steps)" in shown.stdout
    two = here("sweep", "imagefolder", *SWEPT, "--grid", "seed=1,2", "output=a", "--output", "b", cwd=place)
    assert refused(two) == "cputrain: output=a and --output b name two folders: give one"
    none = here("sweep", "imagefolder", *SWEPT, "--grid", "batch.local=600,700", cwd=place)
    assert refused(none).startswith("cputrain: none of 2 trainings can start here: batch.local=600 on 1 worker")
    wrong = here("sweep", "imagefolder", *SWEPT, "--grid", "batch.locla=6,9", cwd=place)
    assert "unknown key 'batch.locla'" in refused(wrong)
    for options, expected in (
        (("--memory", "2"), "--memory needs --find-batch"),
        (("--find-batch", "--workers", "1,2"), "--find-batch can only be combined with --memory and --output"),
        (("--workers", "two"), "--workers 'two' is not a list of worker counts"),
        (("--time", "soon", "--grid", "seed=1,2"), "--time 'soon' is not a time limit"),
    ):
        assert expected in refused(here("sweep", "imagefolder", *SWEPT, *options, cwd=place))
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ("plan.ppn=999", "plan.ppn=999 needs 999 cores; "),
        ("plan.ppn=999", "set plan.ppn to "),
        ("plan.threads=999", "plan.threads=999: "),
        ("batch.local=100000", ": set batch.local to "),
    ],
)
def test_a_training_that_cannot_start_is_told_in_keys_of_recipes(place: Path, grid: str, told: str) -> None:
    line = refused(here("sweep", "imagefolder", "data.path=images", "--grid", grid, "--dry-run", cwd=place))
    assert line.startswith("cputrain: none of 1 trainings can start here: ") and told in line


# Networks whose steps take a moment; the whole epoch is one step, and nothing but the limit ends it.
TINY = ("data.path=images", "model.name=lenet", "model.zero_gamma=none", "data.crop=32", "schedule.warmup_epochs=0")


@pytest.mark.long
def test_the_same_training_on_several_worker_counts_is_compared(place: Path) -> None:
    counts = ("--workers", "1,2", "batch.local=6", "plan.threads=1", "epochs=2", "--output", "compared")
    ran = in_fork("sweep", "imagefolder", *TINY, *counts, cwd=place)
    assert ran.returncode == 0, ran.stderr
    assert "stable maximum: the first epoch within 0.5 points" in ran.stdout
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
    assert [row["walltime used"] for row in rows] == [
        duration_text(one["turnaround_s"]),
        duration_text(two["turnaround_s"]),
    ]


@pytest.mark.long
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
        ran = in_fork("sweep", "imagefolder", *asked, "--time", limit, *into, cwd=place)
        assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
        row = next(csv.DictReader((place / "limited/sweep.csv").open()))
        assert row["status"] == "time limit" and row["walltime requested"] == limit
        assert row["ended by"] == f"stopped by SIGUSR1 after --time {parse_clock(limit)} s"
        if row["steps"]:
            break
    saved = list((place / "limited/seed=1/checkpoints").glob(f"step-*{row['steps']}"))
    assert int(row["steps"]) > 0 and row["max accuracy %"] and len(saved) == 1
    again = in_fork("sweep", "imagefolder", *asked, "--time", limit, *into, cwd=place)
    assert again.returncode == 1 and "1/1  seed=1\n" not in again.stdout + again.stderr and "time limit" in again.stdout


# The planner takes its copies of large images for less than they are: 1.5 GiB for one, 0.1 for each more, in place of
# 1.7 and 0.3.
LARGE = (
    "data.path=images",
    "model.name=linear",
    "model.classes=3",
    "model.zero_gamma=none",
    "data.crop=2400",
    "data.resize=2400",
    "schedule.warmup_epochs=0",
)
LARGE_GIB = 2.3


@pytest.mark.long
@pytest.mark.nightly
def test_the_largest_batch_is_tried_in_real_processes_under_a_limit(place: Path) -> None:
    tried = ("batch.local=1", "plan.ppn=1", "--find-batch", "--memory", str(LARGE_GIB), "--output", "found")
    ran = cputrain("sweep", "imagefolder", *LARGE, *tried, cwd=place)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    found = re.search(r"largest that trains: batch.local=(\d+) \(global batch \1\) in DRAM", ran.stdout)
    assert found, ran.stdout
    largest = int(found[1])
    assert f"next larger: {largest + 1}: out of memory: allocation failed: " in ran.stdout
    rows = list(csv.DictReader((place / "found/find-batch.csv").open()))
    for row in rows:
        assert row["result"] == ("trains" if int(row["local batch"]) <= largest else "out of memory")
        assert 0.5 < float(row["peak RSS GiB"]) <= LARGE_GIB
    assert len(rows) > 1
    known = ("batch.local=20", "data.crop=256", "--find-batch", "--memory", "1.4", "--output", "refused")
    ran = in_fork("sweep", "imagefolder", *SWEPT, *RESNET18, *known, cwd=place)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "next larger: 20: does not fit: resnet18 at 256 x 256 with 20 images per step needs 1.7" in ran.stdout
    none = here("sweep", "imagefolder", *TINY, "data.crop=512", *known[2:], cwd=place)
    assert "lenet at 512 x 512 with 1 image per step needs 6.58 GiB; --memory leaves " in refused(none)


@pytest.fixture
def large_group() -> Iterator[Path]:
    """A memory control group of LARGE_GIB."""
    with memory_group(round(LARGE_GIB * (1 << 30))) as group:
        yield group


@pytest.mark.long
@pytest.mark.nightly
def test_a_training_that_the_kernel_kills_for_its_memory_is_a_row(place: Path, large_group: Path) -> None:
    asked = ("plan.ppn=1", "epochs=1", "max_steps=1", "evaluate.every_epochs=null", "--grid", "batch.local=5,1")
    asked += ("plan.allocator=glibc",)  # with tcmalloc five images need less
    sweep = (sys.executable, "-m", "cputrain", "sweep", "imagefolder", *LARGE, *asked, "--output", "killed")
    ran = subprocess.run(
        inside(large_group, *sweep),
        cwd=place,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1, ran.stderr
    killed, done = csv.DictReader((place / "killed/sweep.csv").open())
    assert killed["status"] == "out of memory" and "killed by SIGKILL: out of memory: " in killed["ended by"]
    assert done["status"] == "done" and done["steps"] == "1", "the sweep goes on"


@pytest.mark.long
def test_ratios_are_written_at_an_interval_and_shown_as_a_table(place: Path) -> None:
    lars = (
        "optim.name=lars",
        "schedule.peak_rate=0.005",
        "log_norms_every_steps=3",
        "output=run",
        "data.last_batch=drop",
    )
    trained = in_fork("train", "imagefolder", *SMALL, *RESNET18, "plan.ppn=1", *lars, cwd=place)
    assert trained.returncode == 0, trained.stderr
    shown = here("bench", "optimizer", "run", cwd=place)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("step 6, learning rate ") and lines[1].split()[:3] == ["layer", "|w|", "|g|"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    w, g, ratio, trust = map(float, rows["layer3.0.conv1.weight"])
    assert ratio == pytest.approx(w / g, rel=1e-2)
    assert trust == pytest.approx(0.001 * w / (g + 5e-5 * w), rel=1e-2)
    assert rows["bn1.weight"][-1] == "1" and len(rows) == 62
    early = here("bench", "optimizer", "run", "--step", "4", cwd=place)
    assert refused(early).endswith("run contains no norms of step 4: give one of the steps 3, 6")
    assert "contains no run" in refused(here("bench", "optimizer", "images", cwd=place))
