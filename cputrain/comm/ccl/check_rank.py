"""python -m cputrain.comm.ccl.check_rank: one of two ranks that verify and time all-reduces on a core each.

Rank 0 prints a JSON object: bytes -> seconds of each round.
"""

import json
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.ranks.rank import discover, with_rank
from cputrain.affinity.terminal import use_utf8
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.comm import ccl
from cputrain.measurements import BUCKET_BYTES

SIZES = (1 << 10, 1 << 20, BUCKET_BYTES)
ROUNDS = 9


def main() -> None:
    """Run one rank."""
    env = os.environ
    rank = discover(env)
    if rank is None:
        raise InputError("this is one rank of two: run cputrain doctor ccl")
    env.update(with_rank(rank, env))  # torch reads them there
    cores = this_machine().allowed_cores
    os.sched_setaffinity(0, cores[rank.rank * len(cores) // rank.world_size].pus)
    torch.set_num_threads(1)
    dist.init_process_group(ccl.BACKEND)
    found = {size: _timed(size) for size in SIZES}
    if rank.rank == 0:
        os.write(1, json.dumps(found).encode() + b"\n")
    dist.barrier()
    dist.destroy_process_group()


def _timed(size: int) -> list[float]:
    """Seconds of each round; one more before them does not count."""
    seconds = []
    for _ in range(ROUNDS + 1):
        values = torch.full((size // 4,), float(dist.get_rank() + 1))
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        seconds.append(time.perf_counter() - started)
        if not bool((values == 3.0).all()):
            raise RunError(f"an all-reduce of {size} bytes returned a wrong sum")
    return seconds[1:]


if __name__ == "__main__":
    use_utf8()
    main()
