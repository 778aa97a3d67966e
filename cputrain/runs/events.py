"""The event log of a run, events.jsonl: writing, reading, and export as CSV, for TensorBoard and as an MLPerf log."""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, convert
from typing_extensions import NotRequired
from typing_extensions import TypedDict as Fields

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import errors_name, write_with
from cputrain.files import METRICS, write_whole

# The checked fields of each event; unknown ones, as of a later version, are kept. The JSON is read without NaN.
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Maybe = float | None
Time = Annotated[float, Meta(ge=0, lt=250_000_000_000)]  # Unix seconds, before the year 9892
FILE = "events.jsonl"
MAX_BYTES = 64 << 20  # per line: the start event of 10,000 ranks is smaller
DIVERGENCE_FACTOR = 10.0  # times the loss of the first step: a loss that stays above this has diverged
PACKAGES = ("mlflow", "tensorboard", "wandb")  # formats that need the package, and have the extra, of their name
DATABASE = re.compile(r"(sqlite|mysql|mssql|postgresql)\b")  # schemes of MLflow's stores that need SQLAlchemy
DATABASE_PACKAGES = ("sqlalchemy", "alembic")  # of mlflow, but not of mlflow-skinny
SCALARS = {
    "step": {
        "loss": "train/loss",
        "rate": "train/learning_rate",
        "images_per_s": "speed/images_per_s",
        "data_wait_s": "speed/data_wait_s",
        "comm_wait_s": "speed/comm_wait_s",
    },
    "epoch": {
        "train_loss": "epoch/train_loss",
        "train_top1": "epoch/train_top1",
        "val_loss": "epoch/val_loss",
        "val_top1": "epoch/val_top1",
        "val_top5": "epoch/val_top5",
    },
}

MLPERF_SETTINGS = (
    "submission_benchmark",
    "submission_platform",
    "seed",
    "global_batch_size",
    "train_samples",
    "opt_name",
    "opt_weight_decay",
    "opt_learning_rate_warmup_epochs",
    "gradient_accumulation_steps",
)


class _Event(Fields):
    event: str
    time: Time
    monotonic_s: NotRequired[Time]


class _Binding(Fields):
    rank: Count
    host: str
    planned_pus: list[Count]
    pus: list[Count]
    memory_policy: str
    thread_pus: NotRequired[list[list[Count]]]


class _Start(_Event):
    bindings: list[_Binding]
    data: NotRequired[str]
    workers: NotRequired[Count]
    global_batch: NotRequired[Count]
    last_step: NotRequired[Count]
    steps_per_epoch: NotRequired[Count]
    train_images: NotRequired[Count]
    classes: NotRequired[Count]


class _Step(_Event):
    step: Count
    epoch: float
    loss: Maybe
    rate: float
    images_per_s: float
    data_wait_s: NotRequired[float]
    comm_wait_s: NotRequired[float]


class _Ranks(_Event):
    step: Count
    steps: Count
    seconds: list[float]
    data_wait_s: list[float]
    comm_wait_s: list[float]


class _Epoch(_Event):
    step: Count
    epoch: float
    train_loss: Maybe
    train_top1: Maybe
    val_loss: Maybe
    val_top1: Maybe
    val_top5: Maybe
    seconds: float
    images_per_s: float


class _Layer(Fields):
    layer: str
    weights: Maybe
    gradients: Maybe
    ratio: Maybe
    trust: Maybe


class _Ratios(_Event):
    step: Count
    rate: float
    layers: list[_Layer]


class _Warning(_Event):
    what: str
    step: NotRequired[Count]
    images: NotRequired[list[str]]


class _Checkpoint(_Event):
    step: Count


class _End(_Event):
    status: str
    steps: Count
    images: Count
    top1: Maybe
    top5: Maybe
    val_loss: NotRequired[Maybe]
    test_top1: NotRequired[Maybe]
    test_top5: NotRequired[Maybe]
    time_to_train_s: float
    wall_time_s: NotRequired[float]
    trained_until: NotRequired[Time]
    trained_until_monotonic_s: NotRequired[Time]


