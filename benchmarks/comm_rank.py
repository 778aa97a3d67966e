"""One rank of benchmarks.comm: all-reduces, or ResNet-50 steps, over a c10d backend; rank 0 prints JSON lines.

python -m benchmarks.comm_rank ccl|gloo allreduce ROUNDS BYTES...
python -m benchmarks.comm_rank ccl|gloo levels ROUNDS BYTES...
python -m benchmarks.comm_rank ccl|gloo ddp ROUNDS LOCAL_BATCH CROP [bf16]
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from affinity.ranks.rank import discover, rendezvous
from cputrain.models.build import build_model
from cputrain.recipe.schema import ModelSection


def main() -> None:
    backend, what, rounds, *rest = sys.argv[1:]
    rank = discover(os.environ)
    assert rank is not None, "start it through a launcher"
    os.environ.update(rendezvous(rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    torch.set_num_threads(1)
    if backend == "ccl":
        import cputrain.comm.ccl  # noqa: F401
    dist.init_process_group(backend)
    if what == "allreduce":
        for size in map(int, rest):
            tell(bytes=size, seconds=allreduce(size, int(rounds)))
    elif what == "levels":
        act = two_levels(rank.local_world_size)
        for size in map(int, rest):
            values = torch.ones(size // 4)
            once = partial(act, values)
            once()
            tell(bytes=size, flat=allreduce(size, int(rounds)), levels=timed(once, int(rounds)))
    else:
        tell(**ddp(int(rounds), int(rest[0]), int(rest[1]), compressed="bf16" in rest))
    dist.barrier()
    dist.destroy_process_group()


def tell(**values: float) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(values), flush=True)


def allreduce(size: int, rounds: int) -> float:
    """Median seconds of an all-reduce of so many bytes of float32."""
    values = torch.ones(size // 4)

    def once() -> None:
        dist.all_reduce(values)

    return timed(once, rounds)


def two_levels(per_host: int) -> Callable[[torch.Tensor], None]:
    """An all-reduce by hand: sums scattered inside each host, parts summed over the hosts, gathered again."""
    me, world = dist.get_rank(), dist.get_world_size()
    inside = [dist.new_group(range(first, first + per_host)) for first in range(0, world, per_host)][me // per_host]
    across = [dist.new_group(range(local, world, per_host)) for local in range(per_host)][me % per_host]

    def reduce(values: torch.Tensor) -> None:
        part = values.new_empty(values.numel() // per_host)
        dist.reduce_scatter_tensor(part, values, group=inside)
        dist.all_reduce(part, group=across)
        dist.all_gather_into_tensor(values, part, group=inside)

    return reduce


def timed(act: Callable[[], None], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def ddp(rounds: int, batch: int, crop: int, *, compressed: bool) -> dict[str, float]:
    """Median seconds of a step of DDP's and of one without communication, in turns."""
    model = build_model(ModelSection(name="resnet50"), 1000, 224).to(memory_format=torch.channels_last)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if compressed:
        from cputrain.comm.hooks import Bf16AllReduceHook

        wrapped.register_comm_hook(None, Bf16AllReduceHook().hook)
    images = torch.randn(batch, 3, crop, crop).to(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.long)

    def step(sync: bool) -> None:
        with nullcontext() if sync else wrapped.no_sync():
            cross_entropy(wrapped(images), labels).backward()
        wrapped.zero_grad()

    step(True)
    step(True)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for sync in (True, False):
            seconds[sync].append(timed(lambda sync=sync: step(sync), 1))
    return {"step": median(seconds[True]), "no_sync": median(seconds[False])}


if __name__ == "__main__":
    main()
