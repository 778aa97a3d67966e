"""HTML pages, each in one file: the report of a run, and of an evaluation (confusion matrix, misclassified images)."""

import base64
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from cputrain import __version__
from cputrain.affinity.terminal import printable_lines, printable_name
from cputrain.affinity.topology.machine import format_list
from cputrain.affinity.views import plan_to_svg
from cputrain.affinity.wording import plural
from cputrain.files import REPORT, write_text
from cputrain.report.charts import (
    Heat,
    Table,
    charts_data,
    mean_shares,
    rank_times,
    rows_per_run,
    shown_bars,
    time_heat,
    training_charts,
    training_tables,
    trust_heat,
    usage_charts,
)
from cputrain.report.run import (
    Run,
    faults_of,
    host_table,
    network_table,
    read_run,
    run_figures,
    run_notes,
    run_particulars,
    status_text,
    unit_of,
    warnings_of,
    worker_table,
)
from cputrain.rows import Column, Rows
from cputrain.runs.folder import describe_value

PROGRAM = ("data.js", "chart.js", "heat.js", "page.js")

MAX_EPOCHS = 200  # rows of the table
MAX_PICTURES = 8

MAX_CLASSES = 200  # in the confusion matrix; if there are more, the classes with the lowest accuracy
NAMED = 3

MAX_WRONG = 48
MAX_CONFUSED_PAIRS = 100  # pairs of classes
CLASS_COLUMNS = (Column("class", "name"), Column("images", "images", ","), Column("top-1 %", "top1", ".2f"))
CONFUSED_COLUMNS = (Column("label", "label"), Column("predicted", "predicted"), Column("images", "images", ","))
Thumbnail = Callable[[int], np.ndarray]
"""Function from the number of an image to its pixels, (side, side, 3) uint8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """Style and script of every page; `script_hash` names the only script that the browser may run."""

    style: str
    script: str

    @property
    def script_hash(self) -> str:
        """The script's hash in the form of a Content-Security-Policy."""
        return f"sha256-{base64.b64encode(hashlib.sha256(self.script.encode()).digest()).decode()}"


@cache
def read_assets() -> Assets:
    """Read the package's files and uPlot as one style and one script."""
    root = files("cputrain.report")
    program = "".join(root.joinpath("assets", name).read_text(encoding="utf-8") for name in PROGRAM)
    uplot = root.joinpath("vendor", "uplot")
    vendored = uplot.joinpath("uPlot.iife.min.js").read_text(encoding="utf-8")
    return Assets(
        style=uplot.joinpath("uPlot.min.css").read_text(encoding="utf-8")
        + root.joinpath("assets", "page.css").read_text(encoding="utf-8"),
        script=f'{vendored}\n(() => {{\n"use strict";\n{program}}})();\n',
    )


