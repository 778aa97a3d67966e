"""Alpha and beta of the job's own all-reduce, measured for the size of DDP's gradient buckets."""

import time
from statistics import median

import torch
import torch.distributed as dist

from cputrain.comm.bucket_sizes import MEASURED_BYTES, fit_alpha_beta

ROUNDS = 5


def measure_alpha_beta() -> tuple[float, float]:
    """Measure alpha and beta of the default group's float32 all-reduce; every rank gets those of the slowest rank."""
    medians = []
    for size in MEASURED_BYTES:
        values, seconds = torch.zeros(size // 4), []
        for _ in range(ROUNDS):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(values)
            seconds.append(time.perf_counter() - started)
        medians.append(median(seconds))
    slowest = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return fit_alpha_beta(list(zip(map(float, MEASURED_BYTES), slowest.tolist(), strict=True)))
