"""Predictions -> accuracy of each class, the classes that are confused, the images that are most wrong."""

from dataclasses import dataclass

import numpy as np

from affinity.wording import counted
from cputrain.report.charts import Heat

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
