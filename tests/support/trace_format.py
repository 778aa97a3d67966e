"""Rules of Chrome's trace event format that ui.perfetto.dev requires, for files with complete and async events."""

from itertools import groupby
from typing import Any

ROUNDING_US = 0.01


def check_trace(events: list[dict[str, Any]], ranks: int) -> None:
    """Fail unless each rank is a named process with named tracks, and its events are complete, in order and nested."""
    assert {event["ph"] for event in events} <= {"M", "X", "b", "e"}
    assert all(type(event["pid"]) is int and event["pid"] in range(ranks) for event in events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names) == list(range(ranks)) and all(name.startswith(f"rank {rank} ") for rank, name in names.items())
    tracks = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert timed and all((event["pid"], event["tid"]) in tracks and event["ts"] >= 0 for event in timed)
    slices = sorted((each for each in timed if each["ph"] == "X"), key=lambda each: (each["pid"], each["tid"]))
    for _, track in groupby(slices, key=lambda each: (each["pid"], each["tid"])):
        _check_nesting(sorted(track, key=lambda each: (each["ts"], -each["dur"])))
    begun = {(each["cat"], each["id"], each["pid"]): each["ts"] for each in timed if each["ph"] == "b"}
    ended = {(each["cat"], each["id"], each["pid"]): each["ts"] for each in timed if each["ph"] == "e"}
    assert begun.keys() == ended.keys() and all(ended[key] >= start for key, start in begun.items())


def _check_nesting(track: list[dict[str, Any]]) -> None:
    """Fail if slices of a track overlap without nesting, which viewers cannot draw."""
    open_until: list[float] = []
    for each in track:
        assert each["dur"] >= 0
        end = each["ts"] + each["dur"]
        while open_until and open_until[-1] <= each["ts"] + ROUNDING_US:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + ROUNDING_US, f"{each} crosses the end of the slice around it"
        open_until.append(end)
