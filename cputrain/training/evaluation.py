"""Evaluate over each image once: loss, top-1, top-5, predictions."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cputrain.comm.group import all_gather, all_reduce_sum
from cputrain.data.loader import Batch
from cputrain.data.order import Indices
from cputrain.report.eval_page import Predicted
from cputrain.training.engine import autocast, evaluation_network
from cputrain.training.feed import evaluation_batches, evaluation_shares, feed_of
from cputrain.training.metrics import Accuracy, count_correct
from cputrain.training.session import Session


@dataclass(slots=True, kw_only=True)
class PredictionLog:
    """This rank's predictions, batch by batch; images that could not be read are left out."""

    parts: list[np.ndarray] = field(default_factory=list)

    def add(self, outputs: Tensor, losses: Tensor, batch: Batch, numbers: Indices) -> None:
        """Take a batch's outputs (N, classes), losses (N,) and the numbers of its images (N,)."""
        shares = torch.softmax(outputs.double(), dim=1)
        highest, predicted = shares.max(dim=1)
        of_label = shares.gather(1, batch.labels[:, None])[:, 0]
        columns = (torch.from_numpy(np.asarray(numbers)), batch.labels, predicted, losses, of_label, highest)
        rows = torch.stack([each.double() for each in columns], dim=1)[batch.weights > 0]
        self.parts.append(rows.numpy())

    def gathered(self) -> Predicted:
        """The predictions of all ranks, in the order of the images' numbers. To be called by every rank."""
        own = np.concatenate(self.parts) if self.parts else np.empty((0, len(Predicted.__dataclass_fields__)))
        rows = np.concatenate(all_gather(own))
        image, label, predicted, loss, of_label, highest = rows[rows[:, 0].argsort()].T
        return Predicted(
            image=image.astype(np.int64),
            label=label.astype(np.int64),
            predicted=predicted.astype(np.int64),
            loss=loss,
            label_share=of_label,
            predicted_share=highest,
        )


def evaluate(
    model: nn.Module,
    session: Session,
    split: str = "val",
    on_batch: Callable[[], None] = lambda: None,
    predictions: PredictionLog | None = None,
) -> Accuracy:
    """Evaluate a model on a split, each image once; damaged images do not count. Calls `on_batch` after each batch;
    `predictions` takes what is predicted for each image of a classification."""
    recipe, task = session.recipe, session.task
    loss_sum, correct1, correct5, count = 0.0, 0.0, 0.0, 0.0
    damaged: list[str] = []
    model.eval()
    with torch.inference_mode():
        network = evaluation_network(model, session.engine, recipe.precision) if task.traceable else model
        feed = feed_of(session)
        shares = evaluation_shares(feed, split)
        for share, batch in zip(shares, evaluation_batches(feed, split), strict=True):
            with autocast(recipe.precision):
                outputs = network(task.inputs(batch))
            outputs = outputs.float() if isinstance(outputs, Tensor) else outputs
            losses = task.losses(outputs, batch.labels, 0.0).expand(len(batch.weights))
            loss_sum += float((losses * batch.weights).sum())
            if task.classifies:
                correct1 += count_correct(outputs, batch.labels, batch.weights, 1)
                correct5 += count_correct(outputs, batch.labels, batch.weights, 5)
            count += float(batch.weights.sum())
            damaged += batch.damaged
            if predictions is not None and task.classifies:
                predictions.add(outputs, losses, batch, share)
            on_batch()
    model.train()
    loss_sum, correct1, correct5, count = all_reduce_sum(loss_sum, correct1, correct5, count)
    classified = count > 0 and task.classifies
    return Accuracy(
        loss=loss_sum / count if count else math.nan,
        top1=100 * correct1 / count if classified else None,
        top5=100 * correct5 / count if classified else None,
        images=int(count),
        damaged=tuple(damaged),
    )


def average_batchnorm(model: nn.Module) -> None:
    """Set every rank's running statistics to the mean over all ranks, so that all evaluate one network."""
    for own, mean in mean_statistics(model):
        own.copy_(mean)


def mean_statistics(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Each of batch-norm's running statistics on this rank, and its mean over all ranks."""
    layers = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    statistics = [buffer for layer in layers for buffer in (layer.running_mean, layer.running_var)]
    present = [buffer for buffer in statistics if buffer is not None]
    if not present:
        return []
    flat = torch.cat(present)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return list(zip(present, torch.split(flat, [b.numel() for b in present]), strict=True))
