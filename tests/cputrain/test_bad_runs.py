"""Runs half written, of another version, without events or with hostile names: every command that reads them says what
is wrong in a line, or leaves it out and counts it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cputrain.cli import main
from tests.support.run_folders import BEGUN, RECIPE, write_run

EVIL = "\x1b]0;owned\x07<script>alert(1)</script>"


def without(*names: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        for name in names:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def appended(text: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with (run / "events.jsonl").open("a") as file:
            file.write(text)

    return change


def written(name: str, text: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).write_text(text)

    return change


def hostile(run: Path) -> None:
    start = {"event": "start", "time": BEGUN, "data": EVIL, "backend": EVIL, "bindings": []}
    (run / "events.jsonl").write_text(f"{json.dumps(start)}\n" + f"{json.dumps({**start, 'event': EVIL})}\n")
    (run / "environment.json").write_text(json.dumps({"torch": EVIL}))


OLD = '{"event": "step", "time": 1.0, "step": 1, "loss": 2.0}\n'  # without the fields of today
STATES: dict[str, tuple[Callable[[Path], None], str]] = {
    "just begun": (without("events.jsonl", "plan.json", "environment.json", "usage"), ""),
    "without events": (without("events.jsonl"), ""),
    "events alone": (without("recipe.yaml", "plan.json", "environment.json", "usage"), ""),
    "an empty log": (written("events.jsonl", ""), ""),
    "a last line cut short": (appended('{"event": "step", "time": 1'), ""),
    "broken lines": (appended("\x00\x00\n[1, 2]\n\n" + '{"event": "step"}\n'), "4 damaged lines"),
    "of an older version": (appended(OLD * 3), "3 damaged lines"),
    "of a later version": (appended('{"event": "unheard of", "time": 1.0, "x": [1]}\n'), ""),
    "an unknown key": (written("recipe.yaml", f"{RECIPE}later_key: 1\n"), "later_key"),
    "half a recipe": (written("recipe.yaml", "name: [x\n"), "recipe.yaml"),
    "half a plan": (written("plan.json", '{"workers": ['), "plan.json"),
    "half an environment": (written("environment.json", '{"torch": '), "environment.json"),
    "hostile names": (hostile, ""),
}


@pytest.fixture(params=STATES)
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    run = write_run(tmp_path / "run", ranks=2, epochs=2, steps=4)
    change, expected = STATES[request.param]
    change(run)
    return run, expected


def test_a_report_and_a_comparison_are_written_and_name_what_is_left_out(
    bad: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, expected = bad
    good = write_run(tmp_path / "good", ranks=2, epochs=2, steps=4, seed=2)
    for runs in ([run], [run, good]):
        page = tmp_path / "page.html"
        assert main(["report", *map(str, runs), "--output", str(page)]) == 0
        html = page.read_text()
        assert expected in html and "<script>alert" not in html and "\x1b" not in html
    assert "Traceback" not in capsys.readouterr().err


def test_it_can_be_watched(bad: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    run, expected = bad
    assert main(["watch", str(run), "--once"]) == 0
    text = capsys.readouterr().out
    assert "\x07" not in text and "\x1b" not in text
    if expected.endswith("lines"):
        assert expected in " ".join(text.split())


@pytest.mark.parametrize("command", ["eval", "export", "predict"])
def test_what_needs_a_checkpoint_says_what_is_missing(
    command: str, bad: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = bad
    more = {"export": "w.safetensors", "predict": "image.jpg"}
    words = [command, str(run), *([str(tmp_path / more[command])] if command in more else [])]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cputrain: ") and "\x1b" not in line


@pytest.mark.parametrize("command", ["report", "watch", "predict", "export"])
def test_what_is_not_there_or_no_run_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "photos").mkdir()
    for folder in (tmp_path / "nowhere", tmp_path / "photos"):
        assert main([command, str(folder), *(["image.jpg"] if command == "predict" else [])]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(folder) in line and ": " in line
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
