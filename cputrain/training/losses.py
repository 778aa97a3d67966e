"""The loss of each sample, in training and in evaluation."""

import torch
from torch import Tensor
from torch.nn import functional


def sample_losses(loss: str, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cross_entropy or mse of each sample, shape (N,), in float32 or wider.

    `outputs` are (N, classes) with labels (N,) int64 or shares of the classes (N, classes), or (N, 1) with targets
    (N, 1). mse is the mean over a row of the
    squared differences to the label's one-hot vector, or to the target. `smoothing` is the share of a label that is
    spread over all classes (label smoothing, Szegedy et al. 2016, section 7).
    """
    wide = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
    if labels.is_floating_point():
        labels = labels.to(wide.dtype)
    if loss == "cross_entropy":
        return functional.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
    targets, classes = labels.to(wide.dtype), wide.shape[1]
    if labels.dtype == torch.int64:
        targets = functional.one_hot(labels, classes).to(wide.dtype)
    if classes > 1:
        targets = targets * (1 - smoothing) + smoothing / classes
    return (wide - targets).square().mean(dim=1)
