"""A run's measures in the formats of other programs."""

import csv
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import Events, check_log_formats, open_events, read_events

START = {"workers": 2, "global_batch": 64, "train_images": 640, "bindings": []}
STEP = {"epoch": 0.5, "rate": 0.1, "images_per_s": 90.0, "data_wait_s": 0.01, "comm_wait_s": 0.02}
EPOCH = {"train_loss": 1.5, "train_top1": 40.0, "val_loss": None, "val_top5": None, "seconds": 2.0, "images_per_s": 9.0}
END = {"top1": 50.0, "top5": 90.0, "steps": 2, "images": 128, "time_to_train_s": 1.0, "status": "done"}


def logged(folder: Path, *formats: str) -> Path:
    """A run of two steps, started twice, logged in these formats."""
    recipe = Recipe(name="demo", output=str(folder), log=formats)  # type: ignore[arg-type]
    folder.mkdir(exist_ok=True)
    for first in (1, 2):
        with open_events(recipe.folder, recipe.log, recipe.mlperf_settings) as events:
            events.write("start", **START)
            events.write("step", step=first, loss=float("nan") if first == 2 else 2.0, **STEP)
            events.write("epoch", step=first, epoch=first, val_top1=50.0, **EPOCH)
            events.write("end", step=first, trained_until=5.0, **END)
    return folder / "metrics"


def test_csv_files_have_one_heading_however_often_the_run_is_resumed(tmp_path: Path) -> None:
    metrics = logged(tmp_path / "run", "csv")
    steps = list(csv.DictReader((metrics / "steps.csv").open()))
    assert [(row["step"], row["loss"], row["rate"]) for row in steps] == [("1", "2.0", "0.1"), ("2", "", "0.1")]
    epochs = list(csv.DictReader((metrics / "epochs.csv").open()))
    assert [(row["epoch"], row["val_top1"], row["val_loss"]) for row in epochs] == [
        ("1", "50.0", ""),
        ("2", "50.0", ""),
    ]
    assert len(read_events(tmp_path / "run")) == 8


def column(run: Path, file: str, name: str) -> list[str]:
    return [row[name] for row in csv.DictReader((run / f"metrics/{file}.csv").open())]


def mlperf_accuracies(run: Path) -> list[float]:
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in (run / "metrics/mlperf.log").open()]
    accuracies = [100 * line["value"] for line in lines if line["key"] == "eval_accuracy"]
    assert sum(line["key"] == "epoch_start" for line in lines) == len(accuracies)
    return accuracies


