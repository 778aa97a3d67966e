"""Exact top-1 and top-5 over every image of a split once, whatever the number of workers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from cputrain.comm.group import total
from cputrain.engine import computing, network_input
from cputrain.feed import evaluation_batches
from cputrain.models.build import batchnorms
from cputrain.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Over all ranks: mean loss, top-1 and top-5 in percent, images counted, and this rank's damaged ones."""

    loss: float
    top1: float
    top5: float
    images: int
    damaged: tuple[str, ...]


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
                logits = model(network_input(session.normalize(batch.images), session.recipe.precision)).float()
            losses = functional.cross_entropy(logits, batch.labels, reduction="none")
            loss_sum += float((losses * batch.weights).sum())
            hits1 += float((in_top(logits, batch.labels, 1) * batch.weights).sum())
            hits5 += float((in_top(logits, batch.labels, 5) * batch.weights).sum())
            count += float(batch.weights.sum())
            damaged += batch.damaged
            step()
    model.train()
    loss_sum, hits1, hits5, count = total(loss_sum, hits1, hits5, count)
    readable = max(count, 1.0)
    return Accuracy(
        loss=loss_sum / readable,
        top1=100 * hits1 / readable,
        top5=100 * hits5 / readable,
        images=int(count),
        damaged=tuple(damaged),
    )


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
