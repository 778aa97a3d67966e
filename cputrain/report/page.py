"""A run's folder -> report.html, self-contained."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from affinity.errors import InputError
from cputrain.events import FILE, TimeSpent, read_events, time_spent
from cputrain.files import write_atomic
from cputrain.report.curves import training_curves
from cputrain.run_folder import RECIPE, REPORT


def write_report(folder: Path) -> Path:
    """Write the report of a run, finished or not. Raises InputError when the folder holds no run."""
    if not (folder / FILE).is_file() or not (folder / RECIPE).is_file():
        raise InputError(f"{folder} holds no run ({RECIPE} and {FILE}): give a run's output folder")
    events = read_events(folder)
    environment = Environment(
        loader=PackageLoader("cputrain.report", ""), undefined=StrictUndefined, autoescape=True, trim_blocks=False
    )
    html = environment.get_template("page.html.j2").render(
        name=folder.resolve().name,
        summary=_summary(events, time_spent(folder)),
        curves=training_curves(events),
        epochs=[e for e in events if e["event"] == "epoch"],
        warnings=[e for e in events if e["event"] == "warning"],
        bindings=next((e["bindings"] for e in events if e["event"] == "start"), []),
        recipe=(folder / RECIPE).read_text(),
    )
    write_atomic(folder / REPORT, html.encode())
    return folder / REPORT


def _summary(events: list[dict[str, Any]], spent: TimeSpent) -> list[tuple[str, str]]:
    end = next((e for e in reversed(events) if e["event"] in ("start", "end")), None)
    if spent.starts > 1:
        took = [("time to train", f"{spent.training_s:.1f} s over {spent.starts} starts")]
        took += [("wall time", f"{spent.wall_s:.1f} s")]
    else:
        took = [("time to train", f"{spent.training_s:.1f} s")]
    if end is None or end["event"] == "start":  # an earlier end is not that of the last start
        return [("status", "not finished"), *took]
    if end["status"] != "done":
        return [("status", f"{end['status']} after step {end['steps']:,}: --resume goes on"), *took]
    kind, loss = end.get("data", "images"), end.get("val_loss")
    percents = {"top-1": "top1", "top-5": "top5", "test top-1": "test_top1", "test top-5": "test_top5"}
    return [
        ("status", end["status"]),
        *([("data", kind)] if kind != "images" else []),
        *((name, f"{end[key]:.2f} %") for name, key in percents.items() if end.get(key) is not None),
        *([("validation loss", f"{loss:.4f}")] if loss is not None else []),
        ("steps", f"{end['steps']:,}"),
        ("images", f"{end['images']:,}"),
        *took,
    ]
