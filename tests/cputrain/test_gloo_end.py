"""The end of gloo's groups in launched programs: torch alone waits forever for a thread that needs Python's lock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from _cputrain_autoload import STACK_VARIABLE
from cputrain.comm import gloo_end

# Rank 1 joins an operation late. Then a thread of rank 0's gloo frees the tensor, for which it needs Python's lock.
PROGRAM = """
import sys, time
import torch, torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
rank, folder, way = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/meet")

def train():
    network = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    dist.barrier()
    time.sleep(rank)
    dist.all_reduce(torch.ones(2), async_op=True)
    if way != "freed":
        globals()["network"] = network
    if way != "left":
        dist.destroy_process_group()

train()
print("trained", flush=True)
if way == "exits":
    sys.exit(3)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "status"),
    [("freed", 0), *(pytest.param(way, status, marks=pytest.mark.long) for way, status in (("left", 0), ("exits", 3)))],
)
def test_a_launched_program_ends_while_gloo_frees_an_operation(way: str, status: int, tmp_path: Path) -> None:
    ranks = [start(str(rank), str(tmp_path), way) for rank in range(2)]
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [(rank.returncode, output) for rank, (output, _) in zip(ranks, ended, strict=True)] == [
        (status, "trained\n")
    ] * 2, ended


def test_after_an_error_networks_and_groups_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [(object, object())]
    monkeypatch.setattr(gloo_end, "_groups", groups)
    monkeypatch.setattr(sys, "last_value", OSError("the disk is full"), raising=False)
    gloo_end._end_groups()
    assert len(groups) == 1
    monkeypatch.delattr(sys, "last_value")
    gloo_end._end_groups()
    assert not groups


def start(*arguments: str) -> "subprocess.Popen[str]":
    env = {**os.environ, STACK_VARIABLE: "none"}  # as a launcher of ours sets it
    command = (sys.executable, "-c", PROGRAM, *arguments)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, encoding="utf-8")


def test_other_programs_have_torch_s_own_networks() -> None:
    assert DistributedDataParallel._ddp_init_helper.__module__ == DistributedDataParallel.__module__
