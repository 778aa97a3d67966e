"""The page of an evaluation: confusion, images that were misjudged."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from cputrain.affinity.terminal import csv_table, shown
from cputrain.affinity.wording import counted
from cputrain.files import write_text
from cputrain.report.charts import Heat, charts_data
from cputrain.report.page import render

MOST_CLASSES = 200  # in the confusion matrix: with more, those of the lowest accuracy
NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """For each image, shape (n,): its number, label and predicted class; its loss, and the shares of probability (0 to
    1) that the network gives its label and the predicted class."""

    image: np.ndarray
    label: np.ndarray
    predicted: np.ndarray
    loss: np.ndarray
    label_share: np.ndarray
    predicted_share: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAccuracy:
    """A class's images and the percent of them that are predicted right; None without images."""

    name: str
    images: int
    top1: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Confused:
    """How many images of a class are predicted as another."""

    label: str
    predicted: str
    images: int


def class_accuracies(predicted: Predicted, classes: tuple[str, ...]) -> tuple[ClassAccuracy, ...]:
    """The accuracy of every class, in the order of the classes."""
    images = np.bincount(predicted.label, minlength=len(classes))
    right = np.bincount(predicted.label[predicted.label == predicted.predicted], minlength=len(classes))
    return tuple(
        ClassAccuracy(name=name, images=int(n), top1=100 * float(k) / int(n) if n else None)
        for name, n, k in zip(classes, images, right, strict=True)
    )


def confused_classes(predicted: Predicted, classes: tuple[str, ...]) -> tuple[Confused, ...]:
    """The pairs of classes that are confused, the most frequent first."""
    wrong = predicted.label != predicted.predicted
    pairs = predicted.label[wrong] * len(classes) + predicted.predicted[wrong]
    found, counts = np.unique(pairs, return_counts=True)
    order = np.lexsort((found, -counts))
    return tuple(
        Confused(
            label=classes[int(found[i]) // len(classes)],
            predicted=classes[int(found[i]) % len(classes)],
            images=int(counts[i]),
        )
        for i in order
    )


def most_wrong(predicted: Predicted, count: int) -> np.ndarray:
    """The rows of the wrongly predicted images of the highest losses, the highest first."""
    wrong = np.flatnonzero(predicted.label != predicted.predicted)
    return wrong[np.argsort(-predicted.loss[wrong], kind="stable")][:count]


def confusion_heat(predicted: Predicted, classes: tuple[str, ...]) -> Heat:
    """The confusion matrix: labels as rows, predictions as columns, in percent of the row's images and in images."""
    accuracies = class_accuracies(predicted, classes)
    by_accuracy = sorted(range(len(classes)), key=lambda i: (accuracies[i].top1 is None, accuracies[i].top1))
    shown = np.array(sorted(by_accuracy[:MOST_CLASSES]))
    place = np.full(len(classes), -1)
    place[shown] = np.arange(len(shown))
    rows, columns = place[predicted.label], place[predicted.predicted]
    inside = (rows >= 0) & (columns >= 0)
    images = np.zeros((len(shown), len(shown)))
    np.add.at(images, (rows[inside], columns[inside]), 1)
    of_row = np.array([max(accuracies[i].images, 1) for i in shown])[:, None]
    names = tuple(classes[i] for i in shown)
    of = "" if len(shown) == len(classes) else f" of the {len(shown)} classes of the lowest accuracy"
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
    """The hardest classes and the most frequent confusions, in a sentence each."""
    known = [each for each in class_accuracies(predicted, classes) if each.top1 is not None]
    hardest = sorted(known, key=lambda each: each.top1 or 0.0)[:NAMED]
    lines = "Hardest: " + ", ".join(f"{each.name} {each.top1:.2f} %" for each in hardest)
    pairs = confused_classes(predicted, classes)[:NAMED]
    confused = ", ".join(f"{each.label} as {each.predicted} ({counted(each.images, 'time')})" for each in pairs)
    return lines + (f". Most confused: {confused}" if pairs else "")


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
