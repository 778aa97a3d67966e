import json
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import write_bytes, write_with
from cputrain.report.page import write_report
from cputrain.report.watch import WatchState
from cputrain.runs.events import FILE, Events, TimeSpent, elapsed, read_events, read_log, time_spent
from cputrain.runs.folder import finished

ZERO = {"epoch": 0.0, "rate": 0.0, "images_per_s": 0.0}
NO_ACCURACY = dict.fromkeys(("train_loss", "train_top1", "val_loss", "val_top1", "val_top5"))
END = {"top1": None, "top5": None, "images": 5, "time_to_train_s": 1.0}


def test_events_are_appended_and_read_back(tmp_path: Path) -> None:
    for step in (1, 2):
        with Events(tmp_path) as events:
            events.write("step", **ZERO, step=step, loss=float("nan") if step == 2 else 0.5)
    assert [(e["event"], e["step"], e["loss"]) for e in read_events(tmp_path)] == [("step", 1, 0.5), ("step", 2, None)]


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    start = {"event": "start", "time": 1.0, "bindings": []}
    (tmp_path / FILE).write_text(f'{json.dumps(start)}\n{{"event": "st')
    assert read_events(tmp_path) == [start] and read_log(tmp_path).damaged == 0
    with Events(tmp_path) as events:
        events.write("end", steps=3, status="done", **END)
    assert [event["event"] for event in read_events(tmp_path)] == ["start", "end"]


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"null", b"[]", b"3", b'"step"', b"{}", b"{", b"\xff\xfe", b"\0" * 4096, b"[" * 100_000),
        *(b'{"event": null, "time": 1}', b'{"event": ["step"], "time": 1}', b'{"event": "step", "time": 1}'),
        b'{"event": "step", "time": 1, "step": "2", "epoch": 1, "loss": 1, "rate": 1, "images_per_s": 1}',
        b'{"event": "step", "time": 1, "step": -2, "epoch": 1, "loss": 1, "rate": 1, "images_per_s": 1}',
        b'{"event": "step", "time": NaN, "step": 2, "epoch": 1, "loss": 1, "rate": 1, "images_per_s": 1}',
        b'{"event": "step", "time": 1, "step": 2, "epoch": 1, "loss": 1, "rate": null, "images_per_s": 1}',
        b'{"event": "step", "time": 1, "step": ' + b"9" * 5000 + b"}",
        *(b'{"event": "start", "time": 1, "bindings": [null]}', b'{"event": "end", "time": 1, "status": "done"}'),
        *(b'{"event": "epoch", "time": 1, "epoch": 1}', b'{"event": "warning", "time": 1, "what": null}'),
        b'{"event": "ratios", "time": 1, "step": 1, "rate": 1, "layers": [1]}',
    ],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, line: bytes) -> None:
    with Events(tmp_path) as events:
        events.write("step", **ZERO, step=1, loss=0.5)
    with (tmp_path / FILE).open("ab") as file:
        file.write(line + b"\n")
    with Events(tmp_path) as events:
        events.write("step", **ZERO, step=2, loss=0.25)
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2]
    assert read_log(tmp_path).damaged == 1 and time_spent(tmp_path).starts == 0
    assert finished(tmp_path, 1) is None


def test_what_a_resumed_run_does_again_counts_once(tmp_path: Path) -> None:
    with Events(tmp_path) as events:
        for step in (1, 2, 3, 4):
            events.write("step", **ZERO, step=step, loss=0.5)
            events.write("epoch", step=step, epoch=1, seconds=1.0, images_per_s=1.0, **NO_ACCURACY)
        events.write("start", workers=2, bindings=[])
        for step in (3, 4, 5):
            events.write("step", **ZERO, step=step, loss=0.25)
    expected = [(e["event"], e.get("step"), e.get("loss")) for e in read_events(tmp_path)]
    assert expected == [
        ("step", 1, 0.5),
        ("epoch", 1, None),
        ("step", 2, 0.5),
        ("epoch", 2, None),
        ("start", None, None),
        ("step", 3, 0.25),
        ("step", 4, 0.25),
        ("step", 5, 0.25),
    ]