TYPES: dict[str, Any] = {
    "start": _Start,
    "step": _Step,
    "ranks": _Ranks,
    "epoch": _Epoch,
    "ratios": _Ratios,
    "warning": _Warning,
    "checkpoint": _Checkpoint,
    "end": _End,
}


def read_event(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the log; None if it is not a valid event. An event of an unknown name only needs a time."""
    try:
        value: Any = msgspec.json.decode(line)
        name = value.get("event") if isinstance(value, dict) else None
        convert(value, TYPES.get(name, _Event) if isinstance(name, str) else _Event)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    if name == "ranks" and not len(value["seconds"]) == len(value["data_wait_s"]) == len(value["comm_wait_s"]):
        return None  # not one value per rank
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Time of a run over all its starts, in seconds: `training_s` sums each start to its last event, `wall_s` is from
    the first start to the end, including the pauses between starts."""

    training_s: float
    wall_s: float
    starts: int


def timestamps() -> dict[str, float]:
    """Return the current time as event fields: Unix seconds, and this host's monotonic clock in seconds, which measures
    differences within one start."""
    return {"time": round(time.time(), 3), "monotonic_s": round(time.monotonic(), 3)}


def seconds_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Return the seconds between two timestamps or events of one start, from the monotonic clock if both have it, else
    from Unix time."""
    first, last = before.get("monotonic_s"), after.get("monotonic_s")
    passed: float = after["time"] - before["time"] if first is None or last is None else last - first
    return max(passed, 0.0)


class SilentEvents:
    """Event log of ranks other than 0, which writes nothing."""

    def write(self, event: str, **fields: Any) -> None:
        """Ignore the event."""


class Events:
    """Appends events to a run's events.jsonl; `write` returns after the operating system has taken the line."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._file = self._path.open("a+b", buffering=0)
        self._file.seek(0)
        text = self._file.read()
        self._file.truncate(text.rfind(b"\n") + 1)  # drop an incomplete last line, to which the next would be appended

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append {"event": event, "time": Unix seconds, "monotonic_s": seconds, ...} and return it; NaN and infinity
        become null, as JSON has neither."""
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        written = {"event": event, **timestamps(), **known}
        line = f"{json.dumps(written)}\n".encode()
        write_whole(self._file, line, self._path)
        return written

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()


EventLog = Events | SilentEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Events of a run as written, oldest first, and the number of damaged lines among them."""

    written: tuple[dict[str, Any], ...]
    damaged: int

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events without those from steps that a resumed run has repeated."""
        return without_repeated(self.written)

    @property
    def spent(self) -> TimeSpent:
        """The time that the run has taken up to its last event."""
        return time_of(self.written)


def read_log(folder: Path) -> Log:
    """Read a run's log once; empty if the folder has none."""
    lines = list(lines_of_events(folder))
    written = tuple(event for event in lines if event is not None)
    return Log(written=written, damaged=len(lines) - len(written))


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read a run's events, oldest first; [] if the folder has no log.

    Damaged lines and events from steps that a resumed run has repeated are left out.
    """
    return without_repeated(written_events(folder))


def without_repeated(written: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events without those from steps that were repeated later, and without those of epochs that were
    evaluated again."""
    events: list[dict[str, Any]] = []
    last = dict.fromkeys(("step", "epoch"), 0)
    for event in written:
        name = event["event"]
        if name in last:
            step = event["step"]
            if step <= last[name]:  # a repeated step repeats all that followed it
                events = [e for e in events if _step_of(e) < step or (name == "epoch" and e["event"] != "epoch")]
            last[name] = step
        events.append(event)
    return events


def _step_of(event: dict[str, Any]) -> int:
    step = event.get("step", 0)
    return step if isinstance(step, int) else 0


def time_spent(folder: Path, now: Mapping[str, float] | None = None) -> TimeSpent:
    """Return the time that a run has taken so far, including repeated steps.

    The last start counts up to `now`, by default up to its last event.
    """
    return time_of(written_events(folder), now)


def time_of(written: Iterable[dict[str, Any]], now: Mapping[str, float] | None = None) -> TimeSpent:
    """Compute the time of a run from its events; see `time_spent`."""
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
    # Between two starts, which may be on two hosts, only Unix time can be compared.
    pauses = [max(begin["time"] - end["time"], 0.0) for (_, end), (begin, _) in pairwise(spans)]
    return TimeSpent(training_s=training_s, wall_s=training_s + sum(pauses), starts=len(spans))


def _trained_until(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the event's time; for an end event the end of training, as the test images are evaluated after that."""
    if "trained_until" not in event:
        return event
    return {"time": event["trained_until"], "monotonic_s": event.get("trained_until_monotonic_s")}


def elapsed(events: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds from the first event to each, without the pauses between a stop and the next start."""
    since = [0.0] if events else []
    for before, event in pairwise(events):
        pause = event["event"] == "start"
        since.append(since[-1] + (0.0 if pause else seconds_between(before, event)))
    return since


def written_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Iterate over all events in the order written, without damaged lines."""
    return (event for event in lines_of_events(folder) if event is not None)


def lines_of_events(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Yield each line's event, None for a damaged line."""
    path = folder / FILE
    if not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(MAX_BYTES):
            if line.endswith(b"\n"):
                yield read_event(line)


@contextmanager
def open_events(
    folder: Path, formats: Collection[str] = (), mlperf: Mapping[str, object] | None = None
) -> Iterator[Events]:
    """Open a run's events.jsonl for writing. The exports to metrics/ in these formats are written on entry, to include
    events of killed starts, and on exit; TensorBoard's files are written continuously. `mlperf` has the training's
    settings by their names in MLPerf's log."""
    with TensorBoardEvents(folder) if "tensorboard" in formats else Events(folder) as events:
        export(folder, formats, mlperf or {})
        try:
            yield events
        finally:
            export(folder, formats, mlperf or {})


def check_log_formats(formats: Iterable[str], env: Mapping[str, str]) -> None:
    """Raise InputError if a log format needs a package that is not installed."""
    for name in [each for each in formats if each in PACKAGES]:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder, such as wandb/ with offline runs, has no origin
            raise InputError(
                f"log={name} needs the package {name}, which is not installed: pip install "
                f'"cputrain[{name}]", or remove it from log'
            )
        if name == "mlflow" and (missing := [each for each in DATABASE_PACKAGES if find_spec(each) is None]):
            if not (store := env.get("MLFLOW_TRACKING_URI")):
                from mlflow import get_tracking_uri  # its version and the working directory decide

                store = get_tracking_uri()
            if database := DATABASE.match(store):
                raise InputError(
                    f"log=mlflow needs {' and '.join(missing)} for its {database[0]} store, which mlflow-skinny does "
                    'not install: pip install "cputrain[mlflow]", or set MLFLOW_TRACKING_URI to a server'
                )


class TensorBoardEvents(Events):
    """Event log that also writes scalars by step for TensorBoard: `tensorboard --logdir RUN/metrics/tensorboard`, or a
    folder of runs. Scalars of an earlier start from steps that a resumed run repeats are hidden."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, and is an optional dependency

        super().__init__(folder)
        self._run, self._folder = folder, folder / METRICS / "tensorboard"
        self._open: Callable[..., Any] = SummaryWriter
        self._writer: Any = None  # from the first scalars on, whose step is the first that this start repeats

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append an event, and add its scalars."""
        written = super().write(event, **fields)
        if event in SCALARS:
            with errors_name(self._folder):
                if self._writer is None:
                    self._writer = self._open(str(self._folder), purge_step=written["step"])
                    if event == "epoch":  # resumed at the end of an epoch, whose last step is not repeated
                        kept = [e for e in read_events(self._run) if e["event"] == "step"]
                        self._add(next((e for e in kept if e["step"] == written["step"]), {}))
                self._add(written)
                if event == "epoch":
                    self._writer.flush()
        return written

    def _add(self, event: Mapping[str, Any]) -> None:
        for key, name in SCALARS.get(event.get("event", ""), {}).items():
            if (value := event.get(key)) is not None:
                self._writer.add_scalar(name, value, event["step"], walltime=event["time"])

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._writer is not None:
            with errors_name(self._folder):
                self._writer.close()


CSV_FIELDS = {
    name: ("time", *(field for field in TYPES[name].__annotations__ if field not in _Event.__annotations__))
    for name in ("step", "epoch")
}


def export(folder: Path, formats: Collection[str], mlperf: Mapping[str, object]) -> None:
    """Write the run's events to metrics/ in these formats: csv to steps.csv and epochs.csv, mlperf to mlperf.log, each
    replaced atomically. Raises OSError naming the file."""
    if "csv" in formats:
        for name in CSV_FIELDS:
            _write_lines(folder / METRICS / f"{name}s.csv", csv_lines(name, read_events(folder)))
    if "mlperf" in formats:
        _write_lines(folder / METRICS / "mlperf.log", mlperf_lines(mlperf, read_events(folder)))


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    write_with(path, lambda file: file.writelines(f"{line}\n".encode() for line in lines))


def csv_lines(name: str, events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the header and the rows of all steps or epochs, with empty cells for missing values. An epoch that was
    stopped and continued has its last row only."""
    yield ",".join(CSV_FIELDS[name])
    for event in {event[name]: event for event in events if event["event"] == name}.values():
        values = [event.get(field) for field in CSV_FIELDS[name]]
        yield ",".join("" if value is None else str(value) for value in values)


def mlperf_lines(settings: Mapping[str, object], events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield lines in MLPerf's log format (:::MLLOG and JSON) for the settings and the events that a run has.

    A run has one run_start and one run_stop, however often it was started: the interval from its first start to its
    last end, including pauses. So has an epoch that was continued after a stop; `events` are without repeated steps.
    """

    def line(at: float, key: str, value: object, kind: str = "POINT_IN_TIME", **metadata: object) -> str:
        entry = {"namespace": "", "time_ms": round(1000 * at), "event_type": kind, "key": key, "value": value}
        return f":::MLLOG {json.dumps({**entry, 'metadata': {'file': 'cputrain', 'lineno': 0, **metadata}})}"

    begun, end = False, None
    last_of = {event["epoch"]: event for event in events if event["event"] == "epoch"}
    epoch_starts: dict[int, float] = {}
    for event in events:
        at, name = event["time"], event["event"]
        if name == "start":
            end = None  # this start continues the interval
        if name == "start" and not begun:
            begun = True
            of_start = {
                "submission_platform": f"{event.get('workers')} workers on CPUs, {sys.platform}",
                "global_batch_size": event.get("global_batch"),
                "train_samples": event.get("train_images"),
            }
            for key in MLPERF_SETTINGS:
                yield line(at, key, of_start.get(key, settings.get(key)))
            yield line(at, "run_start", None, "INTERVAL_START")
        elif name == "epoch":
            number = event["epoch"]
            started = epoch_starts.setdefault(number, at - event["seconds"])
            if event is not last_of[number]:
                continue
            yield line(started, "epoch_start", None, "INTERVAL_START", epoch_num=number - 1)
            if event["val_top1"] is not None:
                yield line(at, "eval_accuracy", event["val_top1"] / 100, epoch_num=number)
            yield line(at, "epoch_stop", None, "INTERVAL_END", epoch_num=number - 1)
        elif name == "end":
            end = event
    if end is not None:
        status = "success" if end["status"] == "done" else "aborted"
        yield line(end.get("trained_until", end["time"]), "run_stop", None, "INTERVAL_END", status=status)