def render_page(template: str, *, title: str, data: Mapping[str, object], **values: Any) -> str:
    """Render a page. The template escapes texts in `values`; `data` is escaped so that it cannot close its element."""
    environment = Environment(
        loader=PackageLoader("cputrain.report"),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=lambda value: printable_lines(value) if type(value) is str else value,  # Markup is trusted
        trim_blocks=False,
    )
    return environment.get_template(template).render(
        title=title,
        data=json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        assets=read_assets(),
        version=__version__,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **values,
    )


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a training, finished or not, or of a launched command's resource use, to `out` or to
    report.html in the folder.

    Raises InputError if the folder contains neither.
    """
    path = out or folder / REPORT
    write_text(path, report_html(read_run(folder)))
    return path


def report_html(run: Run) -> str:
    """Return the HTML page of a run."""
    tables: dict[str, Table] = training_tables(run) if run.events else {}
    curves = training_charts(run, tables) if tables else ()
    heats = tuple(heat for heat in (time_heat(run), trust_heat(run)) if heat is not None)
    use: dict[str, Any] = {}
    if run.usage:
        use["charts"], more = usage_charts(run.usage)
        tables |= more
        shown_use = {"workers": worker_table, "hosts": host_table, "network": network_table}
        use |= {name: table(run.usage).cells for name, table in shown_use.items()}
    charts = (*curves, *use.get("charts", ()))
    drawn = {line.table: tables[line.table] for chart in charts for line in chart.lines}
    steps, limit = len(tables["steps"]["step"]) if "steps" in tables else 0, rows_per_run(1)
    thinned = f"{plural(steps, 'step')}: each interval is drawn by its minimum and maximum." if steps > limit else ""
    status = run.status() if run.trained else ""
    times = rank_times(run)
    return render_page(
        "run.html.j2",
        title=run.name,
        data=charts_data(charts, drawn, heats, limit),
        run=run,
        status=status,
        status_text=status_text(run, status) if status else "",
        notes=run_notes(run),
        figures=run_figures(run),
        particulars=run_particulars(run),
        warnings=warnings_of(run),
        faults=faults_of(run),
        curves=curves,
        thinned=thinned,
        bars=shown_bars(times),
        shares=mean_shares(times),
        ranks=len(times),
        heats=heats,
        use=use,
        **_epochs(run),
        changed=[(key, describe_value(new), describe_value(old)) for key, (old, new) in run.changed_settings.items()],
        pictures=[(hosts, plan_to_svg(plan)) for hosts, plan in run.plans[:MAX_PICTURES]],
        **_bindings(run),
    )


def _epochs(run: Run) -> dict[str, Any]:
    """Return the table of epochs; if there are many, evenly spaced ones."""
    last = list({event["epoch"]: event for event in run.of("epoch")}.values())
    indices = np.unique(np.linspace(0, len(last) - 1, min(len(last), MAX_EPOCHS)).round().astype(int))
    shown = [last[i] for i in indices]
    columns = (
        Column("epoch", itemgetter("epoch"), "g"),
        Column("training loss", itemgetter("train_loss"), ".4f"),
        Column("training top-1 %", itemgetter("train_top1"), ".2f"),
        Column("validation loss", itemgetter("val_loss"), ".4f"),
        Column("validation top-1 %", itemgetter("val_top1"), ".2f"),
        Column("validation top-5 %", itemgetter("val_top5"), ".2f"),
        Column("seconds", itemgetter("seconds"), ".1f"),
        Column(f"{unit_of(run.start)}/s", itemgetter("images_per_s"), ",.1f"),
    )
    table = Rows(columns, shown)
    of = f"{len(shown)} of {len(last):,} epochs" if len(shown) < len(last) else plural(len(last), "epoch")
    return {"epochs": table.cells, "epochs_of": of}


def _bindings(run: Run) -> dict[str, Any]:
    """Return the table of bindings, and whether they are as planned."""
    bindings = run.start.get("bindings", [])
    misplaced = [binding for binding in bindings if binding["pus"] != binding["planned_pus"]]
    ranks = ", ".join(str(binding["rank"]) for binding in misplaced[:8]) + (", ..." if len(misplaced) > 8 else "")
    columns = (
        Column("rank", itemgetter("rank")),
        Column("host", itemgetter("host")),
        Column("planned CPUs", itemgetter("planned_pus"), format_list),
        Column("actual CPUs", itemgetter("pus"), format_list),
        Column("memory", itemgetter("memory_policy")),
        Column("CPUs of each thread", lambda binding: " ".join(map(format_list, binding.get("thread_pus", ())))),
    )
    return {
        "bindings": Rows(columns, bindings).cells,
        "misplaced": misplaced,
        "bound": f"Not bound as planned: rank {ranks}"
        if misplaced
        else f"The kernel reports {plural(len(bindings), 'rank')} bound as planned.",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predictions, one entry of shape (n,) per image: number, label, predicted class, loss, and the probabilities (0 to
    1) that the network gives the label and the predicted class."""

    image: np.ndarray
    label: np.ndarray
    predicted: np.ndarray
    loss: np.ndarray
    label_share: np.ndarray
    predicted_share: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAccuracy:
    """A class's number of images and the percentage predicted correctly; None without images."""

    name: str
    images: int
    top1: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfusedPair:
    """The number of images of one class that are predicted as another class."""

    label: str
    predicted: str
    images: int


def class_accuracies(predicted: Predicted, classes: tuple[str, ...]) -> tuple[ClassAccuracy, ...]:
    """Return the accuracy of every class, in the order of the classes."""
    images = np.bincount(predicted.label, minlength=len(classes))
    right = np.bincount(predicted.label[predicted.label == predicted.predicted], minlength=len(classes))
    return tuple(
        ClassAccuracy(name=name, images=int(n), top1=100 * float(k) / int(n) if n else None)
        for name, n, k in zip(classes, images, right, strict=True)
    )


