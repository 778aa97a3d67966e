"""Callbacks of futures that wait for other collectives: tasks of tests/support/ccl_stranger.py."""

import threading

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def future_of_sum(values: torch.Tensor) -> Future[list[torch.Tensor]]:
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    return work.get_future()


def a_callback_waits_for_the_collective_that_it_calls() -> None:
    def nested(depth: int) -> Future[torch.Tensor]:
        return future_of_sum(torch.ones(3)).then(lambda sums: nested(depth - 1).wait() if depth else sums.value()[0])

    assert nested(5).wait()[0] == dist.get_world_size()


def a_callback_waits_for_an_earlier_collective() -> None:
    """The larger one is in flight when the callback of the small one begins to wait for it."""
    later: list[Future[list[torch.Tensor]]] = []
    called = threading.Event()

    def wait_for_later(_: Future[list[torch.Tensor]]) -> torch.Tensor:
        called.wait()
        return later[0].wait()[0]

    chained = future_of_sum(torch.ones(4)).then(wait_for_later)
    later.append(future_of_sum(torch.ones(4 << 20)))
    called.set()
    assert chained.wait().min() == dist.get_world_size()


def a_hook_of_ddp_waits_in_its_callback() -> None:
    """PowerSGD approximates a gradient of rank 1 exactly, by three collectives in a row."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    model = DistributedDataParallel(layer)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        layer.zero_grad()
        model(torch.full((2, 64), float(dist.get_rank()))).sum().backward()
    mean = sum(2.0 * rank for rank in range(dist.get_world_size())) / dist.get_world_size()
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, torch.full((64, 64), mean), rtol=1e-4)


ALL = (
    a_callback_waits_for_the_collective_that_it_calls,
    a_callback_waits_for_an_earlier_collective,
    a_hook_of_ddp_waits_in_its_callback,
)
