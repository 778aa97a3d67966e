"""Sweeps: which trainings, what is kept of them, and what is said of them; reproductions likewise."""

import json
from pathlib import Path

import pytest

from affinity.errors import InputError
from cputrain.reproduce import Cell, cells, filled, large_batch_table, large_batch_verdict, with_seed
from cputrain.schema import SweepSection
from cputrain.sweep import Result, Variant, columns, grouped, table, variants
from tests.conftest import cputrain, refused, write_images
from tests.test_training import SMALL as TRAINING

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
    ("grids", "runs", "told"),
    [
        ((), (), "nothing to sweep over: give --grid KEY=A,B,C or --run"),
        (("batch.local",), (), "--grid 'batch.local' is not KEY=A,B,C"),
        (("batch.local=1,,2",), (), "is not KEY=A,B,C"),
        ((), ("epochs 3",), "run 'epochs 3': 'epochs' is not KEY=VALUE"),
        (("epochs=3,3",), (), "the sweep has epochs=3 twice"),
    ],
)
def test_what_is_no_sweep_is_refused(grids: tuple[str, ...], runs: tuple[str, ...], told: str) -> None:
    with pytest.raises(InputError) as error:
        variants(SweepSection(), grids, runs)
    assert told in str(error.value)


def result(top1: float | None, seed: int = 1, rate: str = "0.1", optimizer: str = "lars") -> Result:
    settings = (("optim.name", optimizer), ("schedule.peak_rate", rate), ("seed", str(seed)))
    variant = Variant(settings=settings)
    status = "done" if top1 else "failed with status 1"
    return Result(label=variant.label, run=variant.folder, settings=settings, status=status, top1=top1)


def test_trainings_that_differ_by_their_seed_are_one_line() -> None:
    groups = grouped([result(90.0), result(92.0, seed=2), result(50.0, rate="0.2"), result(None, seed=3)])
    assert [group.label for group in groups] == ["lars peak_rate 0.1", "lars peak_rate 0.2"]
    lines = table(groups).splitlines()
    assert "91.00 (90.00-92.00)" in lines[1] and "1 failed with status 1" in lines[1]
    assert lines[2].split()[3] == "50.00"


def test_columns_are_aligned() -> None:
    assert columns([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc   d"


def cell(batch: int, optimizer: str, *top1s: float | None) -> Cell:
    made = Cell(batch=batch, optimizer=optimizer, tried=(result(top1s[0]), result(1.0, rate="9")))
    return filled(made, [result(top1, seed=2) for top1 in top1s[1:]])


def test_each_optimizer_is_judged_at_its_best_rate_of_each_batch() -> None:
    tried = [
        (64, result(99.0, rate="0.1", optimizer="momentum")),
        (4096, result(None, rate="0.6", optimizer="momentum")),
        (4096, result(94.0, rate="0.04", optimizer="momentum")),
        (4096, result(98.5, rate="10")),
        (64, result(99.2, rate="0.2", optimizer="momentum")),
    ]
    found = cells(tried)
    chosen = [(64, "momentum", "0.2"), (4096, "momentum", "0.04"), (4096, "lars", "10")]
    assert [(c.batch, c.optimizer, c.rate) for c in found] == chosen
    assert with_seed(found[0].best.settings, 3).arguments == ("optim.name=momentum", "schedule.peak_rate=0.2", "seed=3")
    rows = large_batch_table([filled(c, []) for c in found])
    assert rows[1][:6] == ("64", "1", "momentum", "0.2", "99.20", "")
    assert rows[2] == ("4,096", "64", "momentum", "0.04", "94.00", "-5.20", "0.6: diverged")


def test_the_claim_holds_only_where_one_keeps_and_the_other_loses() -> None:
    base = cell(64, "momentum", 99.0, 99.2)
    small = [cell(1024, "momentum", 98.9), cell(1024, "lars", 99.2)]
    held = [base, *small, cell(4096, "momentum", 95.0), cell(4096, "lars", 98.4, 98.4)]
    assert large_batch_verdict(held) == (
        "holds: at 4,096 LARS is 0.70 points under the baseline of 99.10 %, momentum at its best rate 4.10 under"
    )
    better = [*held, cell(8192, "momentum", 92.0), cell(8192, "lars", 99.3)]
    assert large_batch_verdict(better).startswith("holds: at 8,192 LARS is 0.20 points over the baseline"), (
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
    """One training of the three diverges: it is told, the others are done, and a second call trains it alone."""
    rates = ("--run", "schedule.peak_rate=0.01", "--run", "schedule.peak_rate=0.02", "--run", "schedule.peak_rate=1e30")
    ran = cputrain("sweep", "imagefolder", *SMALL, *rates, cwd=place)
    assert ran.returncode == 1, ran.stderr
    assert "3/3  schedule.peak_rate=1e30" in ran.stdout and "lower the peak rate" in ran.stderr
    folder = place / "runs/imagefolder-sweep"
    told = json.loads((folder / "sweep.json").read_text())
    assert [run["status"] for run in told["runs"]] == ["done", "done", "failed with status 1"]
    assert len(told["runs"][0]["top1s"]) == 2 and told["runs"][0]["top1"] == told["runs"][0]["top1s"][-1]
    picture = (folder / "sweep.svg").read_text()
    assert "<svg" in picture and picture.count("peak_rate") >= 2
    before = (folder / "schedule.peak_rate=0.01/events.jsonl").read_bytes()
    again = cputrain("sweep", "imagefolder", *SMALL, *rates[:4], cwd=place)
    assert again.returncode == 0, again.stderr
    assert (folder / "schedule.peak_rate=0.01/events.jsonl").read_bytes() == before
    assert [line.split()[0] for line in again.stdout.splitlines()[-4:-2]] == ["peak_rate", "peak_rate"]
    other = cputrain("sweep", "imagefolder", *SMALL, *rates[:4], "epochs=3", cwd=place)
    assert "holds a run of another recipe: sweep --into another folder" in refused(other)


def test_a_sweep_is_looked_at_before_it_is_begun(place: Path) -> None:
    shown = cputrain("sweep", "imagefolder", *SMALL, "--grid", "batch.local=3,6", "--dry-run", cwd=place)
    assert shown.returncode == 0 and "2/2  batch.local=6  (global batch 6, 8 steps)" in shown.stdout
    wrong = cputrain("sweep", "imagefolder", *SMALL, "--grid", "batch.local=6,600", cwd=place)
    assert "batch.local=600 on 1 worker(s) needs 600 images a step" in refused(wrong)
    assert not (place / "runs").exists()


def test_ratios_are_written_at_an_interval_and_shown_as_a_table(place: Path) -> None:
    lars = ("optim.name=lars", "ratios_every=3", "output=run", "data.remainder=drop")
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
    assert refused(early).endswith("run has no ratios of step 4: it has 3, 6")
    assert "holds no run" in refused(cputrain("bench", "optimizer", "--ratios", "images", cwd=place))
