"""log=[mlflow,wandb]: what the trackers' stores have of a run, read back with the packages' own clients."""

import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cputrain.runs import events, trackers
from cputrain.runs.trackers import Trackers, follow, read_record
from tests.support.commands import PYTHON
from tests.support.forked import in_fork
from tests.support.run_folders import write_run
from tests.support.trainings import SMALL, raw_events

ENDED = threading.Event()
ENDED.set()
OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}


def sent_run(folder: Path, tracker: str, **env: str) -> list[str]:
    """Send a run in two parts, stopped after 4 of its 6 steps, and resumed after step 2 with other settings; return
    the IDs that the tracker gave it."""
    write_run(folder, epochs=2, steps=3, usage=False)
    (folder / "metrics").mkdir()
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines]
    fourth = next(n for n, event in enumerate(events) if event["event"] == "step" and event["step"] == 4)
    third = next(n for n, event in enumerate(events) if event["event"] == "step" and event["step"] == 3)
    stopped = {"event": "end", "time": events[fourth]["time"], "status": "stopped", "steps": 4, "images": 512}
    stopped |= {"top1": None, "top5": None, "time_to_train_s": 3.0}
    (folder / "events.jsonl").write_text("".join(lines[: fourth + 1]) + f"{json.dumps(stopped)}\n")
    ids = [follow(tracker, folder, ENDED, env).run_id]
    (folder.parent / "elsewhere").mkdir()
    os.chdir(folder.parent / "elsewhere")
    with (folder / "events.jsonl").open("a") as file:
        file.writelines([lines[0], *lines[third:]])
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(f"{recipe}epochs: 10\n".replace("local: 32", "local: 16"))
    (folder / "report.html").write_text("<p>the report")
    return [*ids, follow(tracker, folder, ENDED, env).run_id]  # type: ignore[list-item]


@pytest.mark.slow
def test_mlflow_has_parameters_metrics_and_report_of_a_resumed_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)  # where the first start makes the default store, mlflow.db and mlruns/
    first, second = sent_run(tmp_path / "member-3", "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert first == second
    experiment = client.get_experiment_by_name("demo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (first, "member-3", "FINISHED")
    params = run.data.params
    assert (params["name"], params["model.name"], params["batch.local"]) == ("demo", "resnet50", "32")
    planned = {"workers": "4", "hosts": "1", "ppn": "4", "threads": "44", "compute_cores": "44", "loader_cores": "4"}
    assert {key: params[f"planned.{key}"] for key in planned} == planned
    assert params["environment.torch"] == "2.13.0+cpu"
    assert run.data.tags["resumed.batch.local"] == "16", "a parameter that MLflow lets nobody change"
    assert params["epochs"] == "10", "a parameter that is new"
    losses = client.get_metric_history(first, "train/loss")
    assert [point.step for point in losses] == [1, 2, 3, 4, 5, 6]
    events = raw_events(tmp_path / "member-3")
    steps = {event["step"]: event for event in events if event["event"] == "step"}
    assert [point.value for point in losses] == [steps[n]["loss"] for n in range(1, 7)]
    assert losses[0].timestamp == round(1000 * steps[1]["time"])
    assert [point.step for point in client.get_metric_history(first, "epoch/val_top1")] == [3, 6]
    assert run.data.metrics["final/top1"] == events[-1]["top1"]
    files = {file.path for file in client.list_artifacts(first)}
    assert files == {"recipe.yaml", "plan.json", "environment.json", "report.html"}
    assert list(tmp_path.glob(".*.partial")) == [], "of the database that the first run creates"
    assert read_record(tmp_path / "member-3", "mlflow").where == f"run {first} in sqlite:///{tmp_path}/mlflow.db"


def records_of(path: Path) -> Iterator[Any]:
    """The records in a file of W&B's offline runs: LevelDB's log format, blocks of 32 KiB with protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _crc, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.slow
@pytest.mark.long
def test_wandb_has_config_metrics_and_report_of_a_resumed_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "member-3"
    first, second = sent_run(folder, "wandb", **OFFLINE)
    wandb.teardown()  # as at a process's end: wandb-core writes what it still has
    assert first == second
    stores = sorted((folder / "metrics/wandb").glob(f"offline-run-*-{first}/run-{first}.wandb"))
    assert len(stores) == 2, "one for each start, with the same ID"
    records = [record for store in stores for record in records_of(store)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.display_name, run.project) for run in runs} == {(first, "member-3", "demo")}
    updates = [item for record in records for item in record.config.update]
    config = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}
    assert (config["model.name"], config["batch.local"], config["planned.workers"]) == ("resnet50", 16, 4)
    assert config["planned.threads"] == 44 and config["epochs"] == 10
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    events = raw_events(folder)
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    assert [row["train/loss"] for row in rows] == [losses[n] for n in range(1, 7)]
    assert [row["_step"] for row in rows if "epoch/val_top1" in row] == [3, 6]
    assert rows[-1]["final/top1"] == events[-1]["top1"]
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [1, 0]
    assert (stores[1].parent / "files/report.html").read_text() == "<p>the report"
    where = f"offline, to be sent by: wandb sync {folder}/metrics/wandb/offline-run-*-{first}"
    assert read_record(folder, "wandb").where == where


@pytest.mark.slow
def test_wandb_without_a_login_is_offline_and_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    folder = write_run(tmp_path / "run", epochs=1, steps=1, usage=False)
    (folder / "metrics").mkdir()
    assert follow("wandb", folder, ENDED, {}).where.startswith("offline, to be sent by: wandb sync ")


@pytest.mark.slow
def test_a_disabled_wandb_gets_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did not get is sent once it is enabled again, to the run that it had before."""
    pytest.importorskip("wandb")
    folder = write_run(tmp_path / "run", epochs=1, steps=1, usage=False)
    (folder / "metrics").mkdir()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    record = follow("wandb", folder, ENDED, {"WANDB_MODE": "disabled"})
    assert record == read_record(folder, "wandb") and (record.sent, record.run_id) == (0, None)
    assert record.where == "disabled by WANDB_MODE, nothing was sent"
    before = follow("wandb", folder, ENDED, OFFLINE)
    assert before.sent == (folder / "events.jsonl").stat().st_size
    after = follow("wandb", folder, ENDED, {"WANDB_MODE": "disabled"})
    assert (after.sent, after.run_id) == (before.sent, before.run_id) and after.where == record.where


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def ignores_sigterm(pid: int) -> bool:
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    )
    return bool(int(status["SigIgn"], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
def test_a_server_that_never_answers_delays_the_end_by_no_more_than_the_limit(
    silent_server: str, tmp_path: Path
) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    folder = write_run(tmp_path / "run", epochs=1, steps=1, usage=False)
    with Trackers() as trackers:
        trackers.start(folder, ("csv", "mlflow"), (), {"MLFLOW_TRACKING_URI": silent_server})
        children = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
        (tracker,) = (child for child in children if str(folder) in child.cmdline())
        while not ignores_sigterm(tracker.pid):
            time.sleep(0.05)
        tracker.terminate()  # as a scheduler signals all processes of a job
        time.sleep(0.2)
        assert trackers.failures() == []
        begun = time.monotonic()
        (line,) = trackers.finish(2.0)
    assert 2.0 <= time.monotonic() - begun < 18.0  # 20 without a limit
    assert line == (
        f"warning: log=mlflow was not finished after 2 s: {PYTHON} -m cputrain.runs.trackers mlflow {folder} "
        "sends the rest"
    )


def test_a_tracker_that_cannot_start_is_a_warning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=1, steps=1, usage=False)
    (folder / "metrics").write_text("")
    with Trackers() as trackers:
        trackers.start(folder, ("mlflow",), (), {})
        (warning,) = trackers.failures()
        assert warning.startswith("log=mlflow did not start: ") and trackers.failures() == trackers.finish() == []


def test_a_tracker_that_ends_at_once_is_dropped_with_one_warning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=1, steps=1, usage=False)
    (folder / "recipe.yaml").unlink()
    warning = only_failure(folder, {})
    assert warning.startswith("log=mlflow failed and is dropped: ")
    assert "give mlflow or wandb, and a run folder" in (folder / "metrics/mlflow.log").read_text()


def only_failure(folder: Path, env: dict[str, str]) -> str:
    """The only warning of a tracker that fails."""
    deadline, found = time.monotonic() + 300, []
    with Trackers() as trackers:
        trackers.start(folder, ("mlflow",), (), env)
        while not found:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            found = trackers.failures()
        assert trackers.failures() == trackers.finish() == []
    (warning,) = found
    return warning


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.nightly
def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    folder = write_run(tmp_path / "run", epochs=1, steps=1, usage=False)
    warning = only_failure(folder, {"MLFLOW_TRACKING_URI": "none://me:secret@nowhere"})
    assert warning.startswith("log=mlflow failed and is dropped: ")
    assert "none://nowhere" in warning and "secret" not in warning
    log = folder / "metrics/mlflow.log"
    assert "Traceback" in log.read_text() and log.stat().st_mode & 0o777 == 0o600


def sent_by_hand(*words: str, **env: str) -> tuple[int, str]:
    """The exit status and the only line on stderr of the command that sends a run by hand."""
    argv = [sys.executable, "-m", "cputrain.runs.trackers", *words]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **env})
    (line,) = done.stderr.splitlines()
    return done.returncode, line