def confused_classes(predicted: Predicted, classes: tuple[str, ...]) -> tuple[ConfusedPair, ...]:
    """Return the confused pairs of classes, the most frequent first."""
    wrong = predicted.label != predicted.predicted
    pairs = predicted.label[wrong] * len(classes) + predicted.predicted[wrong]
    pairs_found, counts = np.unique(pairs, return_counts=True)
    order = np.lexsort((pairs_found, -counts))
    return tuple(
        ConfusedPair(
            label=classes[int(pairs_found[i]) // len(classes)],
            predicted=classes[int(pairs_found[i]) % len(classes)],
            images=int(counts[i]),
        )
        for i in order
    )


def most_wrong(predicted: Predicted, count: int) -> np.ndarray:
    """Return the rows of the misclassified images with the highest losses, the highest first."""
    wrong = np.flatnonzero(predicted.label != predicted.predicted)
    return wrong[np.argsort(-predicted.loss[wrong], kind="stable")][:count]


def confusion_heat(predicted: Predicted, classes: tuple[str, ...]) -> Heat:
    """Return the confusion matrix: labels as rows, predictions as columns, in percent of the row and as counts."""
    accuracies = class_accuracies(predicted, classes)
    by_accuracy = sorted(range(len(classes)), key=lambda i: (accuracies[i].top1 is None, accuracies[i].top1))
    shown = np.array(sorted(by_accuracy[:MAX_CLASSES]))
    position = np.full(len(classes), -1)
    position[shown] = np.arange(len(shown))
    rows, columns = position[predicted.label], position[predicted.predicted]
    inside = (rows >= 0) & (columns >= 0)
    images = np.zeros((len(shown), len(shown)))
    np.add.at(images, (rows[inside], columns[inside]), 1)
    of_row = np.array([max(accuracies[i].images, 1) for i in shown])[:, None]
    names = tuple(classes[i] for i in shown)
    of = "" if len(shown) == len(classes) else f" of the {len(shown)} classes with the lowest accuracy"
    return Heat(
        id="confusion",
        title=f"Confusion matrix{of}",
        unit="",
        rows=names,
        at=names,
        across="predicted",
        measures={"% of the class": 100 * images / of_row, "images": images},
        words=f"Rows are the labels, columns the predictions. {confusion_text(predicted, classes)}",
    )


def confusion_text(predicted: Predicted, classes: tuple[str, ...]) -> str:
    """Describe the classes with the lowest accuracy and the most frequent confusions in one sentence each."""
    measured = [accuracy for accuracy in class_accuracies(predicted, classes) if accuracy.top1 is not None]
    hardest = sorted(measured, key=lambda accuracy: accuracy.top1 or 0.0)[:NAMED]
    lines = "Hardest: " + ", ".join(f"{accuracy.name} {accuracy.top1:.2f} %" for accuracy in hardest)
    pairs = confused_classes(predicted, classes)[:NAMED]
    confused = ", ".join(f"{pair.label} as {pair.predicted} ({plural(pair.images, 'time')})" for pair in pairs)
    return lines + (f". Most confused: {confused}" if pairs else "")


def write_eval_page(
    out: Path,
    *,
    title: str,
    rows: Sequence[tuple[str, str]],
    predicted: Predicted,
    classes: tuple[str, ...],
    name_of: Callable[[int], str],
    thumbnail: Thumbnail,
) -> Path:
    """Write the page to `out`, and each image's prediction beside it as CSV. `rows` are figures of the evaluation;
    `name_of` returns where an image is stored."""
    classes = tuple(map(printable_name, classes))
    heat = confusion_heat(predicted, classes)
    confused = confused_classes(predicted, classes)[:MAX_CONFUSED_PAIRS]
    html = render_page(
        "evaluation.html.j2",
        title=title,
        data=charts_data((), {}, (heat,), 0),
        rows=rows,
        heat_map=heat,
        classes=Rows(CLASS_COLUMNS, class_accuracies(predicted, classes)).cells,
        confused=Rows(CONFUSED_COLUMNS, confused).cells,
        images=[_wrong(predicted, row, classes, name_of, thumbnail) for row in most_wrong(predicted, MAX_WRONG)],
    )
    write_text(out, html)
    columns = (
        Column("image", lambda row: name_of(int(predicted.image[row]))),
        Column("label", lambda row: classes[int(predicted.label[row])]),
        Column("predicted", lambda row: classes[int(predicted.predicted[row])]),
        Column("loss", lambda row: float(predicted.loss[row]), ".6g"),
        Column("probability of the label", lambda row: float(predicted.label_share[row]), ".6g"),
        Column("probability of the prediction", lambda row: float(predicted.predicted_share[row]), ".6g"),
    )
    write_text(out.with_suffix(".csv"), Rows(columns, range(len(predicted.image))).csv())
    return out


def _wrong(
    predicted: Predicted, row: int, classes: tuple[str, ...], name_of: Callable[[int], str], thumbnail: Thumbnail
) -> dict[str, str]:
    number = int(predicted.image[row])
    buffer = io.BytesIO()
    Image.fromarray(thumbnail(number)).save(buffer, "JPEG", quality=85)
    return {
        "data": base64.b64encode(buffer.getvalue()).decode(),
        "name": Path(name_of(number)).name,
        "label": classes[int(predicted.label[row])],
        "label_share": f"{100 * predicted.label_share[row]:.1f} %",
        "predicted": classes[int(predicted.predicted[row])],
        "predicted_share": f"{100 * predicted.predicted_share[row]:.1f} %",
    }
