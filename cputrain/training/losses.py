"""Each sample's loss, in training and in evaluation."""

import torch
from torch import Tensor
from torch.nn import functional


def losses_of(loss: str, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Each sample's cross_entropy or mse, shape (N,), in float32 or wider.

    `outputs` are (N, classes) with labels (N,) int64, or (N, 1) with numbers (N, 1) as labels. mse is the mean over a
    row of the squared differences to the label's one-hot vector, or to the numbers. `smoothing` is the share of a class
    label that is spread over all classes (Szegedy et al. 2016, section 7).
    """
    wide = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
    if loss == "cross_entropy":
        return functional.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
    wanted = labels.to(wide.dtype)
    if labels.dtype == torch.int64:
        classes = wide.shape[1]
        wanted = functional.one_hot(labels, classes).to(wide.dtype) * (1 - smoothing) + smoothing / classes
    return (wide - wanted).square().mean(dim=1)
