"""One rank of other benchmarks: all-reduces or training steps over a c10d backend; rank 0 prints JSON lines.

python -m benchmarks.comm_rank ccl|gloo allreduce ROUNDS BYTES...
python -m benchmarks.comm_rank ccl|gloo levels ROUNDS BYTES...
python -m benchmarks.comm_rank ccl|gloo ddp ROUNDS NETWORK LOCAL_BATCH CROP [bf16]
python -m benchmarks.comm_rank gloo alone ROUNDS NETWORK CROP LOCAL_BATCH...
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from cputrain.affinity.rank import rank_from_env, rendezvous
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings

REDUCED = 24 << 20  # bytes
K = TypeVar("K")


def main() -> None:
    backend, what, rounds, *rest = sys.argv[1:]
    rank = rank_from_env(os.environ)
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
    elif what == "alone":
        network, crop, *batches = rest
        for batch, seconds in alone(int(rounds), network, int(crop), list(map(int, batches))).items():
            tell(batch=batch, seconds=seconds)
    else:
        network, batch, crop, *more = rest
        tell(**ddp(int(rounds), network, int(batch), int(crop), compressed="bf16" in more))
    dist.barrier()
    dist.destroy_process_group()


def tell(**values: float) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(values), flush=True)


def allreduce(size: int, rounds: int) -> float:
    """Return the median seconds of an all-reduce of `size` bytes of float32."""
    values = torch.ones(size // 4)

    def once() -> None:
        dist.all_reduce(values)

    return timed(once, rounds)


def two_levels(per_host: int) -> Callable[[torch.Tensor], None]:
    """All-reduce manually: reduce-scatter inside each host, all-reduce over the hosts, all-gather inside each host."""
    me, world = dist.get_rank(), dist.get_world_size()
    inside = [dist.new_group(range(first, first + per_host)) for first in range(0, world, per_host)][me // per_host]
    across = [dist.new_group(range(local, world, per_host)) for local in range(per_host)][me % per_host]

    def reduce(values: torch.Tensor) -> None:
        part = values.new_empty(values.numel() // per_host)
        dist.reduce_scatter_tensor(part, values, group=inside)
        dist.all_reduce(part, group=across)
        dist.all_gather_into_tensor(values, part, group=inside)

    return reduce


def timed(act: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def ddp(rounds: int, network: str, batch: int, crop: int, *, compressed: bool) -> dict[str, float]:
    """Return the median seconds of a DDP step, a step without communication, an all-reduce, and a copy of REDUCED bytes
    by all ranks at once; measured in turns."""
    wrapped = DistributedDataParallel(built(network, crop), gradient_as_bucket_view=True)
    if compressed:
        from cputrain.comm.hooks import Bf16AllReduceHook

        wrapped.register_comm_hook(None, Bf16AllReduceHook().hook)
    values = torch.ones(REDUCED // 4)
    copied = torch.zeros_like(values)

    def step(*, sync: bool) -> None:
        with nullcontext() if sync else wrapped.no_sync():
            train(wrapped, batch, crop)

    acts = {
        "step": partial(step, sync=True),
        "no_sync": partial(step, sync=False),
        "all_reduce": lambda: dist.all_reduce(values),
        "copy": lambda: copied.copy_(values),
    }
    for _ in range(2):
        step(sync=True)
    return in_turns(acts, rounds)


def alone(rounds: int, network: str, crop: int, batches: list[int]) -> dict[int, float]:
    """Return the median seconds of a step without communication by local batch, and of a copy of REDUCED bytes as 0."""
    model = built(network, crop)
    acts: dict[int, Callable[[], object]] = {batch: partial(train, model, batch, crop) for batch in batches}
    values = torch.ones(REDUCED // 4)
    acts[0] = partial(torch.zeros_like(values).copy_, values)
    for act in acts.values():
        act()
    return in_turns(acts, rounds)


def built(network: str, crop: int) -> torch.nn.Module:
    return build_model(ModelSettings(name=network), 1000, crop).to(memory_format=torch.channels_last)


def train(model: torch.nn.Module, batch: int, crop: int) -> None:
    """Compute a step without the optimizer."""
    images = torch.full((batch, 3, crop, crop), 0.5).to(memory_format=torch.channels_last)
    cross_entropy(model(images), torch.zeros(batch, dtype=torch.long)).backward()
    model.zero_grad()


def in_turns(acts: dict[K, Callable[[], object]], rounds: int) -> dict[K, float]:
    """Return the median seconds of each function, called in turns so that a disturbance affects all of them."""
    seconds: dict[K, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            seconds[name].append(timed(act, 1))
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
