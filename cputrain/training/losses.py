"""The loss of each sample, in training and in evaluation."""

import torch
from torch import Tensor
from torch.nn import functional


def sample_losses(loss: str, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The cross_entropy or mse of each sample, shape (N,), in float32 or wider.

    `outputs` are (N, classes) with labels (N,) int64, or (N, 1) with targets (N, 1). mse is the mean over a row of the
    squared differences to the label's one-hot vector, or to the target. `smoothing` is the share of a label that is
    spread over all classes (label smoothing, Szegedy et al. 2016, section 7).
    """
    wide = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
    if loss == "cross_entropy":
        return functional.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
    targets = labels.to(wide.dtype)
    if labels.dtype == torch.int64:
        classes = wide.shape[1]
        targets = functional.one_hot(labels, classes).to(wide.dtype) * (1 - smoothing) + smoothing / classes
    return (wide - targets).square().mean(dim=1)
