"""Evaluation: exact loss, top-1 and top-5 over every image of a split once, with any number of ranks."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cputrain.comm.group import all_reduce_sum
from cputrain.models.build import batchnorms
from cputrain.training.engine import autocast, evaluation_network, network_input
from cputrain.training.feed import evaluation_batches
from cputrain.training.losses import sample_losses
from cputrain.training.metrics import Accuracy, count_correct
from cputrain.training.session import Session


def evaluate(
    model: nn.Module, session: Session, split: str = "val", on_batch: Callable[[], None] = lambda: None
) -> Accuracy:
    """Evaluate a model on a split, each image once; damaged images do not count. Calls `on_batch` after each batch."""
    recipe, data = session.recipe, session.data
    loss_sum, correct1, correct5, count = 0.0, 0.0, 0.0, 0.0
    damaged: list[str] = []
    model.eval()
    with torch.inference_mode():
        network = evaluation_network(model, session.engine, recipe.precision)
        for batch in evaluation_batches(session, split):
            with autocast(recipe.precision):
                outputs = network(network_input(data.normalize(batch.images), recipe.precision)).float()
            losses = sample_losses(recipe.loss, outputs, batch.labels)
            loss_sum += float((losses * batch.weights).sum())
            correct1 += count_correct(outputs, batch, 1)
            correct5 += count_correct(outputs, batch, 5)
            count += float(batch.weights.sum())
            damaged += batch.damaged
            on_batch()
    model.train()
    loss_sum, correct1, correct5, count = all_reduce_sum(loss_sum, correct1, correct5, count)
    classified = count > 0 and data.features is None
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
    statistics = [buffer for layer in batchnorms(model) for buffer in (layer.running_mean, layer.running_var)]
    present = [buffer for buffer in statistics if buffer is not None]
    if not present:
        return []
    flat = torch.cat(present)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return list(zip(present, torch.split(flat, [b.numel() for b in present]), strict=True))
