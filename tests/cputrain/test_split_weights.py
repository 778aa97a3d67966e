"""bfloat16 weights with the rest of their float32 values beside them: trained as float32 ones are, bit for bit."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import cputrain
from cputrain import AsyncCheckpoint, Lamb, Lars
from cputrain.affinity.errors import InputError
from cputrain.kernels.split_weights import SplitParameter, split
from cputrain.mpi.supervise.run import free_port
from tests.support.forked import ended, forked, forking_python

pytestmark = pytest.mark.slow

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "dampened, ascending": lambda p: SGD(p, lr=1e-3, momentum=0.9, dampening=0.3, maximize=True),
    "Nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "Adam": lambda p: Adam(p, lr=0.01, weight_decay=1e-3),
    "AMSGrad": lambda p: Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "LARS": lambda p: Lars(p, lr=1.0, weight_decay=1e-3),
    "LARS, Nesterov": lambda p: Lars(p, lr=1.0, weight_decay=1e-3, nesterov=True, variant="nus"),
    "LAMB": lambda p: Lamb(p, lr=0.01, weight_decay=1e-3),
}
SPLIT: dict[str, Any] = {"dtype": torch.bfloat16, "master_weights": "split"}


def built(seed: int = 1) -> nn.Sequential:
    """A network with convolutions channels-last in memory, and weights of more than a block of the kernels."""
    torch.manual_seed(seed)
    layers = nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 40, 3, bias=False), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(640, 57), nn.Linear(57, 5)).to(memory_format=torch.channels_last)


def images(number: int) -> Tensor:
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(number))


def gradients(network: nn.Module, number: int) -> Tensor:
    """Compute gradients under autocast; return the loss."""
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = network(images(number)).float().square().mean()
    loss.backward()
    return loss.detach()


def trained(network: nn.Module, optimizer: Optimizer, steps: range = range(4)) -> list[float]:
    losses = []
    for number in steps:
        losses.append(float(gradients(network, number)))
        optimizer.step()
    return losses


def equal(found: Any, expected: Any) -> bool:
    """Compare two nested states bit for bit."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in found)
    if isinstance(found, list):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(found, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return bool(found == expected)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_are_those_of_the_float32_optimizer_fed_with_the_same_gradients(
    name: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, plain = built(), built()
    optimizer, other = OPTIMIZERS[name](network.parameters()), OPTIMIZERS[name](plain.parameters())
    for group in (*optimizer.param_groups, *other.param_groups) if isinstance(other, SGD | Adam) else ():
        group |= {"fused": True, "foreach": False}
    assert cputrain.optimize(network, optimizer, **SPLIT) == (network, optimizer)
    assert isinstance(optimizer, type(other))
    if "AVX" in torch.backends.cpu.get_cpu_capability():
        assert optimizer.split_steps.direct, "the kernels' loops have the bits of torch's on CPUs with AVX2"
    monkeypatch.setattr(optimizer.split_steps, "direct", direct)
    for number in range(6):
        gradients(network, number)
        for weight, of_plain in zip(network.parameters(), plain.parameters(), strict=True):
            assert weight.grad is not None
            of_plain.grad = torch.empty_like(of_plain).copy_(weight.grad)
        kept = [weight.grad for weight in network.parameters()]
        optimizer.step()
        other.step()
        assert all(a is b.grad for a, b in zip(kept, network.parameters(), strict=True))
    assert sum(isinstance(weight, SplitParameter) for weight in network.parameters()) == 7
    assert {weight.dtype for weight in network.parameters()} == {torch.bfloat16, torch.float32}
    for weight_name, weight in plain.named_parameters():
        assert torch.equal(network.state_dict()[weight_name], weight)
    assert equal(optimizer.state_dict()["state"], other.state_dict()["state"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_every_float32_is_split_and_joined_without_loss(bits: list[int]) -> None:
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    upper, lower = split(values)
    weight = nn.Parameter(upper)
    weight.__class__ = SplitParameter
    weight.lower = lower
    joined = weight.joined()
    assert torch.equal(joined.isnan(), values.isnan())
    number = ~values.isnan()
    assert torch.equal(joined[number].view(torch.int32), values[number].view(torch.int32))
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000  # away from zero, where bfloat16() rounds to even
    assert torch.equal(upper[number & ~ties], values.bfloat16()[number & ~ties])
    assert torch.equal(upper.isnan(), values.isnan())


def test_the_first_step_has_autocast_s_gradients() -> None:
    network, plain = built(), built()
    for weight in (*network.parameters(), *plain.parameters()):
        weight.data.view(torch.int32).bitwise_or_(1)  # no ties, which autocast rounds to even
    cputrain.optimize(network, SGD(network.parameters(), 0.1), **SPLIT)
    cputrain.optimize(plain, dtype=torch.bfloat16)
    assert gradients(network, 1) == gradients(plain, 1)
    for weight, of_plain in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight.grad.float(), of_plain.grad)


def test_a_training_goes_as_with_float32_weights() -> None:
    found = []
    for options in (SPLIT, {"dtype": torch.bfloat16}):
        network = built()
        optimizer = SGD(network.parameters(), lr=0.02, momentum=0.9)
        cputrain.optimize(network, optimizer, **options)
        found.append(trained(network, optimizer, range(12)))
    assert found[0] == pytest.approx(found[1], rel=2e-2) and found[0][-1] < found[0][0] / 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dicts_are_float32_load_in_plain_torch_and_continue_exactly(name: str) -> None:
    network = built()
    optimizer = OPTIMIZERS[name](network.parameters())
    cputrain.optimize(network, optimizer, **SPLIT)
    trained(network, optimizer)
    saved = io.BytesIO()
    torch.save((network.state_dict(), optimizer.state_dict()), saved)
    losses = trained(network, optimizer, range(4, 7))
    weights, state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float32}
    plain = built(2)
    of_plain = OPTIMIZERS[name](plain.parameters())
    plain.load_state_dict(weights)
    of_plain.load_state_dict(state)
    assert equal(plain.state_dict(), weights)
    again = built(3)
    of_again = OPTIMIZERS[name](again.parameters())
    cputrain.optimize(again, of_again, **SPLIT)
    again.load_state_dict(plain.state_dict())
    of_again.load_state_dict(of_plain.state_dict())
    assert trained(again, of_again, range(4, 7)) == losses
    assert equal(again.state_dict(), network.state_dict())
    assert equal(of_again.state_dict()["state"], optimizer.state_dict()["state"])


def test_checkpoints_resume_exactly_with_or_without_split_weights(tmp_path: Path) -> None:
    def loop(stop: int, *, splits: bool) -> dict[str, Tensor]:
        network = built()
        optimizer = SGD(network.parameters(), lr=0.05, momentum=0.9)
        if splits:
            cputrain.optimize(network, optimizer, **SPLIT)
        with AsyncCheckpoint(tmp_path / "parts") as checkpoint:
            found = checkpoint.restore(network, optimizer)
            trained(network, optimizer, range(found.step if found else 0, stop))
            checkpoint.save(stop, network, optimizer)
        return network.state_dict()

    loop(3, splits=True)
    parts = loop(6, splits=True)
    whole = built()
    optimizer = SGD(whole.parameters(), lr=0.05, momentum=0.9)
    cputrain.optimize(whole, optimizer, **SPLIT)
    trained(whole, optimizer, range(6))
    assert equal(parts, whole.state_dict())
    assert equal(loop(6, splits=False), parts), "float32 weights load what split ones have saved"


def test_copies_and_pickles_have_float32_weights_so_that_averages_are_exact() -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9)
    cputrain.optimize(network, optimizer, **SPLIT)
    average = torch.optim.swa_utils.AveragedModel(
        network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    )
    trained(network, optimizer)
    weights = network.state_dict()
    for made in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert {type(weight) for weight in made.parameters()} == {nn.Parameter}
        assert equal(made.state_dict(), weights)
    assert {weight.dtype for weight in average.module.parameters()} == {torch.float32}
    both, of_both = copy.deepcopy((network, optimizer))
    assert type(of_both) is SGD and of_both.param_groups[0]["params"][0] is next(both.parameters())
    assert equal(of_both.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("multiple", [True, False])
def test_averages_take_the_float32_weights(multiple: bool) -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9)
    cputrain.optimize(network, optimizer, **SPLIT)
    swa = torch.optim.swa_utils
    way = {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.5)} if multiple else {"avg_fn": swa.get_ema_avg_fn(0.5)}
    average = swa.AveragedModel(network, **way)
    expected: dict[str, Tensor] = {}
    for number in range(3):
        trained(network, optimizer, range(number, number + 1))
        average.update_parameters(network)
        now = {name: value.clone() for name, value in network.state_dict().items() if "weight" in name}
        expected = {name: expected[name].lerp(value, 0.5) if expected else value for name, value in now.items()}
    found = average.module.state_dict()
    assert all(torch.allclose(found[name], value, rtol=1e-6, atol=1e-7) for name, value in expected.items())


