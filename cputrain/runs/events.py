"""events.jsonl: the events of a run, written and read."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config
from pydantic_core import from_json
from typing_extensions import NotRequired
from typing_extensions import TypedDict as Fields

from cputrain.files import write_whole

MORE = ConfigDict(extra="allow", strict=True)  # fields of a later version are kept
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Maybe = Number | None
Time = Annotated[float, Field(strict=True, ge=0, lt=250_000_000_000)]  # Unix seconds, before the year 9892


@with_config(MORE)
class _Event(Fields):
    event: str
    time: Time
    monotonic_s: NotRequired[Time]


@with_config(MORE)
class _Binding(Fields):
    rank: Count
    host: str
    planned_pus: list[Count]
    pus: list[Count]
    memory_policy: str
    thread_pus: NotRequired[list[list[Count]]]


@with_config(MORE)
class _Start(_Event):
    bindings: list[_Binding]
    data: NotRequired[str]
    workers: NotRequired[Count]
    global_batch: NotRequired[Count]
    last_step: NotRequired[Count]
    steps_per_epoch: NotRequired[Count]
    train_images: NotRequired[Count]
    classes: NotRequired[Count]


@with_config(MORE)
class _Step(_Event):
    step: Count
    epoch: Number
    loss: Maybe
    rate: Number
    images_per_s: Number
    data_wait_s: NotRequired[Number]
    comm_wait_s: NotRequired[Number]


@with_config(MORE)
class _Ranks(_Event):
    step: Count
    steps: Count
    seconds: list[Number]
    data_wait_s: list[Number]
    comm_wait_s: list[Number]


def _one_value_for_each_rank(record: _Ranks) -> _Ranks:
    if not len(record["seconds"]) == len(record["data_wait_s"]) == len(record["comm_wait_s"]):
        raise ValueError("lists of different lengths")
    return record


@with_config(MORE)
class _Epoch(_Event):
    step: Count
    epoch: Number
    train_loss: Maybe
    train_top1: Maybe
    val_loss: Maybe
    val_top1: Maybe
    val_top5: Maybe
    seconds: Number
    images_per_s: Number


@with_config(MORE)
class _Layer(Fields):
    layer: str
    weights: Maybe
    gradients: Maybe
    ratio: Maybe
    trust: Maybe


@with_config(MORE)
class _Ratios(_Event):
    step: Count
    rate: Number
    layers: list[_Layer]


@with_config(MORE)
class _Warning(_Event):
    what: str
    step: NotRequired[Count]
    images: NotRequired[list[str]]


@with_config(MORE)
class _Checkpoint(_Event):
    step: Count


@with_config(MORE)
class _End(_Event):
    status: str
    steps: Count
    images: Count
    top1: Maybe
    top5: Maybe
    val_loss: NotRequired[Maybe]
    test_top1: NotRequired[Maybe]
    test_top5: NotRequired[Maybe]
    time_to_train_s: Number
    wall_time_s: NotRequired[Number]
    trained_until: NotRequired[Time]
    trained_until_monotonic_s: NotRequired[Time]


TYPES: dict[str, Any] = {
    "start": _Start,
    "step": _Step,
    "ranks": Annotated[_Ranks, AfterValidator(_one_value_for_each_rank)],
    "epoch": _Epoch,
    "ratios": _Ratios,
    "warning": _Warning,
    "checkpoint": _Checkpoint,
    "end": _End,
}
OF_ANY_NAME = TypeAdapter(_Event).validator
VALIDATORS = {name: TypeAdapter(fields).validator for name, fields in TYPES.items()}
STEP, READ_STEP = b'{"event": "step",', VALIDATORS["step"].validate_json


def read_event(line: bytes) -> dict[str, Any] | None:
    """The event of a line, None for a line that is none; an event of another name needs a time.

    Logs have a million steps: their lines are parsed and checked at once.
    """
    try:
        if line.startswith(STEP):
            step: dict[str, Any] = READ_STEP(line)
            return step if step["event"] == "step" else None  # a line may name two
        value = from_json(line)
        name = value.get("event") if isinstance(value, dict) else None
    except ValueError:  # a ValidationError is one
        return None
    validator = VALIDATORS.get(name, OF_ANY_NAME) if isinstance(name, str) else OF_ANY_NAME
    return value if validator.isinstance_python(value) else None


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


def moment() -> dict[str, float]:
    """Now, as an event has it: Unix seconds, and seconds of this host's clock that nobody sets, for differences within
    one start."""
    return {"time": round(time.time(), 3), "monotonic_s": round(time.monotonic(), 3)}


def seconds_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Seconds between two moments, or events, of one start. Logs without the clock that nobody sets have Unix seconds
    alone."""
    first, last = before.get("monotonic_s"), after.get("monotonic_s")
    passed: float = after["time"] - before["time"] if first is None or last is None else last - first
    return max(passed, 0.0)


