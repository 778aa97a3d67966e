"""How well the classes are mixed in the order of a split's samples. Shards sorted by class cost accuracy."""

import numpy as np
from numpy.typing import NDArray

WINDOW = 32  # samples in a row, as many as a worker's batch


def mean_classes_in_window(labels: NDArray[np.int64]) -> float:
    """The mean number of different classes among WINDOW samples in a row."""
    whole = len(labels) // WINDOW * WINDOW
    if whole == 0:
        return float(len(np.unique(labels)))
    rows = np.sort(labels[:whole].reshape(-1, WINDOW), axis=1)
    return float(1 + (np.diff(rows, axis=1) != 0).sum(axis=1).mean())


def expected_classes_in_window(labels: NDArray[np.int64]) -> float:
    """The same for samples in random order: a class is present unless all samples of the window miss it."""
    shares = np.bincount(labels) / len(labels)
    return float((1 - (1 - shares) ** min(WINDOW, len(labels))).sum())
