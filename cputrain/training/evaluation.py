"""Exact top-1 and top-5 over every image of a split once, whatever the number of workers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cputrain.comm.group import total
from cputrain.data.batches import Batch
from cputrain.models.build import batchnorms
from cputrain.training.engine import computing, network_input
from cputrain.training.feed import evaluation_batches
from cputrain.training.losses import losses_of
from cputrain.training.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Over all ranks: mean loss, top-1 and top-5 in percent, images counted, and this rank's damaged ones.

    Without classes top-1 and top-5 are None; without validation images the loss is NaN too.
    """

    loss: float
    top1: float | None
    top5: float | None
    images: int
    damaged: tuple[str, ...]

    @property
    def score(self) -> float:
        """What the best checkpoint is chosen by, the largest: top-1, or the negative loss where there is none."""
        return -self.loss if self.top1 is None else self.top1


def evaluate(
    model: nn.Module, session: Session, split: str = "val", step: Callable[[], None] = lambda: None
) -> Accuracy:
    """Evaluate on a split, each image once; damaged images do not count. `step` is called after each of its batches."""
    loss_sum, hits1, hits5, count = 0.0, 0.0, 0.0, 0.0
    damaged: list[str] = []
    model.eval()
    with torch.inference_mode():
        for batch in evaluation_batches(session, split):
            with computing(session.recipe.precision):
                outputs = model(network_input(session.normalize(batch.images), session.recipe.precision)).float()
            losses = losses_of(session.recipe.loss, outputs, batch.labels)
            loss_sum += float((losses * batch.weights).sum())
            hits1 += hits(outputs, batch, 1)
            hits5 += hits(outputs, batch, 5)
            count += float(batch.weights.sum())
            damaged += batch.damaged
            step()
    model.train()
    loss_sum, hits1, hits5, count = total(loss_sum, hits1, hits5, count)
    classified = count > 0 and session.features is None
    return Accuracy(
        loss=loss_sum / count if count else math.nan,
        top1=100 * hits1 / count if classified else None,
        top5=100 * hits5 / count if classified else None,
        images=int(count),
        damaged=tuple(damaged),
    )


def hits(outputs: Tensor, batch: Batch, k: int) -> float:
    """How many images of a batch have their label among the k largest outputs; 0 where the labels are no classes."""
    if batch.labels.is_floating_point():
        return 0.0
    return float((in_top(outputs, batch.labels, k) * batch.weights).sum())


def in_top(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """1.0 where the label is among the k largest of a row of logits (N, classes), else 0.0; shape (N,)."""
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels[:, None]).any(dim=1).float()


def average_batchnorm(model: nn.Module) -> None:
    """Make every rank's running statistics the mean of all ranks', so that all evaluate and save the same network."""
    statistics = [buffer for layer in batchnorms(model) for buffer in (layer.running_mean, layer.running_var)]
    present = [buffer for buffer in statistics if buffer is not None]
    if not present:
        return
    flat = torch.cat(present)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for buffer, mean in zip(present, torch.split(flat, [b.numel() for b in present]), strict=True):
        buffer.copy_(mean)
