"""Whole trainings with two real workers, small: folders, resumption, damaged images, every shipped recipe."""

import csv
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cputrain.files import recipe_names
from cputrain.recipe.loading import load_recipe
from cputrain.report.run import read_usage
from cputrain.runs.events import read_events
from tests.support.by_hand import plan_of, ranks_by_hand
from tests.support.commands import cputrain, here, refused
from tests.support.forked import in_fork
from tests.support.images import write_images
from tests.support.trainings import PPN, SMALL, trained


def names_what_it_uses(printed: str, run: Path) -> None:
    """Backend, engine, decoder and allocator, before the first epoch, as environment.json has them."""
    expected = [line for line in printed.splitlines() if line.startswith(("backend ", "faster: "))]
    environment = json.loads((run / "environment.json").read_text())
    decoder = environment["decoder"].partition(":")[0]
    in_use = {name: environment[name] for name in ("backend", "engine")} | {"decoder": decoder}
    in_use["allocator"] = environment["allocator"]
    if in_use["backend"] == "ccl":
        in_use["backend"] += f" {environment['backend_why']}"
    assert expected[0] == ", ".join(f"{name} {value}" for name, value in in_use.items())
    assert printed.index(expected[-1]) < printed.index("epoch 1/2")


def records_every_step(events: list[dict[str, Any]], run: Path) -> None:
    """Steps, epochs, ranks and bindings in the events; all of it, and the use of resources, in the report."""
    kinds = [event["event"] for event in events]
    steps = [event for event in events if event["event"] == "step"]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("epoch") == 2
    assert len(steps) == 2 * (27 // (6 * PPN))
    assert all({"loss", "rate", "images_per_s", "data_wait_s", "comm_wait_s"} <= step.keys() for step in steps)
    bindings = events[0]["bindings"]
    assert [b["pus"] for b in bindings] == [b["planned_pus"] for b in bindings] and len(bindings) == PPN
    assert events[-1]["steps"] == len(steps) and events[-1]["status"] == "done"
    html = (run / "report.html").read_text()
    drawn = {name for name in ("loss", "accuracy", "rate", "throughput", "parts", "cpu") if f'"chart-{name}"' in html}
    assert len(drawn) == 6 and "bound as planned." in html and "No resource use was recorded" not in html
    of_ranks = [event for event in events if event["event"] == "ranks"]
    assert sum(event["steps"] for event in of_ranks) == len(steps)
    assert {len(event[name]) for event in of_ranks for name in ("seconds", "data_wait_s", "comm_wait_s")} == {PPN}
    usage = read_usage(run)
    assert usage is not None and [*usage.workers] == [*usage.planned] == [*range(PPN)] and len(usage.hosts) == 1
    assert all(plan.memory_bytes for plan in usage.planned.values())


def test_a_training_from_start_to_report(place: Path) -> None:
    result = cputrain("train", "imagefolder", *SMALL, cwd=place)
    assert result.returncode == 0, result.stderr
    assert "epoch 2/2  loss " in result.stdout
    names_what_it_uses(result.stdout, place / "run")
    for printed in (
        "ready after ",
        "total training time",
        "time to train",
        "top-1",
        "top-5",
        "(21 images, each once)",
        "peak memory",
        "run/report.html",
    ):
        assert printed in result.stdout
    run = place / "run"
    assert {path.name for path in run.iterdir()} == {
        *(
            ".cputrain-lock",
            ".cputrain-run",
            "recipe.yaml",
            "plan.json",
            "environment.json",
            "events.jsonl",
            "checkpoints",
            "logs",
            "usage",
            "report.html",
        )
    }
    assert len(list((run / "logs").iterdir())) == PPN
    events = read_events(run)
    records_every_step(events, run)

    assert "add --resume or --overwrite" in refused(here("train", "imagefolder", *SMALL, cwd=place))
    expected = refused(here("train", "imagefolder", *SMALL, "epochs=3", cwd=place))
    assert "a run of another recipe (epochs: 2 -> 3)" in expected
    named = ("--checkpoint", "run/checkpoints/best", "--report", "mistakes.html")
    evaluated = in_fork("eval", "run/recipe.yaml", *named, cwd=place)
    assert evaluated.returncode == 0, evaluated.stderr
    best = max(event["val_top1"] for event in events if event["event"] == "epoch")
    assert f"top-1 {best:.2f} %" in evaluated.stdout and "21 images" in evaluated.stdout
    assert "Hardest: " in evaluated.stdout and "Confusion matrix" in (place / "mistakes.html").read_text()
    with (place / "mistakes.csv").open() as file:
        guesses = list(csv.DictReader(file))
    right = sum(row["label"] == row["predicted"] for row in guesses)
    assert len(guesses) == 21 and 100 * right / 21 == pytest.approx(best), "each image once, over all ranks"


@pytest.mark.long
def test_ranks_train_on_the_batches_that_their_plan_balances(place: Path) -> None:
    balanced = ("imagefolder", *SMALL, "plan.balance=batch", "plan.ppn=1")
    plan = plan_of(place, *balanced)
    first = plan["workers"][0]
    plan["workers"] = [{**first, "local_batch": 8}, {**first, "local_rank": 1, "local_batch": 4}]
    ranks = ranks_by_hand(place, plan, "train", *balanced)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    events = read_events(place / "run")
    assert [binding["local_batch"] for binding in events[0]["bindings"]] == [8, 4]
    assert events[-1]["images"] == 2 * (27 // 12) * 12
    plan["workers"][1]["local_batch"] = 5
    ranks = ranks_by_hand(place, plan, "train", *balanced)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert all("local batches (8, 5) is not 6" in rank.stderr.splitlines()[-1] for rank in ranks)


InTurn = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> InTurn:
    """Trainings by the same ranks: with accumulation, on damaged images, and at a rate that ends it."""
    place = tmp_path_factory.mktemp("in_turn")
    write_images(place / "images", train=9, val=7)
    write_images(place / "damaged", train=9, val=7)
    (place / "damaged/train/class1/002.jpg").write_bytes(b"\xff\xd8 not a jpeg")
    (place / "damaged/val/class0/001.jpg").write_bytes(b"")
    settings = (
        ("batch.local=3", "batch.accumulation=2", "output=accumulated"),
        ("data.path=damaged", "batch.local=9", "output=skipped"),  # so that every image is used
        ("schedule.peak_rate=1e30", "schedule.start_rate=1e30", "output=nan"),
    )
    return place, trained(place, PPN, *(("imagefolder", *SMALL, "comm.backend=gloo", *each) for each in settings))


def test_accumulation_trains_on_the_same_images(in_turn: InTurn) -> None:
    place, _ = in_turn
    end = read_events(place / "accumulated")[-1]
    assert end["images"] == 2 * (27 // (6 * PPN)) * 6 * PPN


def test_a_damaged_image_is_named_counted_and_skipped(in_turn: InTurn) -> None:
    place, result = in_turn
    assert "class0/001.jpg" in result.stdout and "(20 images, each once)" in result.stdout
    assert read_events(place / "skipped")[-1]["status"] == "done"
    warned = [event for event in read_events(place / "skipped") if event["event"] == "warning"]
    named = {name.split(": ")[0].split("damaged/")[1] for event in warned for name in event["images"]}
    assert {"val/class0/001.jpg"} <= named <= {"val/class0/001.jpg", "train/class1/002.jpg"}
    if PPN * 9 == 27 or PPN == 1:
        assert "train/class1/002.jpg" in named


def test_a_damaged_image_can_end_the_training(place: Path) -> None:
    (place / "images/train/class1/003.jpg").write_bytes(b"junk")
    every_image = ("data.on_error=raise", "data.last_batch=spread", "comm.backend=gloo")
    result = in_fork("train", "imagefolder", *SMALL, *every_image, cwd=place)
    assert result.returncode == 1
    assert "class1/" in result.stderr and "exited with status 1" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_loss_of_nan_ends_the_training(in_turn: InTurn) -> None:
    _, result = in_turn
    assert result.returncode == 1
    where = r"first NaN or Inf in the output of \S+"
    message = rf"rank \d: loss nan at step 1, {where}, learning rate 1e\+30: lower schedule.peak_rate"
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_shards_are_read_in_blocks(place: Path) -> None:
    assert here("prepare", "imagefolder", "images", "packed", cwd=place).returncode == 0
    blocks = (*SMALL, "data.path=packed", "data.block_mib=0.01", "data.on_error=raise")
    result = in_fork("train", "imagefolder", *blocks, cwd=place)
    assert result.returncode == 0, result.stderr
    assert read_events(place / "run")[-1]["images"] == 2 * (27 // (6 * PPN)) * 6 * PPN
    result = in_fork("train", "imagefolder", *SMALL, "data.block_mib=4", "output=other", cwd=place)
    assert result.returncode == 2 and "block_mib=4 is for shards, but the images are not in shards" in result.stderr


CROPS = {"alexnet-bn": 64, "lenet": 28, "mnist-cnn": 28, "linear": 28}


@pytest.mark.nightly
@pytest.mark.long
def test_every_shipped_recipe_trains_on_two_ranks(tmp_path: Path) -> None:
    """Two steps of each at a reduced size, evaluation, checkpoint and report included."""
    import torch

    from cputrain.models.networks import build_model
    from cputrain.recipe.schema import ModelSection

    write_images(tmp_path / "images", train=30)
    torch.save(build_model(ModelSection(), 7, 32).state_dict(), tmp_path / "weights.pt")

    def reduced(name: str) -> tuple[str, ...]:
        model = load_recipe(name).model
        crop = CROPS.get(model.name, 32)
        sizes = (f"data.crop={crop}", f"data.resize={crop}", "data.images_per_epoch=null", "batch.local=4")
        weights = ("model.weights=weights.pt",) if model.weights else ()
        steps = ("max_steps=2", "evaluate.every_epochs=null")
        data = () if load_recipe(name).data.generated else ("data.path=images",)
        return (name, *data, *sizes, *steps, *weights, f"output={name}")

    result = trained(tmp_path, PPN, *map(reduced, recipe_names()))
    assert result.returncode == 0, result.stderr
    for name in recipe_names():
        assert result.stdout.count(f"trained {name}\n") == PPN
        events = read_events(tmp_path / name)
        assert events[-1]["status"] == "done" and events[-1]["steps"] == 2, name
        assert all(math.isfinite(event["loss"]) for event in events if event["event"] == "step"), name


@pytest.mark.long
def test_a_compiled_network_trains_as_an_eager_one_does(place: Path) -> None:
    engines = ("native", "compile")
    result = trained(place, 1, *(("imagefolder", *SMALL, f"engine={each}", f"output={each}") for each in engines))
    assert result.returncode == 0, result.stderr
    eager, compiled = (
        [event["loss"] for event in read_events(place / engine) if event["event"] == "step"] for engine in engines
    )
    assert compiled == pytest.approx(eager, rel=1e-4) and len(eager) > 2
