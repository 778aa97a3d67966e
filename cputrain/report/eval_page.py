"""An evaluation as a page: accuracy of each class, confusion matrix, the images that are most wrong; and as CSV."""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from affinity.terminal_text import shown
from affinity.text_table import csv_table
from cputrain.files import write_text
from cputrain.report.charts import charts_data
from cputrain.report.confusion import Predicted, class_accuracies, confused_classes, confusion_heat, most_wrong
from cputrain.report.html import render

MOST_IMAGES = 48
Thumbnail = Callable[[int], np.ndarray]
"""The number of an image -> its pixels, (side, side, 3) uint8."""


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
    """Write the page to `out`, and beside it each image's prediction as CSV. `rows` are figures of the evaluation;
    `name_of` tells where an image is stored."""
    classes = tuple(map(shown, classes))
    heat = confusion_heat(predicted, classes)
    html = render(
        "evaluation.html.j2",
        title=title,
        data=charts_data((), {}, (heat,), 0),
        rows=rows,
        heat_map=heat,
        classes=[
            (each.name, f"{each.images:,}", "" if each.top1 is None else f"{each.top1:.2f}")
            for each in class_accuracies(predicted, classes)
        ],
        confused=[
            (each.label, each.predicted, f"{each.images:,}") for each in confused_classes(predicted, classes)[:100]
        ],
        images=[_wrong(predicted, row, classes, name_of, thumbnail) for row in most_wrong(predicted, MOST_IMAGES)],
    )
    write_text(out, html)
    write_text(out.with_suffix(".csv"), _csv(predicted, classes, name_of))
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


def _csv(predicted: Predicted, classes: tuple[str, ...], name_of: Callable[[int], str]) -> str:
    head = ("image", "label", "predicted", "loss", "probability of the label", "probability of the prediction")
    columns = (predicted.image, predicted.label, predicted.predicted)
    numbers = (predicted.loss, predicted.label_share, predicted.predicted_share)
    rows = [
        (name_of(int(image)), classes[int(label)], classes[int(guess)], *(f"{float(value):.6g}" for value in values))
        for image, label, guess, *values in zip(*columns, *numbers, strict=True)
    ]
    return csv_table([head, *rows])
