"""Runs that go on: what may change, from which folder, how long they took, and what is evaluated of them."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from cputrain.checkpoint.files import checkpoint_name, step_of
from cputrain.manifest import ScaleRecord
from cputrain.models.weights import read_weights
from cputrain.mpi.supervise.run import free_port
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.resume import changes_training, check_folder, differences, reason_not_to_resume
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import read_events
from tests.support.checkpoints import newest
from tests.support.commands import children_of, here, refused
from tests.support.forked import ended, forked, in_fork
from tests.support.images import write_images
from tests.support.trainings import LENET, PPN, raw_events, until_logged

ENDLESS = (
    *("data.path=images", *LENET, "batch.local=6", "epochs=900"),
    *("schedule.warmup_epochs=1", "comm.backend=gloo", f"plan.ppn={PPN}"),
)
SCALE = ScaleRecord(workers=2, global_batch=12, train_images=27, classes=3)


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def killed(place: Path, *arguments: str) -> int:
    """Train until a checkpoint is written, then kill a rank; the newest checkpoint's step."""
    with forked("-m", "cputrain", "train", *arguments, cwd=place) as process:
        until_logged(place / "run", "checkpoint", process)
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
        end = ended(process)
        assert end.status == 1 and "was ended by SIGKILL" in end.err, end.err
    return step_of(newest(place / "run"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after a checkpoint, resumed from another folder with other workers, and finished."""
    place = tmp_path_factory.mktemp("resume")
    write_images(place / "images", train=9, val=7)
    write_images(place / "fewer", train=8, val=7)
    (place / "elsewhere").mkdir()
    step = killed(place, "imagefolder", *ENDLESS, "output=run")
    assert [event["event"] for event in raw_events(place / "run")].count("end") == 0
    shutil.copytree(place / "run", place / "killed")
    time.sleep(0.5)  # a wait that only wall time has
    changed = (f"max_steps={step + 3}", "plan.ppn=1", "plan.threads=1", f"batch.accumulation={PPN}", "name=other")
    ended = in_fork("train", "../run", "--resume", *changed, cwd=place / "elsewhere")
    assert ended.returncode == 0, ended.stderr
    (place / "printed").write_text(ended.stdout)
    return place


def test_a_run_goes_on_from_another_folder_and_says_with_what(place: Path) -> None:
    printed, steps = (place / "printed").read_text(), read_events(place / "run")[-1]["steps"]
    workers = "1 worker instead of 2, " if PPN == 2 else ""
    passes = f"batch.accumulation: 1 -> {PPN}, " if PPN == 2 else ""
    expected = f"../run continues after step {steps - 3}, with {workers}name: imagefolder -> other, "
    message = f"{expected}{passes}max_steps: null -> "
    assert printed.count(message) == 1, printed
    recipe = load_recipe(str(place / "run/recipe.yaml"))
    assert (recipe.name, recipe.max_steps) == ("other", steps), "what is resumed with is what the folder holds"
    given = f'# Paths as given in "{place}": data.path="images", output="run"'
    assert (place / "killed/recipe.yaml").read_text().splitlines()[0] == given
    assert [e["step"] for e in read_events(place / "run") if e["event"] == "step"] == list(range(1, steps + 1))


def test_a_resumed_run_names_the_step_inside_its_checkpoint(place: Path) -> None:
    """Somebody may have renamed the folder."""
    run = place / "renamed"
    shutil.copytree(place / "killed", run, symlinks=True)
    before = newest(run)
    step = step_of(before)
    before.rename(before.with_name(checkpoint_name(step + 1000)))
    recipe = load_recipe(str(run / "recipe.yaml"), (f"output={run}",))
    start = next(event for event in raw_events(run) if event["event"] == "start")
    assert f"continues after step {step:,}" in check_folder(
        recipe, ScaleRecord(**{name: start[name] for name in ScaleRecord.model_fields}), resume=True, overwrite=False
    )


def test_time_to_train_is_that_of_all_starts_and_wall_time_has_the_waits(place: Path) -> None:
    events = raw_events(place / "run")
    second = [i for i, event in enumerate(events) if event["event"] == "start"][1]
    end = events[-1]
    first_s = events[second - 1]["time"] - events[0]["time"]
    second_s = end["trained_until"] - events[second]["time"]
    assert end["starts"] == 2 and end["time_to_train_s"] == pytest.approx(first_s + second_s, abs=0.05)
    assert end["wall_time_s"] == pytest.approx(end["trained_until"] - events[0]["time"], abs=0.05)
    assert end["wall_time_s"] > end["time_to_train_s"] + 0.5, "a wait lies between"
    printed = (place / "printed").read_text()
    assert f"time to train        {end['time_to_train_s']:.1f} s over 2 starts" in printed
    assert f"wall time            {end['wall_time_s']:.1f} s" in printed
    html = (place / "run/report.html").read_text()
    assert f"{end['time_to_train_s']:.1f} s over 2 starts" in html and "wall time" in html


def test_a_finished_run_is_not_trained_again(place: Path) -> None:
    before = contents(place / "run")
    again = here("train", "run", "--resume", cwd=place)
    assert again.returncode == 0 and "run is finished: " in again.stdout and again.stdout.count("\n") == 1
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = ("-m", "cputrain", "train", "run", "--resume")
    with forked(*command, cwd=place, **one, MASTER_PORT=str(free_port())) as process:
        rank = ended(process)
    assert rank.status == 0 and "run is finished: " in rank.out, rank.err
    assert contents(place / "run") == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("optim.name=adam",), "optim.name: momentum -> adam would change what the run in run computes"),
        (("schedule.peak_rate=0.5",), "schedule.peak_rate: auto -> 0.5 would change"),
        (("epochs=901",), "epochs: 900 -> 901 would change"),
        (
            ("data.path=fewer",),
            "data.path=fewer has 24 training images of 3 classes, but the run in run was trained on 27",
        ),
        (("batch.local=3",), f"the global batch is {3 * PPN} with "),
    ],
)
def test_what_would_change_the_training_is_refused_and_nothing_is_written(
    place: Path, settings: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    shutil.copytree(place / "killed", tmp_path / "run")
    for images in ("images", "fewer"):
        (tmp_path / images).symlink_to(place / images)
    before = contents(tmp_path / "run")
    same = ("data.path=images", "output=run", "--resume")
    printed = refused(here("train", "imagefolder", *ENDLESS, *same, *settings, cwd=tmp_path))
    assert message in printed and contents(tmp_path / "run") == before


@pytest.mark.long
def test_a_moved_run_is_evaluated_from_anywhere(place: Path) -> None:
    """Its recipe, its best or last checkpoint, or a list of them; progress is message by tenths of the batches."""
    shutil.copytree(place / "run", place / "moved")
    elsewhere = place / "elsewhere"
    several = ("--checkpoint", "../moved/checkpoints", "--checkpoint", "../run/checkpoints/best")
    shown = in_fork("eval", "../moved", *several, "plan.ppn=1", "evaluate.batch=1", cwd=elsewhere)
    assert shown.returncode == 0, shown.stderr
    end = raw_events(place / "run")[-1]
    message = f"step {end['steps']}  top-1 {end['top1']:.2f} %  top-5 {end['top5']:.2f} %  loss "
    assert message in shown.stdout and "21 images, each once, " in shown.stdout
    text, _, table = shown.stdout.partition("\n\n")
    head, *rows = (line.split() for line in table.splitlines())
    assert head == ["checkpoint", "step", "top-1", "%", "top-5", "%", "loss", "s"] and len(rows) >= 3
    tenths = [f"Evaluation [{done}/21]" for done in (3, 5, 7, 9, 11, 13, 15, 17, 19, 21)]
    assert [line for line in text.splitlines() if line.startswith("Evaluation")] == tenths * len(rows)
    # Intel's extension, with which a run may have been trained, need not be installed.
    found = in_fork("eval", "../moved", "--last", "--format", "json", f"plan.ppn={PPN}", "engine=ipex", cwd=elsewhere)
    data = json.loads(found.stdout)
    assert (data["workers"], data["batch"]) == (PPN, 6) and "Evaluation [2/2]" in found.stderr
    (last,) = data["results"]
    assert (last["step"], last["top1"], last["top5"]) == (end["steps"], end["top1"], end["top5"])
    assert last["images"] == 21 and last["checkpoint"].startswith("../moved/checkpoints/step-")
    assert last["loss"] == pytest.approx(float(next(row[4] for row in rows if row[0] == last["checkpoint"])), abs=1e-4)


def test_a_checkpoint_is_evaluated_and_exported_without_its_run(place: Path, tmp_path: Path) -> None:
    import torch

    shutil.copytree((place / "run/checkpoints/best").resolve(), tmp_path / "alone")
    alone = ("plan.ppn=1", "plan.threads=1")
    shown = in_fork("eval", "alone", "--format", "json", f"data.path={place}/images", *alone, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    best = max(event["val_top1"] for event in read_events(place / "run") if event["event"] == "epoch")
    (result,) = json.loads(shown.stdout)["results"]
    assert result["top1"] == best and result["images"] == 21
    for file in ("w.safetensors", "w.pt"):
        assert f"{file}: " in here("export", "alone", file, cwd=tmp_path).stdout
    torch_weights = torch.load(tmp_path / "w.pt", weights_only=True)
    weights = read_weights(tmp_path / "w.safetensors")[0].tensors
    assert all(torch.equal(value, weights[name]) for name, value in torch_weights.items()) and "fc.bias" in weights
    with safe_open(tmp_path / "w.safetensors", "pt") as opened:
        assert json.loads(opened.metadata()["classes"]) == ["class0", "class1", "class2"]
    assert "w.bin: the suffix decides the format" in refused(here("export", "alone", "w.bin", cwd=tmp_path))


def test_what_cannot_be_evaluated_is_refused_before_a_worker_starts(place: Path) -> None:
    (place / "junk.pt").write_text("junk")
    shutil.copytree(place / "run/checkpoints/best", place / "flipped")
    whole = (place / "flipped/model.safetensors").read_bytes()
    (place / "flipped/model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    requested = {
        ("imagefolder",): "eval of a recipe needs --checkpoint PATH: add it, or give a run folder instead",
        ("run", "--last", "--checkpoint", "junk.pt"): "cannot be used together",
        ("run", "--checkpoint", "nowhere"): "checkpoint nowhere does not exist",
        ("run", "--checkpoint", "images"): "checkpoint images is not a checkpoint and contains none",
        (
            "run",
            "--checkpoint",
            "junk.pt",
        ): "checkpoints/; to start a training from a file of weights, set model.weights=FILE",
        ("run", "--checkpoint", "flipped"): "flipped/model.safetensors is damaged: the checksum of ",
        (
            "run",
            "model.name=linear",
        ): "checkpoint run/checkpoints/best has weights of another model: unexpected conv1.bias",
    }
    for arguments, message in requested.items():
        assert message in refused(here("eval", *arguments, cwd=place))


def recipe(*settings: str) -> Recipe:
    return load_recipe("imagefolder", ("data.path=images", *settings))


def test_paths_are_compared_as_what_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    absolute = recipe(f"data.path={tmp_path}/images", "model.weights=/w.pt", "output=/moved")
    assert differences(recipe("model.weights=/w.pt"), absolute) == {}
    assert differences(recipe(), recipe("data.path=other"))["data.path"] == (f"{tmp_path}/images", f"{tmp_path}/other")


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        (("epochs=8",), ("epochs=9",), {"epochs"}),
        (("epochs=8", "schedule.name=constant"), ("epochs=9", "schedule.name=constant"), set()),
        ((), ("data.augment.rotate=0.1", "data.decoder=pillow"), {"data.augment.rotate"}),
        ((), ("comm.compression=bf16", "comm.bucket_mib=4"), {"comm.compression"}),
        ((), ("plan.ppn=1", "engine=compile", "max_steps=3", "evaluate.batch=5", "checkpoint.keep=9"), set()),
        ((), ("phases=[{from_epoch: 1, crop: 64}]",), {"phases"}),
        ((), ("seed=2", "data.path=staged", "on_nan=skip"), {"seed"}),
        (("model.zero_gamma=last_of_block",), ("model.zero_gamma=auto",), set()),
        (("model.zero_gamma=none",), ("model.zero_gamma=auto",), {"model.zero_gamma"}),
    ],
)
def test_only_what_decides_how_and_where_may_change(old: tuple[str, ...], new: tuple[str, ...], changes: set) -> None:
    a, b = recipe(*old), recipe(*new)
    assert set(changes_training(differences(a, b), b.schedule, b.phases)) == changes


@pytest.mark.parametrize(
    ("settings", "workers"),
    [(("batch.local=6",), 1), (("batch.local=6",), 4), (("batch.local=5", "batch.accumulation=5"), 3)],
)
def test_other_workers_need_the_same_global_batch(settings: tuple[str, ...], workers: int) -> None:
    new = recipe(*settings)
    batch = workers * new.batch.local * new.batch.accumulation
    now = ScaleRecord(workers=workers, global_batch=batch, train_images=27, classes=3)
    printed = reason_not_to_resume(Path("run"), recipe("batch.local=6"), new, SCALE, now)
    counts = "1 worker" if workers == 1 else f"{workers} workers"
    assert printed and printed.endswith(
        f"the global batch is {batch} with {counts}, but 12 in the run in run (2 workers): set batch.global=12"
    )
    advised = recipe("batch.local=6", "batch.global=12")
    assert (
        reason_not_to_resume(
            Path("run"), recipe("batch.local=6"), advised, SCALE, now.model_copy(update={"global_batch": 12})
        )
        is None
    )
    assert reason_not_to_resume(Path("run"), recipe("batch.local=6"), new, SCALE, SCALE) is None
    assert reason_not_to_resume(Path("run"), recipe("batch.local=6"), new, None, now) is None, "nothing was trained yet"
