"""A run's measures in the formats of other programs, in its folder metrics/: CSV, TensorBoard, MLPerf's log lines."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from cputrain.affinity.errors import InputError
from cputrain.files import errors_name, write_whole
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import EventLog, Events
from cputrain.runs.folder import METRICS

CSV_FIELDS = {
    "step": ("time", "step", "epoch", "loss", "rate", "images_per_s", "data_wait_s", "comm_wait_s"),
    "epoch": (
        *("time", "step", "epoch", "train_loss", "train_top1", "val_loss", "val_top1", "val_top5"),
        *("seconds", "images_per_s"),
    ),
}
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


RUN_START, RUN_STOP = b'"key": "run_start"', b'"key": "run_stop"'


class MetricFile(Protocol):
    """A file in another format, which takes the run's events as they are written."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Write what this format has of an event."""

    def close(self) -> None:
        """Write what is still in memory."""


class _Several:
    """The run's own log and the files in other formats."""

    def __init__(self, events: Events, others: Sequence[MetricFile]) -> None:
        self._events, self._others = events, others

    def write(self, event: str, **fields: Any) -> None:
        written = self._events.write(event, **fields)
        for other in self._others:
            other.take(written)


@contextmanager
def open_logs(recipe: Recipe) -> Iterator[EventLog]:
    """The event log of a run, and its metrics/ in the formats that the recipe's `log` requests."""
    with ExitStack() as stack:
        events = stack.enter_context(Events(recipe.folder))
        others = [OPENED[name](recipe) for name in recipe.log]
        for other in others:
            stack.callback(other.close)
        yield _Several(events, others) if others else events


def check_log_formats(recipe: Recipe) -> None:
    """Raise InputError where a format needs a package that is not installed."""
    if "tensorboard" in recipe.log and find_spec("tensorboard") is None:
        raise InputError(
            "log=tensorboard needs the package tensorboard, which this Python lacks: pip install "
            '"cputrain[tensorboard]", or remove it from log'
        )


def _drop_unfinished_line(path: Path) -> None:
    """Cut off what a crash or a full disk has left of a last line, which would spoil the next one."""
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


class CsvFiles:
    """steps.csv and epochs.csv, appended to; a resumed run repeats steps there as in events.jsonl."""

    def __init__(self, recipe: Recipe) -> None:
        folder = recipe.folder / METRICS
        folder.mkdir(exist_ok=True)
        self._paths = {name: folder / f"{name}s.csv" for name in CSV_FIELDS}
        for path in self._paths.values():
            _drop_unfinished_line(path)
        self._files = {
            name: path.open("a", encoding="utf-8", newline="", buffering=1) for name, path in self._paths.items()
        }
        for name, file in self._files.items():
            if file.tell() == 0:
                self._write(name, CSV_FIELDS[name])

    def take(self, event: Mapping[str, Any]) -> None:
        """A row of a step or an epoch; empty cells for values that there are not."""
        if fields := CSV_FIELDS.get(event["event"]):
            self._write(event["event"], [event.get(name) for name in fields])

    def _write(self, name: str, row: Sequence[object]) -> None:
        with errors_name(self._paths[name]):
            csv.writer(self._files[name], lineterminator="\n").writerow(row)

    def close(self) -> None:
        """Close both files."""
        for name, file in self._files.items():
            with errors_name(self._paths[name]):
                file.close()


class TensorBoardFiles:
    """Scalars for TensorBoard: `tensorboard --logdir RUN/metrics/tensorboard`, or a folder of runs."""

    def __init__(self, recipe: Recipe) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second, and an extra

        self._folder = recipe.folder / METRICS / "tensorboard"
        self._writer: Any = SummaryWriter(str(self._folder))

    def take(self, event: Mapping[str, Any]) -> None:
        """The scalars of a step or an epoch, over the steps done."""
        with errors_name(self._folder):
            for key, name in SCALARS.get(event["event"], {}).items():
                if (value := event.get(key)) is not None:
                    self._writer.add_scalar(name, value, event["step"], walltime=event["time"])
            if event["event"] == "epoch":
                self._writer.flush()

    def close(self) -> None:
        """Write what is still in memory."""
        with errors_name(self._folder):
            self._writer.close()


class MlperfFile:
    """mlperf.log: lines as MLPerf's logging rules have them (:::MLLOG and JSON), of the parts that a run has.

    A run has one run_start and one run_stop, however often it was started: the interval is that from its first start to
    its last end, pauses included.
    """

    def __init__(self, recipe: Recipe) -> None:
        folder = recipe.folder / METRICS
        folder.mkdir(exist_ok=True)
        self._recipe = recipe
        self._path = folder / "mlperf.log"
        self._file = self._path.open("a+b", buffering=0)
        self._begun = self._reopen()

    def take(self, event: Mapping[str, Any]) -> None:
        """The lines of a start, an epoch or an end."""
        lines: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "start": self._start,
            "epoch": self._take_epoch,
            "end": self._end,
        }
        if write := lines.get(event["event"]):
            write(event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _reopen(self) -> bool:
        """Whether the run has begun at an earlier start. Its interval goes on: the end of that start is no end of it,
        and what was written before an interval, or a part of a line, is written again."""
        if not self._path.is_file():  # a device has no earlier lines
            return False
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        while lines and (not lines[-1].endswith(b"\n") or RUN_STOP in lines[-1]):
            del lines[-1]
        begun = any(RUN_START in line for line in lines)
        self._file.truncate(sum(map(len, lines)) if begun else 0)
        return begun

    def _line(self, at: float, key: str, value: object, kind: str = "POINT_IN_TIME", **metadata: object) -> None:
        text = json.dumps(
            {
                "namespace": "",
                "time_ms": round(1000 * at),
                "event_type": kind,
                "key": key,
                "value": value,
                "metadata": {"file": "cputrain", "lineno": 0, **metadata},
            }
        )
        write_whole(self._file, f":::MLLOG {text}\n".encode(), self._path)

    def _start(self, event: Mapping[str, Any]) -> None:
        if self._begun:
            return
        self._begun = True
        recipe, at = self._recipe, event["time"]
        for key, value in {
            "submission_benchmark": recipe.model.name,
            "submission_platform": f"{event['workers']} workers on CPUs, {sys.platform}",
            "seed": recipe.seed,
            "global_batch_size": event["global_batch"],
            "train_samples": event["train_images"],
            "opt_name": recipe.optim.name,
            "opt_weight_decay": recipe.optim.weight_decay,
            "opt_learning_rate_warmup_epochs": recipe.schedule.warmup_epochs,
            "gradient_accumulation_steps": recipe.batch.accumulation,
        }.items():
            self._line(at, key, value)
        self._line(at, "run_start", None, "INTERVAL_START")

    def _take_epoch(self, event: Mapping[str, Any]) -> None:
        at, number = event["time"], event["epoch"]
        began = at - event["seconds"]
        self._line(began, "epoch_start", None, "INTERVAL_START", epoch_num=number - 1)
        if event["val_top1"] is not None:
            self._line(at, "eval_accuracy", event["val_top1"] / 100, epoch_num=number)
        self._line(at, "epoch_stop", None, "INTERVAL_END", epoch_num=number - 1)

    def _end(self, event: Mapping[str, Any]) -> None:
        status = "success" if event["status"] == "done" else "aborted"
        self._line(event["trained_until"], "run_stop", None, "INTERVAL_END", status=status)


OPENED: dict[str, Callable[[Recipe], MetricFile]] = {
    "csv": CsvFiles,
    "mlperf": MlperfFile,
    "tensorboard": TensorBoardFiles,
}
