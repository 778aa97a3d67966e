"""A run watched from its event log alone, as it grows."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from cputrain.affinity.errors import InputError
from cputrain.cli import main
from cputrain.report.watch import MAX_POINTS, EventTail, WatchState, braille_curve, watch_screen
from tests.support.run_folders import BEGUN, write_run


def shown(state: WatchState, name: str = "demo", width: int = 120, **more: float) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w", encoding="utf-8"), color_system=None)  # noqa: SIM115, PTH123
    console.print(watch_screen(name, state, width=width, **more))
    return console.export_text()


def watched(folder: Path) -> WatchState:
    state = WatchState()
    state.add(EventTail(folder / "events.jsonl").read()[0])
    return state


def test_the_screen_tells_where_the_run_is_and_which_rank_is_slow(tmp_path: Path) -> None:
    state = watched(write_run(tmp_path / "run", end=False, usage=False))
    text = shown(state, now=(state.last_time or 0) + 5)
    assert "epoch 6.00 of 6  step 240 of 240" in text and "best top-1 76.13 %" in text
    assert "images/s" in text and "data wait 1 %" in text and "comm wait 14 %" in text
    assert "binding: as planned" in text and "12-23,60" in text
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("│ ") and "%" in line}
    assert "█" in rows["2"] and "█" not in rows["0"] + rows["1"] + rows["3"]


@pytest.mark.parametrize("width", [30, 80, 100])
def test_no_fact_is_broken_at_the_end_of_a_line(width: int, tmp_path: Path) -> None:
    state = watched(write_run(tmp_path / "run", usage=False))
    facts = [fact for line in shown(state, width=400).splitlines()[1:2] for fact in line.strip().split("  ")]
    assert len(facts) > 6
    text = shown(state, width=width)
    assert all(fact in text for fact in facts) and max(map(len, text.splitlines())) <= width


def test_time_left_is_that_of_the_steps_of_the_last_minute(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", usage=False)
    lines = (folder / "events.jsonl").read_text().splitlines()
    state = WatchState()
    state.add(event for event in map(json.loads, lines) if event.get("step", 0) <= 120)
    assert state.part == 0.5 and state.left_s == pytest.approx(120 * 0.8, rel=0.1)
    assert "left" in shown(state, now=state.last_time) and "no event for 10 min" in shown(
        state, now=(state.last_time or 0) + 600
    )


def test_new_lines_are_read_as_they_come_and_a_new_run_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read() == ([], False)
    line = '{"event": "later version", "time": 1.0}\n'
    path.write_text(line + line[:10])
    assert [event["event"] for event in tail.read()[0]] == ["later version"]
    with path.open("a") as file:
        file.write(line[10:] + "damaged\n")
    assert len(tail.read()[0]) == 1 and tail.damaged == 1
    path.unlink()
    path.write_text(line)
    events, replaced = tail.read()
    assert len(events) == 1 and replaced and tail.damaged == 0


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(InputError, match=r"cannot read .*events\.jsonl: Is a directory; name the folder of a training"):
        EventTail(tmp_path / "events.jsonl").read()


def test_steps_that_are_done_again_are_drawn_once() -> None:
    state = WatchState()
    step = {"event": "step", "time": BEGUN, "epoch": 1.0, "rate": 0.1, "images_per_s": 5.0}
    state.add({**step, "step": at, "loss": 1.0} for at in (1, 2, 3, 2))
    assert [at for at, _ in state.losses] == [1, 2]
    state.add({**step, "step": at, "loss": 9.0 if at == 777 else 1.0} for at in range(3, MAX_POINTS + 100))
    assert len(state.losses) < MAX_POINTS and max(value for _, value in state.losses) == 9.0


def test_a_name_cannot_command_the_terminal() -> None:
    state = WatchState()
    binding = {"rank": 0, "host": "\x1b[2Jn0[red]", "planned_pus": [0], "pus": [1], "memory_policy": "bind"}
    state.add([{"event": "start", "time": BEGUN, "bindings": [binding]}])
    state.add([{"event": "warning", "time": BEGUN, "what": "\x1b]0;title\x07[bold]", "step": 3}])
    text = shown(state, name="\x1b[31mrun")
    assert "\x1b" not in text and "\x07" not in text and "n0[red]" in text and "[bold]" in text
    assert "1 rank not as planned" in text and "1 (planned 0)" in text


def test_a_curve_goes_through_its_lowest_and_highest_point() -> None:
    lines = braille_curve([(0, 1.0), (1, 3.0), (2, 2.0)], width=30, height=4)
    assert len(lines) == 4 and lines[0].startswith("3 │") and lines[3].startswith("1 │")
    assert {len(line) for line in lines} == {30}
    assert braille_curve([], 30, 4) == [] and len(braille_curve([(1, 1.0), (2, 1.0)], 30, 4)) == 4


def test_where_there_is_no_terminal_it_prints_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", end=False, usage=False)
    assert main(["watch", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "step 240 of 240" in printed and "rank 0's loss " in printed
    (tmp_path / "new").mkdir()
    (tmp_path / "new/recipe.yaml").write_text("name: x\n")
    assert main(["watch", str(tmp_path / "new")]) == 0
    assert "the ranks are starting" in capsys.readouterr().out
    assert main(["watch", str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err
