"""events.jsonl, the log of a run: one JSON object per line."""

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from cputrain.runs.event_types import is_event

FILE = "events.jsonl"
MOST_BYTES = 64 << 20  # of a line: the start of 10,000 ranks has less
DIVERGENCE_FACTOR = 10.0  # times the first step's loss; a loss that stays above it has diverged


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Seconds of a run over all its starts: `training_s` from each start to its last event, `wall_s` from the first
    start to the end, with the pauses between starts."""

    training_s: float
    wall_s: float
    starts: int


class EventLog(Protocol):
    """A log that takes a run's events."""

    def write(self, event: str, **fields: Any) -> None:
        """Append an event with its fields."""


class SilentEvents:
    """The event log of ranks other than 0, which writes nothing."""

    def write(self, event: str, **fields: Any) -> None:
        """Ignore the event."""


class Events:
    """Appends to a run's events.jsonl; a line has been handed to the operating system when `write` returns."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._file = self._path.open("a+b", buffering=0)
        self._file.seek(0)
        text = self._file.read()
        self._file.truncate(text.rfind(b"\n") + 1)  # drop an incomplete last line, which would spoil the next one

    def write(self, event: str, **fields: Any) -> None:
        """Append {"event": event, "time": unix seconds, ...}; JSON has no NaN or infinity, those become null."""
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        line = f"{json.dumps({'event': event, 'time': round(time.time(), 3), **known})}\n".encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the next write would fail like this
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """A run's events, oldest first; none where the folder has no log.

    Left out: damaged lines, and events from steps that a resumed run has repeated.
    """
    events: list[dict[str, Any]] = []
    last = 0
    for event in written_events(folder):
        if event["event"] == "step":
            if event["step"] <= last:
                events = [earlier for earlier in events if _step_of(earlier) < event["step"]]
            last = event["step"]
        events.append(event)
    return events


def _step_of(event: dict[str, Any]) -> int:
    step = event.get("step", 0)
    return step if isinstance(step, int) else 0


def time_spent(folder: Path, now: float | None = None) -> TimeSpent:
    """The time that a run has taken so far, with repeated steps.

    The last start counts until `now` (unix seconds), or, without `now`, until its last event.
    """
    spans: list[tuple[float, float]] = []
    for event in written_events(folder):
        if event["event"] == "start":
            spans.append((event["time"], event["time"]))
        elif spans:
            # an end is written after the test images are evaluated, which is no training
            spans[-1] = (spans[-1][0], event.get("trained_until", event["time"]))
    if not spans:
        return TimeSpent(training_s=0.0, wall_s=0.0, starts=0)
    if now is not None:
        spans[-1] = (spans[-1][0], now)
    return TimeSpent(
        training_s=sum(max(end - begin, 0.0) for begin, end in spans),
        wall_s=max(spans[-1][1] - spans[0][0], 0.0),
        starts=len(spans),
    )


def written_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Every event in the order written, without damaged lines."""
    return (event for event in _lines(folder) if event is not None)


def damaged_lines(folder: Path) -> int:
    """The number of lines that are no events, and are left out everywhere; a last one that was cut short is none."""
    return sum(event is None for event in _lines(folder))


def _lines(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's event, None for a damaged one."""
    path = folder / FILE
    if not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(MOST_BYTES):
            if line.endswith(b"\n"):
                yield _event(line)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if is_event(value) else None
