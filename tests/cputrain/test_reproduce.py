"""The large-batch study trains and shows what it says, at the size of a test."""

import json
from pathlib import Path

import pytest

from tests.support.commands import here, refused
from tests.support.forked import in_fork
from tests.support.images import write_images

BASELINE = "batch.local=3 optim.name=momentum schedule.peak_rate=0.01"
RUNS = (
    BASELINE,
    "batch.local=3 optim.name=momentum schedule.peak_rate=1e30",
    "batch.local=6 optim.name=momentum schedule.peak_rate=1e30",
    "batch.local=6 optim.name=lars schedule.peak_rate=0.5",
)
SETTINGS = ("data.path=images", "model.name=lenet", "epochs=2", "plan.ppn=1", "comm.backend=gloo")


@pytest.mark.long
@pytest.mark.nightly
def test_the_large_batch_study_trains_each_rate_and_the_best_ones_with_more_seeds(tmp_path: Path) -> None:
    write_images(tmp_path / "images", train=12, val=6)
    study = (
        "reproduce",
        "large-batch",
        *SETTINGS,
        f"sweep.runs={json.dumps(RUNS)}",
        "--seeds",
        "2",
        "--output",
        "study",
    )
    ran = in_fork(*study, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("4 trainings with the first seed, then the best rates with 1 more seed\n")
    assert ["1e30: diverged" in line for line in ran.stdout.splitlines() if "momentum  0.01" in line] == [True]
    runs = json.loads((tmp_path / "study/sweep.json").read_text())["runs"]
    tried = [dict(run["settings"]) for run in runs]
    assert sorted((run["optim.name"], run["schedule.peak_rate"], run["seed"]) for run in tried) == [
        ("lars", "0.5", "1"),
        ("lars", "0.5", "2"),
        ("momentum", "0.01", "1"),
        ("momentum", "0.01", "2"),
        ("momentum", "1e30", "1"),
        ("momentum", "1e30", "1"),  # with two batches
    ]
    assert [run["status"] for run in runs].count("diverged") == 2
    assert "momentum" in (tmp_path / "study/large-batch.svg").read_text()
    finished = [path for path in tmp_path.glob("study/*/events.jsonl") if "1e30" not in path.parent.name]
    before = [path.read_bytes() for path in finished]
    again = in_fork(*study, cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.splitlines()[-6:] == ran.stdout.splitlines()[-6:]
    assert len(before) == 4 and [path.read_bytes() for path in finished] == before


@pytest.mark.parametrize(
    "runs",
    [
        (BASELINE,),
        (BASELINE, "batch.local=6 optim.name=lars"),
        (BASELINE, "batch.local=3 optim.name=lars", "batch.local=6 optim.name=lars", "batch.local=6"),
    ],
)
def test_trainings_that_cannot_decide_the_claim_are_refused(tmp_path: Path, runs: tuple[str, ...]) -> None:
    write_images(tmp_path / "images", train=12, val=6)
    ran = here("reproduce", "large-batch", *SETTINGS, f"sweep.runs={json.dumps(runs)}", cwd=tmp_path)
    assert refused(ran).startswith("cputrain: the study needs one optimizer at the smallest batch")
    assert not (tmp_path / "runs").exists()
