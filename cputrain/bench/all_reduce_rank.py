"""python -m cputrain.bench.all_reduce_rank BACKEND ROUNDS FILE BYTES...: one rank of all-reduces on this host.

Rank 0 writes a JSON object to FILE: bytes -> seconds of each round, of an all-reduce and of a copy by one core.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cputrain.affinity.kernel.bound_plan import bound_worker
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.ranks.rank import Rank, discover
from cputrain.affinity.terminal import use_utf8
from cputrain.launch.rank_process import run_rank

TIMEOUT_S = 300.0
FLOAT = 4


def measure(
    rank: Rank, worker: WorkerPlan, backend: str, rounds: int, file: Path, sizes: list[int], env: Mapping[str, str]
) -> None:
    """Time all-reduces and copies of float32 values of each size."""
    import torch
    import torch.distributed as dist

    from cputrain.comm.group import end_group, start_group

    torch.set_num_threads(1)
    group = start_group(rank, worker, backend, TIMEOUT_S, env)
    found: dict[int, dict[str, list[float]]] = {}
    for size in sizes:
        values, copied = torch.zeros(size // FLOAT), torch.ones(size // FLOAT)

        def all_reduce(values: torch.Tensor = values) -> None:
            dist.all_reduce(values)

        def copy(values: torch.Tensor = values, copied: torch.Tensor = copied) -> None:
            copied.copy_(values)

        found[size] = {"all-reduce": _timed(all_reduce, rounds), "copy": _timed(copy, rounds)}
    if rank.rank == 0:
        file.write_text(json.dumps(found), encoding="utf-8")
    end_group(group)


def _timed(act: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of each round, which all ranks begin together; one more before them does not count."""
    import torch.distributed as dist

    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def main() -> None:
    """Run one rank."""
    backend, rounds, file, *sizes = sys.argv[1:]
    env = os.environ
    rank, worker = discover(env), bound_worker(env)
    assert rank is not None and worker is not None, "started by `cputrain bench comm`"
    run_rank(rank, lambda: measure(rank, worker, backend, int(rounds), Path(file), list(map(int, sizes)), env))


if __name__ == "__main__":
    use_utf8()
    main()