def test_errors_of_the_command_that_sends_a_run_by_hand_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    folder = write_run(tmp_path / "run", epochs=1, steps=1, usage=False)
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow/__init__.py").write_text("raise ModuleNotFoundError('no module of it', name='mlflow')")
    again = "mend this, and the same command sends the rest"
    status, line = sent_by_hand("mlflow", str(folder), PYTHONPATH=f"{tmp_path}:{Path.cwd()}")
    assert status == 1 and line == f"trackers: log=mlflow of {folder} failed: no module of it; {again}"
    status, line = sent_by_hand("mlflow", str(folder), MLFLOW_TRACKING_URI="none://me:secret@nowhere")
    assert status == 1 and line.startswith(f"trackers: log=mlflow of {folder} failed: ")
    assert "none://nowhere" in line and "secret" not in line and line.endswith(again)


def test_what_is_no_run_or_tracker_is_refused_where_a_run_is_sent_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", epochs=1, steps=1, usage=False)
    (folder / "recipe.yaml").unlink()
    for words in (("mlflow", "x"), ("mlflow", str(folder))):
        assert trackers.main(words) == 2
        assert capsys.readouterr().err == f"trackers {shlex.join(words)}: give mlflow or wandb, and a run folder\n"


def test_a_package_that_is_not_installed_is_named_where_a_run_is_sent_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", epochs=1, steps=1, usage=False)
    monkeypatch.setattr(events, "find_spec", lambda _: None)
    assert trackers.main(("wandb", str(folder))) == 2
    err = capsys.readouterr().err
    assert err.startswith("trackers: log=wandb needs the package wandb, which is not installed: pip install ")
    assert err.count("\n") == 1


@pytest.mark.long
def test_a_training_with_a_server_that_refuses_ends_well_with_one_warning(place: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"  # closed again, so that nobody listens there
    env = {"MLFLOW_TRACKING_URI": address, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = in_fork("train", "imagefolder", *SMALL, "log=[mlflow]", cwd=place, **env)
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stdout.splitlines() if "mlflow" in line]
    assert warning.startswith("warning: log=mlflow ")
