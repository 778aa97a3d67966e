"""Recorded steps as a trace in Chrome's format, which ui.perfetto.dev opens: ranks are processes."""

import json
from collections.abc import Sequence
from typing import Any

from affinity.topology.cpuset import format_list

TRACKS = ("step", "layers", "all-reduce")
MICRO = 1e6


def trace_json(ranks: Sequence[dict[str, Any]]) -> str:
    """The profiled steps of all ranks on one clock, which is that of their host. Times in microseconds."""
    first = min(step["start"] for rank in ranks for step in rank["profiled"])
    events: list[dict[str, Any]] = []
    for rank in ranks:
        events += _names(rank)
        for number, step in enumerate(rank["profiled"]):
            events += _events(rank["rank"], number, step, first)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """The names of a process and its tracks."""
    name = f"rank {rank['rank']} (CPUs {format_list(rank['pus'])})"
    process = {"ph": "M", "name": "process_name", "pid": rank["rank"], "args": {"name": name}}
    threads = [
        {"ph": "M", "name": "thread_name", "pid": rank["rank"], "tid": track, "args": {"name": title}}
        for track, title in enumerate(TRACKS)
    ]
    return [process, *threads]


def _events(rank: int, number: int, step: dict[str, Any], first: float) -> list[dict[str, Any]]:
    def event(name: str, track: int, start: float, end: float, **about: Any) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "cat": TRACKS[track],
            "pid": rank,
            "tid": track,
            "ts": MICRO * (start - first),
            "dur": MICRO * max(end - start, 0.0),
            "args": about,
        }

    return [
        event(f"step {number}", 0, step["start"], step["end"]),
        *(event(name, 0, start, end) for name, start, end in step["spans"]),
        *(event(name, 1, start, end, direction=direction) for name, direction, start, end in step["layer_spans"]),
        *(
            each
            for i, bucket in enumerate(step["buckets"])
            for each in _bucket(rank, f"{rank}.{number}.{i}", bucket, first)
        ),
    ]


def _bucket(rank: int, name: str, bucket: tuple[int, float, float], first: float) -> list[dict[str, Any]]:
    """The begin and the end of an all-reduce: buckets may overlap, which slices of a track may not."""
    size, start, end = bucket
    about = {"name": f"bucket of {size:,} bytes", "cat": TRACKS[2], "id": name, "pid": rank, "tid": 2}
    return [
        {**about, "ph": "b", "ts": MICRO * (start - first), "args": {"bytes": size}},
        {**about, "ph": "e", "ts": MICRO * (end - first)},
    ]
