"""Metrics of a training step, an epoch and an evaluation."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class EpochMetrics:
    """One rank's sums over the images of an epoch, or of a step: losses, correct predictions, readable images.

    `damaged` are the names of images that could not be read.
    """

    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0
    damaged: list[str] = field(default_factory=list)

    def add(self, other: "EpochMetrics") -> None:
        """Add the sums and names of another."""
        self.loss += other.loss
        self.correct += other.correct
        self.images += other.images
        self.damaged += other.damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of an update on one rank: mean loss, seconds of waiting for images and gradients, sums over images.

    `finite` is the same on all ranks; if False, nothing has been updated, `metrics` counts no images, and `non_finite`
    describes where NaN or Inf arose on this rank, "" if not in its outputs. `layer_ratios` are the layers' norms, empty
    unless requested.
    """

    loss: float
    data_wait_s: float
    comm_wait_s: float
    metrics: EpochMetrics
    finite: bool
    non_finite: str
    layer_ratios: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Over all ranks: mean loss, top-1 and top-5 in percent, number of images; `damaged` are this rank's images.

    top1 and top5 are None for data without classes; without images the loss is NaN and they are None.
    """

    loss: float
    top1: float | None
    top5: float | None
    images: int
    damaged: tuple[str, ...]

    @property
    def score(self) -> float:
        """The value whose maximum is the best checkpoint: top-1, or the negative loss for data without classes."""
        return -self.loss if self.top1 is None else self.top1


def count_correct(outputs: Tensor, labels: Tensor, weights: Tensor, k: int) -> float:
    """The number of images, each of weight 1 or 0, whose label is among the k largest outputs.

    Labels are numbers of classes, (N,), or of mixed images the share of each class, (N, outputs): such an image counts
    as much as the shares of the k classes together.
    """
    if labels.ndim == 2:
        shares = labels.gather(1, outputs.topk(min(k, outputs.shape[1]), dim=1).indices).sum(dim=1)
        return float((shares * weights).sum())
    return float((in_top(outputs, labels, k) * weights).sum())


def in_top(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """1.0 where the label is among the k largest of a row of logits (N, classes), else 0.0; shape (N,)."""
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels[:, None]).any(dim=1).float()
