"""The parts in a loop of a user's own, without a recipe."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cputrain.comm.hooks import compress_bf16
from cputrain.mpi.supervise.run import free_port
from cputrain.optim import Lars, param_groups
from tests.support.forked import ended, forked, forking_python

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python")
# 64 gradients of rank 0 whose digits bfloat16 does not hold; rank 1's are 0, as the sum of ranks is rounded, too.
MEANS = """
import gc, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from cputrain.comm import compress_bf16

dist.init_process_group("gloo")
rank = dist.get_rank()
network = nn.Linear(1000, 1, bias=False)
ddp = DistributedDataParallel(network)
hook = compress_bf16(ddp)
given = torch.linspace(1, 1.01, 1000) * (1 - rank)
total = torch.zeros(1000)
for _ in range(64):
    ddp(given[None]).sum().backward()
    total += network.weight.grad[0]
    network.zero_grad()
mean = torch.linspace(1, 1.01, 1000) / 2
sys.stdout.write(f"{float((total / 64 - mean).abs().max()):.6f} {len(hook.residuals)}\\n")  # in one piece
del ddp  # before its group, whose end could wait forever: docs/known-issues.md
gc.collect()
dist.destroy_process_group()
"""


def test_the_guide_s_loop_trains_on_two_ranks(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/parts.md").read_text()
    (tmp_path / "mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    with forked(*TORCHRUN, *forking_python(), "-m", "mine", cwd=tmp_path, MASTER_PORT=str(free_port())) as job:
        end = ended(job)
    assert end.status == 0, end.err
    losses = dict(re.findall(r"rank (\d): loss (\d\.\d+)", end.out))
    assert sorted(losses) == ["0", "1"] and all(float(loss) < 0.4 for loss in losses.values()), losses


def test_the_guide_s_other_blocks_run_and_its_checkpoints_resume_bit_for_bit(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/parts.md").read_text()
    kernels, narrow, loop, opened = (block.partition("```")[0] for block in page.split("```python\n")[2:6])
    made = "import torch\nmodel, images = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3)), torch.zeros(4, 3, 16, 16)\n"
    made += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    with forked("-c", made + kernels + narrow, cwd=tmp_path) as process:
        end = ended(process)
    assert end.status == 0 and end.out.startswith("kernels for float32"), end.err
    found = []
    for name, steps in (("whole", 60), ("parts", 40), ("parts", 60)):
        (tmp_path / name).mkdir(exist_ok=True)
        more = opened if steps == 60 else ""
        with forked("-c", loop.replace("60", str(steps)) + more, cwd=tmp_path / name) as process:
            end = ended(process)
        assert end.status == 0, end.err
        found.append(end.out)
    assert found[0] == found[2] != found[1] and re.fullmatch(r"loss 0\.\d+\n", found[0])


def test_gradients_as_bfloat16_are_means_whose_rounding_errors_are_made_up_for(tmp_path: Path) -> None:
    """bfloat16 alone would leave errors of up to 0.4 %."""
    (tmp_path / "means.py").write_text(MEANS)
    with forked(*TORCHRUN, *forking_python(), "-m", "means", cwd=tmp_path, MASTER_PORT=str(free_port())) as job:
        end = ended(job)
    assert end.status == 0, end.err
    for line in end.out.splitlines():
        error, parameters = line.split()
        assert float(error) < 2e-4 and parameters == "1"
    assert len(end.out.splitlines()) == 2


@pytest.mark.usefixtures("group")
def test_parameters_that_bfloat16_would_not_halve_are_refused() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match=r"compress_bf16 needs float32 parameters, some are torch\.float64"):
        compress_bf16(ddp)


def test_biases_and_batch_norm_have_a_group_of_their_own() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    network[3].weight.requires_grad_(False)
    layers, channels = param_groups(network, weight_decay=0.1)
    assert layers == {"params": [network[0].weight], "weight_decay": 0.1}
    assert [p.shape for p in channels["params"]] == [(4,), (4,), (4,), (2,)]
    assert (channels["weight_decay"], channels["adapt"]) == (0.0, False)
    assert param_groups(network, weight_decay=0.1, decay_bn_and_bias=True)[1]["weight_decay"] == 0.1
    loss = nn.Module()
    loss.network, loss.temperature = network, nn.Parameter(torch.ones(()))
    layers, channels = param_groups(network, loss, weight_decay=0.1)
    assert len(layers["params"]) == 1 and channels["params"][-1] is loss.temperature and len(channels["params"]) == 5
    assert [group["weight_decay"] for group in Lars([layers, channels], lr=0.1).param_groups] == [0.1, 0.0]
