"""The comparison of the ranks' weights: one changed bit is found, and the rank that differs is named."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cputrain.checksums import bit_sum, in_memory_order
from cputrain.training.watchers.replicas import describe_difference, odd_ranks, replica_tensors
from tests.support import trainings
from tests.support.by_hand import ranks_of_code
from tests.support.commands import needs_two_cores
from tests.support.images import write_images
from tests.support.trainings import SMALL

HOSTS = ("n1", "n1", "n2", "n2")


@dataclass
class State:
    """What of a TrainState is compared."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    ema_model: Any = field(default=None)


def trained() -> State:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5 * 36, 3))
    network.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    network(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    return State(network, optimizer)


def tensors_of(state: State) -> list[torch.Tensor]:
    return [*replica_tensors(state.network, state.optimizer).values()]


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    words = in_memory_order(tensor).view(torch.int32)
    words[place] ^= 1 << bit


def test_one_flipped_bit_of_weights_or_momentum_changes_the_sum() -> None:
    state = trained()
    before = bit_sum(tensors_of(state))
    assert bit_sum(tensors_of(trained())) == before
    for tensor in tensors_of(state):
        for bit in (0, 22, 30):
            flip(tensor, tensor.numel() - 1, bit)
            assert bit_sum(tensors_of(state)) != before
            flip(tensor, tensor.numel() - 1, bit)
    assert bit_sum(tensors_of(state)) == before


def test_statistics_of_batch_norm_do_not_count() -> None:
    state = trained()
    before = bit_sum(tensors_of(state))
    state.network[1].running_mean.add_(1.0)
    assert bit_sum(tensors_of(state)) == before


def test_the_sum_depends_on_the_order_of_tensors_and_not_on_the_number_of_threads() -> None:
    a, b = torch.randn(3_000_001), torch.randn(7).double()
    one = bit_sum([a, b])
    assert bit_sum([b, a]) != one
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert bit_sum([a, b]) == one
    finally:
        torch.set_num_threads(threads)
    assert bit_sum([a[1:]]) == bit_sum([a[1:].clone()]), "at any place in memory"


@pytest.mark.parametrize(
    ("sums", "odd"),
    [([7, 7, 3, 7], [2]), ([3, 7], [0, 1]), ([7, 7, 3, 3], [0, 1, 2, 3]), ([1, 2, 1, 1], [1]), ([1, 2, 3], [0, 1, 2])],
)
def test_the_minority_is_odd_and_without_a_majority_all_are(sums: list[int], odd: list[int]) -> None:
    assert odd_ranks(sums) == odd


def test_the_message_names_rank_host_and_steps() -> None:
    assert describe_difference([2], HOSTS, 1200, 1100) == (
        "rank 2 on n2 differs from the 3 other ranks in its weights after step 1,200 (equal after step 1,100): exclude "
        "this host, whose memory or processor may be faulty, and continue with --resume"
    )
    assert describe_difference([0, 1], HOSTS[:2], 20, 10).startswith(
        "ranks 0 on n1, 1 on n1 have different weights after step 20 (equal after step 10): test memory and processors "
        "of their hosts"
    )
    assert "differ from the 2 other ranks" in (line := describe_difference([1, 3], HOSTS, 20, 10))
    assert line.endswith("exclude these hosts, whose memory or processors may be faulty, and continue with --resume")


ROUNDING = """
import json, torch, torch.distributed as dist
from cputrain.affinity.errors import RunError
from cputrain.training.watchers.replicas import ReplicaCheck, bit_sum, replica_tensors

dist.init_process_group("gloo")
rank, warned = dist.get_rank(), []
torch.set_num_threads(1 + rank)
torch.manual_seed(0)
network = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
check = ReplicaCheck(
    network=network,
    optimizer=optimizer,
    every=5,
    warn=lambda step, what: warned.append((step, what)),
    wait=lambda: None,
    same_after=0,
)
check.hosts = ("n1", "n2")

def after_step(step):
    check.after_step(step, None, None, 1.0)

def sums():
    both = [None, None]
    dist.all_gather_object(both, bit_sum(replica_tensors(network, optimizer).values()))
    return both

for step in (5, 10):
    with torch.no_grad():
        network.weight.mul_(1 + rank * 1e-6)
    before = sums()
    after_step(step)
    print(step, before[0] != before[1], len(set(sums())))
with torch.no_grad():
    network.weight.mul_(1 + rank)
try:
    after_step(14)
    check.before_save(15)
except RunError as error:
    print(json.dumps({"error": str(error), "warned": warned, "same_after": check.same_after}), flush=True)
except RuntimeError:
    print(json.dumps({"error": "", "warned": warned, "same_after": check.same_after}), flush=True)
"""


def test_ranks_that_round_differently_take_rank_0_s_weights_and_larger_differences_end_the_run() -> None:
    """Ranks of one and of two threads; the second one waits until the first has ended."""
    first, second = ranks_of_code(ROUNDING)
    for one in (first, second):
        assert one["same_after"] == 10
        assert [step for step, _ in one["warned"]] == [5]
        assert "numbers of threads differ (0 on n1, 1 on n2): all take rank 0's weights" in one["warned"][0][1]
    expected = "ranks 0 on n1, 1 on n2 have different weights after step 15 (equal after step 10)"
    assert first["error"].startswith(expected)
    assert second["error"] == ""


@pytest.mark.slow
@needs_two_cores
def test_a_flipped_bit_ends_a_training_and_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "images", train=9, val=2)
    network = ("comm.backend=gloo", "epochs=20")
    flip = {"FAULT_RANK": "1", "FAULT_FLIP": "4"}
    compared = "compare_weights_every_steps=2"
    result = trainings.trained(tmp_path, 2, ("imagefolder", *SMALL, *network, compared), **flip)
    assert result.returncode == 1
    message = r"ranks 0 on \S+, 1 on \S+ have different weights after step 4 \(equal after step 2\)"
    assert re.search(message, result.stderr), result.stderr
