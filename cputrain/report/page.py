"""A run's folder -> report.html, self-contained."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from affinity.errors import InputError
from cputrain.events import FILE, read_events
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
        name=folder.name,
        summary=_summary(events),
        curves=training_curves(events),
        epochs=[e for e in events if e["event"] == "epoch"],
        warnings=[e for e in events if e["event"] == "warning"],
        bindings=next((e["bindings"] for e in events if e["event"] == "start"), []),
        recipe=(folder / RECIPE).read_text(),
    )
    write_atomic(folder / REPORT, html.encode())
    return folder / REPORT


def _summary(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    end = next((e for e in reversed(events) if e["event"] == "end"), None)
    if end is None:
        return [("status", "not finished")]
    if end["status"] != "done":
        return [("status", f"{end['status']} after step {end['steps']:,}: --resume goes on")]
    kind, loss = end.get("data", "images"), end.get("val_loss")
    return [
        ("status", end["status"]),
        *([("data", kind)] if kind != "images" else []),
        *(
            [
                (name, f"{end[key]:.2f} %")
                for name, key in (("top-1", "top1"), ("top-5", "top5"))
                if end[key] is not None
            ]
        ),
        *([("validation loss", f"{loss:.4f}")] if loss is not None else []),
        ("steps", f"{end['steps']:,}"),
        ("images", f"{end['images']:,}"),
        ("time to train", f"{end['time_to_train_s']:.1f} s"),
    ]
