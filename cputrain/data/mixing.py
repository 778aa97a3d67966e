"""How well categories are mixed in the order of a split's samples: what unshuffled shards cost in accuracy."""

import numpy as np
from numpy.typing import NDArray

TOGETHER = 32  # samples in a row, as many as a worker's batch


def classes_together(labels: NDArray[np.int64]) -> float:
    """Mean number of different classes among TOGETHER samples in a row."""
    whole = len(labels) // TOGETHER * TOGETHER
    if whole == 0:
        return float(len(np.unique(labels)))
    rows = np.sort(labels[:whole].reshape(-1, TOGETHER), axis=1)
    return float(1 + (np.diff(rows, axis=1) != 0).sum(axis=1).mean())


def classes_expected(labels: NDArray[np.int64]) -> float:
    """The same for samples drawn at random: each class is there unless all of them miss it."""
    shares = np.bincount(labels) / len(labels)
    return float((1 - (1 - shares) ** min(TOGETHER, len(labels))).sum())
