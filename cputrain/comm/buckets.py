"""How large the pieces are in which DDP sends gradients: from what all-reduces take here."""

import math
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

TRIED_BYTES = (1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
ROUNDS = 5
LEAST_BYTES, MOST_BYTES = 1 << 20, 100 << 20


def fit_alpha_beta(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds a message and seconds a byte of t = alpha + beta x bytes, from (bytes, seconds).

    Least squares of the relative errors, so that small messages count as much as large ones; neither is negative.
    """
    weights = [1 / (seconds * seconds) for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    together = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    beta = max(together / spread, 1e-15)
    return max(mean_y - beta * mean_x, 1e-9), beta


def bucket_bytes(gradient_bytes: int, alpha_s: float, beta_s: float) -> int:
    """The bucket for which what cannot be hidden is least: every bucket's latency and the last one's transfer.

    alpha G / b + beta b is least at b = sqrt(alpha G / beta); 1 MiB to 100 MiB.
    """
    best = math.sqrt(alpha_s * gradient_bytes / beta_s)
    return int(min(max(best, LEAST_BYTES), MOST_BYTES))


def measure_alpha_beta() -> tuple[float, float]:
    """Alpha and beta of this group's all-reduce of float32, the same on every rank: the slowest rank's times."""
    medians = []
    for size in TRIED_BYTES:
        values, seconds = torch.zeros(size // 4), []
        for _ in range(ROUNDS):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(values)
            seconds.append(time.perf_counter() - started)
        medians.append(median(seconds))
    slowest = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return fit_alpha_beta(list(zip(map(float, TRIED_BYTES), slowest.tolist(), strict=True)))
