"""The size of DDP's gradient buckets from all-reduce times; arithmetic without torch."""

import math
from collections.abc import Sequence

MEASURED_BYTES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 1 << 20, 100 << 20


def fit_alpha_beta(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit t = alpha + beta x bytes to (bytes, seconds): seconds per message and seconds per byte.

    Minimizes the squares of the relative errors, so that small messages count as much as large ones. Both results are
    positive.
    """
    weights = [1 / (seconds * seconds) for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    variance = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    covariance = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    beta = max(covariance / variance, 1e-15)
    return max(mean_y - beta * mean_x, 1e-9), beta


def bucket_bytes(gradient_bytes: int, alpha_s: float, beta_s: float) -> int:
    """The bucket size with the least communication outside the backward pass, 1 MiB to 100 MiB.

    A bucket of b bytes costs the latency of G / b messages and the transfer of the last bucket, which no computation
    hides: alpha G / b + beta b, least at b = sqrt(alpha G / beta).
    """
    best = math.sqrt(alpha_s * gradient_bytes / beta_s)
    return int(min(max(best, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))
