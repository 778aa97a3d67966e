"""A run's folder -> report.html, self-contained."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from affinity.errors import InputError
from cputrain.files import write_atomic
from cputrain.report.curves import kind_of, training_curves, unit_of
from cputrain.report.usage import Usage, host_rows, network_rows, read_usage, worker_rows
from cputrain.report.usage_picture import usage_picture
from cputrain.runs.events import FILE, TimeSpent, damaged_lines, read_events, time_spent
from cputrain.runs.folder import RECIPE, REPORT
from mpi.usage.file import FOLDER as USAGE


def write_report(folder: Path) -> Path:
    """Write the report of a training, finished or not, or of the resource use of a launched command.

    Raises InputError where the folder contains neither.
    """
    trained = (folder / FILE).is_file() and (folder / RECIPE).is_file()
    usage = read_usage(folder)
    if not trained and usage is None:
        raise InputError(f"{folder} contains no run ({RECIPE} and {FILE}, or {USAGE}/): give a run's output folder")
    environment = Environment(
        loader=PackageLoader("cputrain.report", ""), undefined=StrictUndefined, autoescape=True, trim_blocks=False
    )
    html = environment.get_template("page.html.j2").render(
        name=folder.resolve().name,
        training=_training(folder) if trained else None,
        use=_use(usage) if usage else None,
    )
    write_atomic(folder / REPORT, html.encode())
    return folder / REPORT


def _training(folder: Path) -> dict[str, Any]:
    """The page's values about a training."""
    events = _last_of_each_epoch(read_events(folder))
    damaged = damaged_lines(folder)
    lost = [("damaged lines", f"{damaged:,} of {FILE}, left out")] if damaged else []
    return {
        "summary": _summary(events, time_spent(folder)) + lost,
        "curves": training_curves(events),
        "epochs": [e for e in events if e["event"] == "epoch"],
        "warnings": [e for e in events if e["event"] == "warning"],
        "unit": unit_of(events),
        "bindings": next((e["bindings"] for e in reversed(events) if e["event"] == "start"), []),
        "recipe": (folder / RECIPE).read_text(),
    }


def _last_of_each_epoch(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with one epoch event for each epoch: a run that stops within an epoch and resumes writes two."""
    last = {e["epoch"]: e for e in events if e["event"] == "epoch"}
    return [e for e in events if e["event"] != "epoch" or e is last[e["epoch"]]]


def _use(usage: Usage) -> dict[str, Any]:
    """The page's values about resource use."""
    return {
        "picture": usage_picture(usage),
        "workers": worker_rows(usage),
        "hosts": host_rows(usage),
        "network": network_rows(usage),
    }


def _summary(events: list[dict[str, Any]], spent: TimeSpent) -> list[tuple[str, str]]:
    end = next((e for e in reversed(events) if e["event"] in ("start", "end")), None)
    kind = kind_of(events)
    data = [("data", kind)] if kind != "images" else []
    if spent.starts > 1:
        took = [("time to train", f"{spent.training_s:.1f} s over {spent.starts} starts")]
        took += [("wall time", f"{spent.wall_s:.1f} s")]
    else:
        took = [("time to train", f"{spent.training_s:.1f} s")]
    if end is None or end["event"] == "start":  # an end before the last start does not count
        return [("status", "not finished"), *data, *took]
    if end["status"] != "done":
        return [("status", f"{end['status']} after step {end['steps']:,}: --resume continues"), *data, *took]
    loss = end.get("val_loss")
    percents = {"top-1": "top1", "top-5": "top5", "test top-1": "test_top1", "test top-5": "test_top5"}
    return [
        ("status", end["status"]),
        *data,
        *((name, f"{end[key]:.2f} %") for name, key in percents.items() if end.get(key) is not None),
        *([("validation loss", f"{loss:.4f}")] if loss is not None else []),
        ("steps", f"{end['steps']:,}"),
        (unit_of(events), f"{end['images']:,}"),
        *took,
    ]