def test_metric_files_have_the_steps_and_epochs_of_a_resumed_run_once(tmp_path: Path) -> None:
    """Fails after step 7 of epochs of four steps, with a checkpoint after step 4; then before a step; then after
    step 6, with epoch 1 evaluated again; then repeats from step 5."""
    recipe = Recipe(name="demo", output=str(tmp_path), log=("csv", "mlperf"))
    expected = (
        (range(1, 8), "1 2 3 4 5 6 7", "50.0"),
        ((), "1 2 3 4 5 6 7", "50.0"),
        ((4, 5, 6), "1 2 3 4 5 6", "52.0"),
        (range(5, 9), "1 2 3 4 5 6 7 8", "52.0 53.0"),
    )
    for start, (steps, kept, accuracies) in enumerate(expected):
        with pytest.raises(ArithmeticError), open_events(recipe.folder, recipe.log, recipe.mlperf_settings) as events:
            events.write("start", **START)
            for step in steps:
                if step != 4 or start != 2:
                    events.write("step", step=step, loss=step + start / 10, **STEP)
                if step % 4 == 0:
                    events.write("epoch", step=step, epoch=step // 4, val_top1=50.0 + start, **EPOCH)
            raise ArithmeticError
        assert " ".join(column(tmp_path, "steps", "step")) == kept
        assert " ".join(column(tmp_path, "epochs", "val_top1")) == accuracies
        assert mlperf_accuracies(tmp_path) == [float(value) for value in accuracies.split()]
    assert column(tmp_path, "steps", "loss") == ["1.0", "2.0", "3.0", "4.0", "5.3", "6.3", "7.3", "8.3"]


def test_an_epoch_that_is_continued_after_a_stop_is_one_interval_for_mlperf_and_one_row(tmp_path: Path) -> None:
    recipe = Recipe(name="demo", output=str(tmp_path), log=("csv", "mlperf"))
    for steps in ((3,), (4, 8)):  # of four steps an epoch
        with open_events(recipe.folder, recipe.log, recipe.mlperf_settings) as events:
            events.write("start", **START)
            for step in steps:
                events.write("epoch", step=step, epoch=-(-step // 4), val_top1=25.0 * step / 4, **EPOCH)
    assert mlperf_accuracies(tmp_path) == [25.0, 50.0]
    assert column(tmp_path, "epochs", "step") == ["4", "8"]
    first = next(event for event in read_events(tmp_path) if event["event"] == "epoch")
    start = next(line for line in (tmp_path / "metrics/mlperf.log").open() if '"epoch_start"' in line)
    assert json.loads(start.removeprefix(":::MLLOG "))["time_ms"] == round(1000 * (first["time"] - first["seconds"]))


def test_a_training_that_fails_leaves_files_of_what_it_has_logged(tmp_path: Path) -> None:
    recipe = Recipe(name="demo", output=str(tmp_path), log=("csv",))
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/steps.csv").write_text("time,step\n17.5,3")
    with pytest.raises(ArithmeticError), open_events(recipe.folder, recipe.log, recipe.mlperf_settings) as events:
        for step in (1, 2, 1):
            events.write("step", step=step, loss=2.0, **STEP)
        raise ArithmeticError
    assert column(tmp_path, "steps", "step") == ["1"], "those that were repeated are left out"


def test_mlperf_lines_are_an_interval_of_the_run_with_its_evaluations(tmp_path: Path) -> None:
    lines = (logged(tmp_path / "run", "mlperf") / "mlperf.log").read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    found = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert all({"namespace", "time_ms", "event_type", "key", "value", "metadata"} == set(line) for line in found)
    by_key = {line["key"]: line for line in found}
    assert by_key["eval_accuracy"]["value"] == 0.5 and by_key["eval_accuracy"]["metadata"]["epoch_num"] == 2
    assert by_key["global_batch_size"]["value"] == 64 and by_key["run_stop"]["metadata"]["status"] == "success"
    kinds = {line["key"]: line["event_type"] for line in found}
    assert (kinds["run_start"], kinds["run_stop"]) == ("INTERVAL_START", "INTERVAL_END")


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_an_mlperf_log_has_one_interval_of_the_run_over_all_its_starts(end: str, tmp_path: Path) -> None:
    """MLPerf's compliance checker wants run_start, run_stop and each parameter exactly once."""
    recipe = Recipe(name="demo", output=str(tmp_path), log=("mlperf",))
    path = tmp_path / "metrics/mlperf.log"
    for start in (1, 2, 3):
        is_killed = end == "killed" and start < 3
        opened = open_events(recipe.folder, recipe.log, recipe.mlperf_settings)
        with Events(tmp_path) if is_killed else opened as events:
            assert path.exists() == (end == "stopped" or start == 3), "those of the starts before"
            events.write("start", **START)
            events.write("epoch", step=start, epoch=start, val_top1=50.0, **EPOCH)
            if start == 3 or end == "stopped":
                status = {"status": "done" if start == 3 else "stopped"}
                events.write("end", step=start, trained_until=5.0, **{**END, **status})
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]
    keys = [line["key"] for line in lines]
    once = ("run_start", "run_stop", "submission_platform", "submission_benchmark", "train_samples", "seed")
    assert all(keys.count(key) == 1 for key in once) and keys.count("epoch_stop") == 3
    assert keys[-1] == "run_stop" and lines[-1]["metadata"]["status"] == "success"
    assert keys.index("run_start") < keys.index("epoch_start")


@pytest.mark.parametrize(("file", "kind"), [("steps.csv", "csv"), ("epochs.csv", "csv"), ("mlperf.log", "mlperf")])
def test_a_full_disk_names_its_file(file: str, kind: str, tmp_path: Path) -> None:
    metrics = logged(tmp_path / "run")
    metrics.mkdir()
    (metrics / f".{file}.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: .*run/metrics/{file}"):
        logged(tmp_path / "run", kind)


@pytest.mark.slow
def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(logged(tmp_path / "run", "tensorboard") / "tensorboard"))
    found.Reload()
    assert [(scalar.step, scalar.value) for scalar in found.Scalars("train/loss")] == [(1, 2.0)]
    assert [scalar.value for scalar in found.Scalars("epoch/val_top1")] == [50.0, 50.0]


def scalars(metrics: Path, name: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(metrics / "tensorboard"))
    found.Reload()
    return [(scalar.step, round(scalar.value, 3)) for scalar in found.Scalars(name)]


@pytest.mark.slow
def test_tensorboard_has_the_steps_of_a_resumed_run_once(tmp_path: Path) -> None:
    """Killed after step 7 and again after step 6 of epochs of four steps, with checkpoints after steps 4 and 5."""
    recipe = Recipe(name="demo", output=str(tmp_path), log=("tensorboard",))
    for start, steps in enumerate((range(1, 8), range(5, 7), range(6, 9))):
        with open_events(recipe.folder, recipe.log, recipe.mlperf_settings) as events:
            events.write("start", **START)
            for step in steps:
                events.write("step", step=step, loss=step + start / 10, **STEP)
                if step % 4 == 0:
                    events.write("epoch", step=step, epoch=step // 4, val_top1=50.0 + start, **EPOCH)
    metrics = tmp_path / "metrics"
    assert scalars(metrics, "train/loss") == [
        *((step, float(step)) for step in (1, 2, 3, 4)),
        *((5, 5.1), (6, 6.2), (7, 7.2), (8, 8.2)),
    ]
    assert scalars(metrics, "epoch/val_top1") == [(4, 50.0), (8, 52.0)]


@pytest.mark.slow
def test_tensorboard_has_an_epoch_that_was_evaluated_again_once_and_its_last_step(tmp_path: Path) -> None:
    recipe = Recipe(name="demo", output=str(tmp_path), log=("tensorboard",))
    for start, steps in enumerate(((1, 2), (), (3, 4))):  # killed in the second evaluation, after its checkpoint
        with open_events(recipe.folder, recipe.log, recipe.mlperf_settings) as events:
            events.write("start", **START)
            if start == 1:
                events.write("epoch", step=2, epoch=1, val_top1=41.0, **EPOCH)
            for step in steps:
                events.write("step", step=step, loss=float(step), **STEP)
                if step == 2:
                    events.write("epoch", step=2, epoch=1, val_top1=40.0, **EPOCH)
    assert scalars(tmp_path / "metrics", "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert scalars(tmp_path / "metrics", "epoch/val_top1") == [(2, 41.0)]


def test_a_format_without_its_package_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cputrain.runs.events.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'pip install "cputrain\[tensorboard\]"'):
        check_log_formats(load_recipe("demo-digits", ["log=[csv,tensorboard]"]).log, {})
    check_log_formats(load_recipe("demo-digits", ["log=[csv]"]).log, {})
    with pytest.raises(InputError, match=r'log=mlflow needs .*: pip install "cputrain\[mlflow\]"'):
        check_log_formats(load_recipe("demo-digits", ["log=[csv,mlflow]"]).log, {})
    with pytest.raises(InputError, match="log"):
        load_recipe("demo-digits", ["log=[xml]"])


@pytest.mark.parametrize(
    ("uri", "store"),
    [
        ("", "sqlite"),
        ("sqlite:///x.db", "sqlite"),
        ("postgresql+psycopg2://me:secret@host/db", "postgresql"),
        ("mysql://host/db", "mysql"),
        ("http://localhost:5000", None),
        ("file:///runs", None),
        ("databricks", None),
    ],
)
@pytest.mark.parametrize("missing", [("sqlalchemy",), ("alembic",), ("sqlalchemy", "alembic")])
def test_mlflow_s_client_without_a_database_s_packages_is_refused_unless_it_needs_none(
    uri: str, store: str | None, missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cputrain.runs.events.find_spec", lambda name: None if name in missing else find_spec(name))
    env = {"MLFLOW_TRACKING_URI": uri} if uri else {}
    if store is None:
        check_log_formats(("mlflow",), env)
        return
    with pytest.raises(InputError) as refused:
        check_log_formats(("csv", "mlflow"), env)
    assert str(refused.value) == (
        f"log=mlflow needs {' and '.join(missing)} for its {store} store, which mlflow-skinny does not install: "
        'pip install "cputrain[mlflow]", or set MLFLOW_TRACKING_URI to a server'
    )


def test_a_folder_of_a_package_s_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb writes offline runs to ./wandb, which Python takes for a package without a file."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(InputError, match=r'pip install "cputrain\[wandb\]"'):
        check_log_formats(("wandb",), {})