class EventLog(Protocol):
    """A log that takes a run's events."""

    def write(self, event: str, **fields: Any) -> object:
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

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append {"event": event, "time": unix seconds, "monotonic_s": seconds, ...}, and return it; JSON has no NaN or
        infinity, those become null."""
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        written = {"event": event, **moment(), **known}
        line = f"{json.dumps(written)}\n".encode()
        write_whole(self._file, line, self._path)
        return written

    def __enter__(self) -> "Events":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A run's events as written, oldest first, and the number of damaged lines between them."""

    written: tuple[dict[str, Any], ...]
    damaged: int

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events without those of steps that a resumed run has repeated."""
        return without_repeated(self.written)

    @property
    def spent(self) -> TimeSpent:
        """The time that the run has taken until its last event."""
        return time_of(self.written)


def read_log(folder: Path) -> Log:
    """A run's log, read once; empty where the folder has none."""
    lines = list(_lines(folder))
    written = tuple(event for event in lines if event is not None)
    return Log(written=written, damaged=len(lines) - len(written))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """A run's events, oldest first; none where the folder has no log.

    Left out: damaged lines, and events from steps that a resumed run has repeated.
    """
    return without_repeated(written_events(folder))


def without_repeated(written: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without those of steps that were done again after them."""
    events: list[dict[str, Any]] = []
    last = 0
    for event in written:
        if event["event"] == "step":
            if event["step"] <= last:
                events = [earlier for earlier in events if _step_of(earlier) < event["step"]]
            last = event["step"]
        events.append(event)
    return events


def _step_of(event: dict[str, Any]) -> int:
    step = event.get("step", 0)
    return step if isinstance(step, int) else 0


def time_spent(folder: Path, now: Mapping[str, float] | None = None) -> TimeSpent:
    """The time that a run has taken so far, with repeated steps.

    The last start counts until the moment `now`, or, without `now`, until its last event.
    """
    return time_of(written_events(folder), now)


def time_of(written: Iterable[dict[str, Any]], now: Mapping[str, float] | None = None) -> TimeSpent:
    """The time of a run with these events, as `time_spent`."""
    spans: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for event in written:
        if event["event"] == "start":
            spans.append((event, event))
        elif spans:
            spans[-1] = (spans[-1][0], _trained_until(event))
    if not spans:
        return TimeSpent(training_s=0.0, wall_s=0.0, starts=0)
    if now is not None:
        spans[-1] = (spans[-1][0], now)
    training_s = sum(seconds_between(begin, end) for begin, end in spans)
    # Between two starts, maybe on two hosts, there are only Unix seconds.
    pauses = [max(begin["time"] - end["time"], 0.0) for (_, end), (begin, _) in pairwise(spans)]
    return TimeSpent(training_s=training_s, wall_s=training_s + sum(pauses), starts=len(spans))


def _trained_until(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """The event's moment, of an end that of the training: it is written after the test images are evaluated."""
    if "trained_until" not in event:
        return event
    return {"time": event["trained_until"], "monotonic_s": event.get("trained_until_monotonic_s")}


def elapsed(events: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds from the first event to each, without the pauses between a stop and the next start."""
    since = [0.0] if events else []
    for before, event in pairwise(events):
        pause = event["event"] == "start"
        since.append(since[-1] + (0.0 if pause else seconds_between(before, event)))
    return since


def written_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Every event in the order written, without damaged lines."""
    return (event for event in _lines(folder) if event is not None)


def _lines(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's event, None for a damaged one."""
    path = folder / FILE
    if not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(MOST_BYTES):
            if line.endswith(b"\n"):
                yield read_event(line)
