"""Callbacks of futures that wait for other collectives: tasks of tests/support/ccl_stranger.py."""

import time
from datetime import timedelta

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
    """The larger collective is in flight when the small one's callback starts to wait for it."""
    small, large = future_of_sum(torch.ones(4)), future_of_sum(torch.ones(4 << 20))
    assert small.then(lambda _: large.wait()[0]).wait().min() == dist.get_world_size()


def a_callback_waits_for_a_collective_that_has_ended_with_its_own() -> None:
    """Both collectives complete on the other ranks when the last rank arrives, between two polls."""
    for _ in range(20):
        if dist.get_rank() == 1:
            time.sleep(0.01)
        first, second = future_of_sum(torch.ones(4)), future_of_sum(torch.ones(4))
        assert waited_for(first, second).wait().tolist() == [dist.get_world_size()] * 4


def waited_for(first: Future[list[torch.Tensor]], second: Future[list[torch.Tensor]]) -> Future[torch.Tensor]:
    """Return the result of the second collective, for which a callback of the first one waits."""
    return first.then(lambda _: second.wait()[0])


def a_hook_of_ddp_waits_in_its_callback() -> None:
    """PowerSGD approximates a gradient of rank 1 exactly, with three consecutive collectives."""
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
    a_callback_waits_for_a_collective_that_has_ended_with_its_own,
    a_hook_of_ddp_waits_in_its_callback,
)


def error_of_a_callback_that_waits_for_another_one_that_fails() -> str:
    """Rank 1 joins neither collective; the other ranks get an error after 4 s."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    if dist.get_rank() == 1:
        time.sleep(15)
        return ""
    first, second = (dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future() for _ in range(2))
    try:
        waited_for(first, second).wait()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")
