"""Peer of benchmarks/step_overhead.py: only DDP, on a network of one weight; prints microseconds per step.

Each line is the mean step of a window of steps, on rank 0.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group: see cputrain/comm/group.py
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--windows", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group(options.backend)
    network = nn.Linear(1, 1)
    ddp = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, fused=True)
    x = torch.randn(options.batch, 1)
    y = 2 * x + 1
    taken = []
    for _ in range(options.windows):
        started = time.perf_counter()
        for _ in range(options.window):
            loss = (ddp(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        taken.append((time.perf_counter() - started) / options.window)
    if dist.get_rank() == 0:
        print("\n".join(f"{1e6 * seconds:.1f}" for seconds in taken), flush=True)
    dist.barrier()
    os._exit(0)  # destroying torch's gloo group would wait, holding the GIL, for a thread that may need the GIL


if __name__ == "__main__":
    main()
