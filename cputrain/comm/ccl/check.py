"""The oneCCL check of cputrain doctor: two ranks on this host sum tensors, which verifies and times all-reduces."""

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from affinity.errors import RunError
from affinity.ranks.rank import LOOPBACK, Rank, rendezvous
from cputrain.comm import ccl
from mpi.supervise.local import free_port

SIZES = (1 << 10, 1 << 20, 25 << 20)  # bytes
ROUNDS, TIMEOUT_S = 9, 120.0


def time_two_ranks() -> dict[int, float]:
    """Median seconds of an all-reduce by its size in bytes. Raises RunError with the ranks' last line of output."""
    port = free_port()
    with tempfile.TemporaryFile() as output:
        ranks = []
        for i in (0, 1):
            rank = Rank(rank=i, world_size=2, local_rank=i, local_world_size=2, convention="env")
            env = {**os.environ, **rendezvous(rank, LOOPBACK, port)}
            command = [sys.executable, "-m", "cputrain.comm.ccl.check"]
            ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
        deadline = time.monotonic() + TIMEOUT_S
        try:
            statuses = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in ranks]
        except subprocess.TimeoutExpired:
            statuses = [1]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if any(statuses):
        last = lines[-1] if lines else "no output"
        raise RunError(f"an all-reduce of two ranks on this host failed over oneCCL: {last}")
    return {int(size): seconds for line in lines if line.startswith("{") for size, seconds in json.loads(line).items()}


def main() -> None:
    """Run one of the two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(ccl.BACKEND)
    medians = {}
    for size in SIZES:
        seconds = []
        for _ in range(ROUNDS):
            values = torch.full((size // 4,), float(dist.get_rank() + 1))
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(values)
            seconds.append(time.perf_counter() - started)
            if not bool((values == 3.0).all()):
                raise RunError(f"an all-reduce of {size} bytes returned a wrong sum")
        medians[size] = median(seconds)
    if dist.get_rank() == 0:
        os.write(1, json.dumps(medians).encode() + b"\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