def test_the_time_of_a_run_is_summed_over_its_starts_whether_they_ended_or_not(tmp_path: Path) -> None:
    assert time_spent(tmp_path) == TimeSpent(training_s=0.0, wall_s=0.0, starts=0)
    times = {"start": (10.0, 100.0, 200.0), "step": (11.0, 15.5, 101.0, 203.0)}
    lines = sorted(
        (at, {"event": event, "time": at, "step": 1, "loss": 1.0, "bindings": [], **ZERO})
        for event in times
        for at in times[event]
    )
    (tmp_path / FILE).write_text("".join(f"{json.dumps(event)}\n" for _, event in lines) + '{"event": "st')
    assert time_spent(tmp_path) == TimeSpent(training_s=5.5 + 1.0 + 3.0, wall_s=193.0, starts=3)
    assert time_spent(tmp_path, now={"time": 210.0}) == TimeSpent(training_s=5.5 + 1.0 + 10.0, wall_s=200.0, starts=3)


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_changes_no_time(tmp_path: Path, by_s: float) -> None:
    """It is set after two seconds of the first start, and again after two seconds of the second one."""
    lines = []
    for begun, wall in ((500.0, 10_000.0), (7.0, 10_100.0 + by_s)):
        lines.append({"event": "start", "time": wall, "monotonic_s": begun, "bindings": []})
        for step, jump in ((1, 0.0), (2, 0.0), (3, by_s), (4, by_s)):
            moment = {"time": wall + step + jump, "monotonic_s": begun + step}
            lines.append({"event": "step", **moment, "step": step, "loss": 1.0, **ZERO})
    (tmp_path / FILE).write_text("".join(f"{json.dumps(event)}\n" for event in lines))
    assert time_spent(tmp_path) == TimeSpent(training_s=8.0, wall_s=104.0, starts=2)
    now = {"time": 10_110.0 + 2 * by_s, "monotonic_s": 17.0}
    assert time_spent(tmp_path, now) == TimeSpent(training_s=14.0, wall_s=110.0, starts=2)
    assert elapsed(read_log(tmp_path).written) == [0.0, 1.0, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    state = WatchState()
    state.add({**event, "last_step": 14} for event in lines)
    assert state.left_s == 10.0


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a/b.json"
    write_bytes(path, b"old")

    def fail(file) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_with(path, fail)
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_a_report_of_an_unfinished_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no run"):
        write_report(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: <x>\n")
    with Events(tmp_path) as events:
        events.write("start", bindings=[])
        events.write("warning", what="damaged images", images=["<b>.jpg"])
        events.write("end", steps=3, status="stopped", **END)
        events.write("start", bindings=[])
    html = write_report(tmp_path).read_text()
    assert (
        "trained for" in html
        and "running, at" in html
        and "started again" in html
        and "&lt;b&gt;.jpg" in html
        and "<b>.jpg" not in html
    )


def test_a_report_of_numbers_that_were_lost_and_of_a_run_going_on(tmp_path: Path) -> None:
    """No finite loss, no evaluation, an epoch in two parts; started again after its end, elsewhere."""
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    nothing = dict.fromkeys(("train_loss", "val_loss", "val_top1", "val_top5"))
    binding = {"rank": 0, "planned_pus": [0], "pus": [0], "memory_policy": "default"}
    with Events(tmp_path) as events:
        for host, epoch_s in (("old", 11.5), ("new", 22.5)):
            events.write("start", bindings=[{**binding, "host": host}])
            if host == "old":
                events.write("step", step=1, epoch=0.5, loss=float("nan"), rate=0.1, images_per_s=5.0)
            events.write("epoch", step=1, epoch=1, train_top1=10.0, seconds=epoch_s, images_per_s=5.0, **nothing)
            if host == "old":
                events.write("end", step=1, top1=1.0, top5=2.0, steps=1, images=5, time_to_train_s=1.0, status="done")
    html = write_report(tmp_path).read_text()
    assert "running, at" in html and "<td>new</td>" in html and "<td>old</td>" not in html
    assert "<td>22.5</td>" in html and "<td>11.5</td>" not in html
    titles = {title: f"<h3>{title}</h3>" in html for title in ("Loss", "Accuracy", "Learning rate", "Throughput")}
    assert titles == {"Loss": False, "Accuracy": True, "Learning rate": True, "Throughput": True}