def test_layers_are_computed_again_by_checkpointing() -> None:
    gradients_of = []
    for checkpoints in (False, True):
        network = built()
        cputrain.optimize(network, SGD(network.parameters(), lr=0.1), **SPLIT)
        with torch.autocast("cpu", torch.bfloat16):
            if checkpoints:
                outputs = torch.utils.checkpoint.checkpoint(network, images(1), use_reentrant=False)
            else:
                outputs = network(images(1))
        outputs.float().square().mean().backward()
        gradients_of.append([weight.grad for weight in network.parameters()])
    assert equal(*gradients_of)


def test_an_optimizer_whose_weights_another_package_replaced_is_refused() -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=0.1)
    cputrain.optimize(network, optimizer, **SPLIT)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(8))]  # as DeepSpeed's ZeRO does
    with pytest.raises(RuntimeError, match="the optimizer's weights were replaced, as by DeepSpeed: leave mas"):
        optimizer.step()


def test_restore_gives_the_float32_weights_back(capsys: pytest.CaptureFixture[str]) -> None:
    network = built()
    optimizer = AdamW(network.parameters(), lr=0.01)
    before = list(network.parameters())
    cputrain.optimize(network, optimizer, **SPLIT)
    cputrain.explain(network)
    said = (
        "bfloat16 weights, 4 layers (autocast casts none at each use; the optimizer has their float32 values):\n    0, "
    )
    assert said in capsys.readouterr().out
    trained(network, optimizer)
    weights = network.state_dict()
    cputrain.restore(network)
    assert all(a is b and type(a) is nn.Parameter for a, b in zip(network.parameters(), before, strict=True))
    assert equal(network.state_dict(), weights) and not network[0]._state_dict_hooks
    assert network[0].weight.grad is not None and network[0].weight.grad.dtype == torch.float32
    trained(network, optimizer)
    assert not equal(network.state_dict(), weights)


