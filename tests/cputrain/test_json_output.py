"""--format json: one object on stdout with the fields that the reference lists, and everything else on stderr."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from site_pages.json_output import SHAPES

from cputrain.cli import main
from cputrain.cli.output import only_results_on_stdout
from tests.support.forked import in_fork
from tests.support.images import write_images
from tests.support.run_folders import write_run


def fields(command: str) -> set[str]:
    return {name for name, _ in SHAPES[command]}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("recipes",),
        ("recipes", "show", "mnist-sgd"),
        ("machines",),
        ("machines", "show", "skx-8160-2s"),
        ("keys", "optim"),
        ("job", "slurm", "imagefolder", "data.path=synthetic", "--nodes", "2", "--time", "1:00:00"),
        ("sweep", "linear-regression", "--grid", "optim.name=sgd,adam", "--dry-run"),
        ("sweep", "mnist-workers", "data.path=synthetic", "--workers", "1,64", "--grid", "batch.local=5", "--dry-run"),
        ("tune", "imagefolder", "data.crop=32", "--axes", "workers", "--dry-run"),
    ],
    ids=" ".join,
)
def test_the_fields_are_those_of_the_reference(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    inner = words[1] if words[0] in ("recipes", "machines") and len(words) > 1 else ""
    name = f"{words[0]} --dry-run" if words[0] in ("sweep", "tune") else " ".join(filter(None, (words[0], inner)))
    assert set(printed(capsys, *words)) == fields(name)


def test_the_script_of_a_job_is_the_one_that_is_printed_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("job", "pbs", "--nodes", "2", "--time", "1:00:00", "--machine", "skx-8160-2s")
    assert main([*words, "--", "true"]) == 0
    script = capsys.readouterr().out
    assert main([*words, "--format", "json", "--", "true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["script"] == script and found["submitted"] == [] and found["name"] == "true"


@pytest.mark.parametrize("words", [("recipes", "show", "mnist-sgd"), ("machines", "search", "hbm")], ids=" ".join)
def test_the_format_of_a_group_is_that_of_its_commands(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = printed(capsys, *words)
    assert main([words[0], "--format", "json", *words[1:]]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert main([words[0], "--format", "json", *words[1:], "--format", "text"]) == 0
    assert not capsys.readouterr().out.startswith("{")


def test_norms_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run", ranks=2, epochs=1, steps=4, usage=False))
    found = printed(capsys, "bench", "optimizer", run)
    assert set(found) == fields("bench optimizer") and found["layers"][0]["layer"] == "conv1.weight"
    assert main(["bench", "optimizer", run, "--format", "svg"]) == 2
    assert "cputrain report" in capsys.readouterr().err


def test_a_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "photos", classes=2, train=3, val=1)
    found = printed(capsys, "data", "info", str(tmp_path / "photos"))
    assert set(found) == fields("data info") and found["splits"]["train"]["images_of_class"] == [3, 3]
    assert found["prepared_with"] is None
    assert main(["prepare", "imagefolder", str(tmp_path / "photos"), str(tmp_path / "shards")]) == 0
    capsys.readouterr()
    found = printed(capsys, "data", "info", str(tmp_path / "shards"))
    assert found["splits"]["train"]["shards"] == 1 and found["prepared_with"]["kind"] == "imagefolder"
    found = printed(capsys, "data", "verify", str(tmp_path / "shards"))
    assert set(found) == fields("data verify") and found["samples"] == 8 and found["damaged"] == []
    sheet = str(tmp_path / "sheet.png")
    found = printed(capsys, "data", "show", str(tmp_path / "shards"), "--output", sheet)
    assert set(found) == fields("data show") and found == {"file": sheet, "split": "train", "images": 6}


def test_a_sweep_prints_its_results_alone_on_stdout(tmp_path: Path) -> None:
    words = (
        "linear-regression",
        "max_steps=2",
        "plan.ppn=1",
        "plan.threads=1",
        "--grid",
        "seed=1",
        "--output",
        "out",
        "--format",
        "json",
    )
    result = in_fork("sweep", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert set(found) == fields("sweep") and found["runs"][0]["status"] == "done" and "1/1" in result.stderr
    kept = json.loads((tmp_path / "out/sweep.json").read_text())
    assert found == {"folder": "out", **kept}


def test_what_other_processes_print_goes_to_stderr() -> None:
    code = (
        "import os, subprocess, sys; from cputrain.cli.output import only_results_on_stdout as only\n"
        "with only('json'): print('a'); subprocess.run(['echo', 'b']); os.write(1, b'c\\n')\n"
        "print('result')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n" and sorted(done.stderr.split()) == ["a", "b", "c"]
    with only_results_on_stdout("text"):
        assert os.fstat(1)
