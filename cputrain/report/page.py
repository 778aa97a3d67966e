"""A run's folder -> report.html, self-contained."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from affinity.errors import InputError
from cputrain.events import FILE, read_events
from cputrain.files import write_atomic
from cputrain.report.curves import training_curves
from cputrain.report.usage import Usage, host_rows, network_rows, read_usage, worker_rows
from cputrain.report.usage_picture import usage_picture
from cputrain.run_folder import RECIPE, REPORT
from mpi.usage_file import FOLDER as USAGE


def write_report(folder: Path) -> Path:
    """Write the report of a run, finished or not; of a command that was launched, what it used.

    Raises InputError when the folder holds neither.
    """
    trained = (folder / FILE).is_file() and (folder / RECIPE).is_file()
    usage = read_usage(folder)
    if not trained and usage is None:
        raise InputError(f"{folder} holds no run ({RECIPE} and {FILE}, or {USAGE}/): give a run's output folder")
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
    """What the page tells of a training."""
    events = _last_of_each_epoch(read_events(folder))
    return {
        "summary": _summary(events),
        "curves": training_curves(events),
        "epochs": [e for e in events if e["event"] == "epoch"],
        "warnings": [e for e in events if e["event"] == "warning"],
        "bindings": next((e["bindings"] for e in reversed(events) if e["event"] == "start"), []),
        "recipe": (folder / RECIPE).read_text(),
    }


def _last_of_each_epoch(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without those of parts of epochs, as a run leaves them that stopped within one and was resumed."""
    last = {e["epoch"]: e for e in events if e["event"] == "epoch"}
    return [e for e in events if e["event"] != "epoch" or e is last[e["epoch"]]]


def _use(usage: Usage) -> dict[str, Any]:
    """What the page tells of resources."""
    return {
        "picture": usage_picture(usage),
        "workers": worker_rows(usage),
        "hosts": host_rows(usage),
        "network": network_rows(usage),
    }


def _summary(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    end = next((e for e in reversed(events) if e["event"] in ("start", "end")), None)
    if end is None or end["event"] == "start":
        return [("status", "not finished")]
    if end["top1"] is None:
        return [("status", f"{end['status']} after step {end['steps']:,}: --resume goes on")]
    return [
        ("status", end["status"]),
        ("top-1", f"{end['top1']:.2f} %"),
        ("top-5", f"{end['top5']:.2f} %"),
        ("steps", f"{end['steps']:,}"),
        ("images", f"{end['images']:,}"),
        ("time to train", f"{end['time_to_train_s']:.1f} s"),
    ]