def test_two_calls_are_as_one() -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=0.05, momentum=0.9)
    cputrain.optimize(network, optimizer, **SPLIT)
    trained(network, optimizer)
    weights = network.state_dict()
    cputrain.optimize(network, optimizer, **SPLIT)
    assert equal(network.state_dict(), weights) and len(network[0]._state_dict_hooks) == 1
    assert isinstance(network[0].weight, SplitParameter)
    trained(network, optimizer)


def test_schedulers_hooks_and_closures_see_the_steps() -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps optimizer.step
    cputrain.optimize(network, optimizer, **SPLIT)
    seen: list[bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(network[0].weight.grad is not None))
    optimizer.register_step_post_hook(lambda *_: seen.append(network[0].weight.grad is not None))
    before = network.state_dict()
    with torch.no_grad():  # a closure has gradients anyway
        loss = optimizer.step(lambda: gradients(network, 1))
    scheduler.step()
    assert loss > 0 and seen == [False, True] and optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert not torch.equal(before["0.weight"], network.state_dict()["0.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


def frozen_bias() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(False)
    return layer


KEPT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shared with an embedding": (Tied, "a weight is shared with another layer"),
    "a class of one's own": (lambda: OwnLinear(4, 4), "OwnLinear, not a layer of torch"),
    "hooks": (hooked, "hooks"),
    "frozen": (frozen_bias, "not trained by the optimizer"),
    "float64": (lambda: nn.Linear(4, 4).double(), "a weight is torch.float64"),
    "complex": (lambda: nn.Linear(4, 4).to(torch.complex64), "a weight is torch.complex64"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        "ParametrizedLinear, not a layer of torch",
    ),
}


@pytest.mark.parametrize("what", KEPT)
def test_layers_that_cannot_be_split_stay_float32_and_are_named(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, why = KEPT[what]
    network = nn.Sequential(make(), nn.Linear(4, 4))
    before = [weight.dtype for weight in network[0].parameters()]
    optimizer = SGD([weight for weight in network.parameters() if weight.requires_grad], lr=0.1)
    cputrain.optimize(network, optimizer, **SPLIT)
    cputrain.explain(network)
    assert f"torch's: bfloat16 weights, 1 layer ({why})" in capsys.readouterr().out
    assert [weight.dtype for weight in network[0].parameters()] == before
    assert isinstance(network[1].weight, SplitParameter)


def test_an_optimizer_of_several_groups_over_a_part_of_the_network_and_of_others() -> None:
    network, other = built(), nn.Linear(3, 3)
    groups = [
        {"params": network[0].parameters(), "lr": 0.5},
        {"params": [*network[5].parameters(), *other.parameters()]},
    ]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    cputrain.optimize(network, optimizer, **SPLIT)
    assert [type(layer.weight) is SplitParameter for layer in (network[0], network[3], network[5], network[6])] == [
        *(True, False, True, False)
    ]
    before = network.state_dict()
    other.weight.grad = torch.ones_like(other.weight)
    start = other.weight.clone()
    gradients(network, 1)
    gradient = network[0].weight.grad.float()
    optimizer.step()
    assert torch.allclose(network.state_dict()["0.weight"], before["0.weight"] - 0.5 * gradient, atol=1e-6)
    assert torch.equal(network.state_dict()["3.weight"], before["3.weight"])
    assert torch.allclose(other.weight, start - 0.1)


class OwnSgd(SGD):
    pass


def bad(make: Make | None, **options: Any) -> Callable[[], Any]:
    network = built()
    optimizer = None if make is None else make(network.parameters())
    return lambda: cputrain.optimize(network, optimizer, **{**SPLIT, **options})


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "name": (bad(OPTIMIZERS["SGD"], master_weights="float32"), "master_weights='float32': give \"split\", or None"),
    "dtype": (
        bad(OPTIMIZERS["SGD"], dtype=torch.float32),
        'master_weights="split" needs dtype=torch.bfloat16, not torch.fl',
    ),
    "optimizer": (bad(None), 'master_weights="split" needs the optimizer, which updates the weights'),
    "class": (
        bad(RMSprop),
        'master_weights="split" has no kernel for torch.optim.rmsprop.RMSprop: use SGD, A',
    ),
    "own class": (
        bad(lambda p: OwnSgd(p, 0.1)),
        'master_weights="split" has no kernel for tests.cputrain.test_split_weigh',
    ),
    "foreach": (
        bad(lambda p: SGD(p, 0.1, foreach=True)),
        'master_weights="split" updates weights as fused=True does: leave',
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_one_line_and_change_nothing(what: str) -> None:
    call, said = BAD[what]
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_a_network_that_is_converted_later_is_refused_not_rounded() -> None:
    network = built()
    optimizer = SGD(network.parameters(), lr=0.1)
    cputrain.optimize(network, optimizer, **SPLIT)
    gradients(network, 1)
    network.float()
    with pytest.raises(InputError, match=r"converted to torch\.float32: call cputrain\.restore\(model\) before"):
        network.state_dict()


RANKS = """
import os, sys, torch, torch.distributed as dist, cputrain
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # DistributedDataParallel takes rank 0's weights
network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
cputrain.optimize(network, optimizer, dtype=torch.bfloat16, master_weights="split")
ddp = DistributedDataParallel(network)
if REDUCE:
    cputrain.reduce_float32(ddp)
for number in range(5):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ddp(torch.randn(8, 6)).float().square().mean()
    loss.backward()
    own = network[0].weight.grad.clone()
    optimizer.step()
bits = torch.cat([value.view(torch.int32).flatten() for value in network.state_dict().values()])
of_all = [torch.empty_like(bits) for _ in range(2)]
dist.all_gather(of_all, bits)
sys.stdout.write(f"{torch.equal(*of_all)} {own.dtype} {next(iter(ddp.state_dict().values())).dtype}\\n")
sys.stdout.flush()
dist.barrier()
os._exit(0)  # gloo's destructor may wait for ever beside a DDP network
"""


@pytest.mark.parametrize("reduces_float32", [False, True])
def test_ranks_that_start_with_other_weights_train_equal_replicas(tmp_path: Path, reduces_float32: bool) -> None:
    (tmp_path / "ranks.py").write_text(RANKS.replace("REDUCE", str(reduces_float32)))
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", *forking_python(), "-m", "ranks")
    with forked(*words, cwd=tmp_path, MASTER_PORT=str(free_port())) as job:
        end = ended(job, 60)
    assert end.status == 0, end.err
    assert own_lines(end.out) == ["True torch.bfloat16 torch.float32"] * 2


def own_lines(out: str) -> list[str]:
    """What a job has printed, without the connections that torch 2.8's gloo prints."""
    return [line for line in out.splitlines() if not line.startswith("[Gloo]")]


SUMS = """
import os, sys, torch, torch.distributed as dist, cputrain
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
network = nn.Linear(4, 1, bias=False).bfloat16()
ddp = DistributedDataParallel(network)
if REDUCE:
    cputrain.reduce_float32(ddp)
ddp(torch.full((1, 4), (256.0, 1.0, 1.0)[dist.get_rank()], dtype=torch.bfloat16)).sum().backward()
sys.stdout.write(f"{float(network.weight.grad[0, 0])}\\n")
sys.stdout.flush()
dist.barrier()
os._exit(0)
"""


def test_gradients_of_bfloat16_weights_are_summed_in_float32_if_asked(tmp_path: Path) -> None:
    """256 + 1 is 256 in bfloat16: the mean of three ranks is 85.5, as 86 is the nearest of bfloat16."""
    (tmp_path / "sums.py").write_text(SUMS.replace("REDUCE", "True"))
    words = ("-m", "torch.distributed.run", "--nproc-per-node=3", "--no-python", *forking_python(), "-m", "sums")
    with forked(*words, cwd=tmp_path, MASTER_PORT=str(free_port())) as job:
        end = ended(job, 60)
    assert end.status == 0, end.err
    assert own_lines(end.out) == [str(float(torch.tensor(258 / 3).bfloat16()))] * 3
