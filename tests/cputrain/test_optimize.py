"""`cputrain.optimize` in loops of others: their networks train as with torch's layers; what stays torch's is named."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import cputrain
from cputrain.affinity.errors import InputError
from cputrain.kernels.apply import agree_on_plan, fuse_optimizer, plan_of
from cputrain.kernels.plan import KernelPlan
from cputrain.kernels.tracing import trace
from cputrain.models.vision import import_torchvision
from cputrain.mpi.supervise.run import free_port
from tests.support.forked import ended, forked, forking_python

pytestmark = pytest.mark.slow

models = import_torchvision("models")


class BasicBlock(nn.Module):
    """A residual block with functional ReLU, as in many ResNets for CIFAR."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return functional.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 64, 2))
        self.linear = nn.Linear(64, 5)

    def forward(self, x):
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.layer2(self.layer1(out))
        return self.linear(out.mean((2, 3)))


class Doubled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Shared(nn.Module):
    """Calls one block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.block, self.fc = nn.Conv2d(3, 64, 3, padding=1), BasicBlock(64, 64, 1), nn.Linear(64, 5)

    def forward(self, x):
        return self.fc(self.block(self.block(self.conv(x))).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom, self.up = self.two(3, 16), self.two(16, 32), self.two(48, 16)
        self.last = nn.Conv2d(16, 1, 1)

    @staticmethod
    def two(inputs: int, outputs: int) -> nn.Sequential:
        pairs = ((inputs, outputs), (outputs, outputs))
        layers = [(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)) for i, o in pairs]
        return nn.Sequential(*(layer for three in layers for layer in three))

    def forward(self, x):
        skip = self.down(x)
        below = functional.interpolate(self.bottom(functional.max_pool2d(skip, 2)), scale_factor=2)
        return self.last(self.up(torch.cat([skip, below], 1)))


class Untraceable(ResNet):
    """Its forward pass depends on values, and counts."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        out = torch.relu(self.bn1(self.conv1(x)))
        return super().forward(x) if out.mean() > 1e9 else self.linear(self.layer1(out).mean((2, 3)))


COUNTS = Untraceable.forward.__code__.co_firstlineno + 1


def with_subclass() -> nn.Module:
    network = ResNet()
    network.bn1 = Doubled(64)
    return network


def with_hook() -> nn.Module:
    network = ResNet()
    network.layer1[0].register_forward_hook(lambda _module, _inputs, outputs: 0.5 * outputs)
    return network


def frozen() -> nn.Module:
    network = ResNet()
    for layer in (network.conv1, network.bn1, network.layer1[0]):
        layer.requires_grad_(False)
    network.bn1.eval()
    return network


def backbone() -> nn.Module:
    detection = import_torchvision("models.detection.backbone_utils")
    features = detection.resnet_fpn_backbone(backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d)
    return nn.Sequential(features, Levels())


class Levels(nn.Module):
    def forward(self, levels):
        return torch.stack([maps.mean() for maps in levels.values()])


def sync() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(ResNet()).eval()  # which trains on GPUs only


def of_timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        timm = pytest.importorskip("timm", reason="needs timm: pip install 'cputrain[timm]'")
        network: nn.Module = timm.create_model(name, num_classes=5)
        return network

    return build


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own ResNet": (ResNet, "fused forward, 3 layers"),
    "subclassed batch-norm": (with_subclass, "torch's: batch-norm, 1 layer (not torch's BatchNorm2d):\n    bn1"),
    "a hook that changes outputs": (with_hook, "torch's: fused forward, 1 layer (hooks):\n    layer1.0"),
    "shared block": (Shared, "fused forward"),
    "frozen stages": (frozen, "fused forward, 3 layers"),
    "U-Net": (UNet, "batch-norm, 6 layers"),
    "not traceable": (
        Untraceable,
        f"torch's: fused forward, 1 layer (test_optimize.py:{COUNTS} assigns the attribute calls: ",
    ),
    "SyncBatchNorm": (sync, "torch's: batch-norm, 8 layers (no kernel for SyncBatchNorm)"),
    "detection backbone": (backbone, "batch-norm, 20 layers"),
    "timm's ResNet": (of_timm("resnet18"), "batch-norm, 20 layers"),
    "timm's RegNet": (of_timm("regnety_002"), "batch-norm"),
    "timm's DenseNet": (of_timm("densenet121"), "batch-norm, 121 layers"),
}


COSTLY = ("timm's ResNet", "timm's RegNet", "timm's DenseNet", "detection backbone")


def images(count: int = 4, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(2))


def built(kind: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    network = kind()
    trained = [each for each in network.parameters() if each.requires_grad]
    return network, torch.optim.SGD(trained, lr=0.01, momentum=0.9)


def step(
    network: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Train by one step, and return the loss and all gradients as one vector."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = network(images())
    loss = outputs.float().square().mean()
    loss.backward()
    gradients = torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None])
    optimizer.step()
    return loss.detach(), gradients


def off(values: Tensor, expected: Tensor) -> float:
    return float((values - expected).double().norm() / expected.double().norm())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in COSTLY else ()) for name in NETWORKS],
)
def test_a_foreign_network_trains_as_with_torch_s_layers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, said = NETWORKS[name]
    plain, plain_optimizer = built(kind)
    network, optimizer = built(kind)
    classes = [type(module) for module in network.modules()]
    before = list(network.parameters()), list(network.state_dict())
    assert cputrain.optimize(network, optimizer) == (network, optimizer)
    assert all(one is other for one, other in zip(before[0], network.parameters(), strict=True))
    assert list(network.state_dict()) == before[1]
    assert all(isinstance(module, kind) for module, kind in zip(network.modules(), classes, strict=True))
    cputrain.explain(network)
    printed = capsys.readouterr().out
    assert printed.startswith("kernels for float32 on ") and said in printed
    first, expected = step(network, optimizer), step(plain, plain_optimizer)
    exact = copy.deepcopy(built(kind)[0]).double()
    exact(images().double()).square().mean().backward()
    gradients = torch.cat([each.grad.flatten() for each in exact.parameters() if each.grad is not None])
    assert off(first[0], expected[0]) < 1e-4
    # Rounding decides which values ReLU cuts, for torch's layers, too.
    assert off(first[1], gradients) < 1e-4 + 3 * off(expected[1], gradients)
    assert off(step(network, optimizer)[0], step(plain, plain_optimizer)[0]) < 1e-2
    plain.load_state_dict(network.state_dict())
    network.load_state_dict(plain.state_dict())
    network.eval()
    plain.eval()
    with torch.no_grad():
        outputs = network(images())
        assert off(outputs, plain(images())) < 1e-4
        if "hook" not in name:
            assert torch.equal(pickle.loads(pickle.dumps(network))(images()), outputs)
        assert torch.equal(copy.deepcopy(network)(images()), outputs)
        cputrain.restore(network)
        assert [type(module) for module in network.modules()] == classes
        assert off(network(images()), outputs) < 1e-4
    cputrain.explain(network)
    assert capsys.readouterr().out == "not optimized: call cputrain.optimize(model)\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_winograd_s_algorithm_is_used_where_an_input_is_given(dtype: torch.dtype) -> None:
    network, optimizer = built(ResNet)
    plain, plain_optimizer = built(ResNet)
    cputrain.optimize(network, optimizer, dtype=dtype, sample_input=images())
    plan = plan_of(network)
    assert plan is not None
    layers = {"layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2"}
    if dtype == torch.float32 and "AVX2" in plan.target.instructions:
        assert set(plan.layers("winograd")) >= layers
    else:
        assert plan.layers("winograd") == ()
    first, expected = step(network, optimizer, dtype), step(plain, plain_optimizer, dtype)
    assert off(first[0], expected[0]) < (1e-3 if dtype == torch.float32 else 3e-2)


def test_measured_speedups_are_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cputrain.affinity.planner.records.cache_folder", lambda _env: tmp_path)
    plans = []
    for _ in range(2):
        network = ResNet()
        cputrain.optimize(network, sample_input=images(), choose="measure")
        plans.append(plan_of(network))
    assert plans[0] == plans[1]
    assert [path.name for path in tmp_path.rglob("*.json")] == [
        f"winograd-float32-{torch.get_num_threads()}-thread{'s' if torch.get_num_threads() > 1 else ''}.json"
    ]
    assert all(each.why == "measured on this host" for each in plans[0].replaced if each.kernel == "winograd")


def test_a_plan_is_json_and_serves_another_process() -> None:
    network = ResNet()
    cputrain.optimize(network, sample_input=images())
    plan = plan_of(network)
    assert plan is not None
    again = KernelPlan.from_json(plan.as_json())
    assert again == plan
    other = ResNet()
    cputrain.optimize(other, choose=again)
    assert plan_of(other) == plan
    assert [type(module) for module in other.modules()] == [type(module) for module in network.modules()]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: cputrain.optimize([1]), "model is a list, not a torch.nn.Module"),
    "no optimizer": (lambda: cputrain.optimize(ResNet(), "sgd"), "optimizer is a str, not a torch.optim.Optimizer"),
    "dtype": (lambda: cputrain.optimize(ResNet(), dtype=torch.float16), "dtype=torch.float16: kernels exist for"),
    "choose": (lambda: cputrain.optimize(ResNet(), choose="best"), 'choose=\'best\': give "rules", "measure"'),
    "lazy": (lambda: cputrain.optimize(nn.Sequential(nn.LazyConv2d(8, 3))), "0.weight is not initialized: call model"),
    "meta": (lambda: cputrain.optimize(nn.Conv2d(3, 8, 3, device="meta")), "weight is on meta: move the model"),
    "shape": (lambda: cputrain.optimize(ResNet(), sample_input=torch.zeros(2, 5, 8, 8)), "a copy of the network fails"),
    "plan": (lambda: KernelPlan.from_json({"format": 7}), "a kernel plan of format 7: this version reads format 1"),
    "not a plan": (lambda: KernelPlan.from_json({}), "not a kernel plan: 'format'"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_one_line(what: str) -> None:
    call, said = BAD[what]
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_a_plan_of_another_network_changes_nothing() -> None:
    network = ResNet()
    cputrain.optimize(network)
    plan, other = plan_of(network), UNet()
    classes = [type(module) for module in other.modules()]
    with pytest.raises(InputError, match="the kernel plan is of another network, which has a layer bn1"):
        cputrain.optimize(other, choose=plan)
    assert [type(module) for module in other.modules()] == classes


def test_two_calls_are_as_one() -> None:
    network, optimizer = built(ResNet)
    cputrain.optimize(network, optimizer)
    plan, classes = plan_of(network), [type(module) for module in network.modules()]
    cputrain.optimize(network, optimizer)
    assert (plan_of(network), [type(module) for module in network.modules()]) == (plan, classes)


def test_without_a_compiler_torch_s_layers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CPUTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    network = ResNet()
    classes = [type(module) for module in network.modules()]
    cputrain.optimize(network)
    assert [type(module) for module in network.modules()] == classes
    (line,) = caplog.messages
    why = "native kernels: no C++ compiler on PATH: install g++, or use torch's layers"
    assert line == f"cputrain.optimize: torch's layers stay: {why}"
    plan = plan_of(network)
    assert plan is not None and plan.replaced == () and {each.why for each in plan.kept} == {why}


def test_a_hook_that_is_set_later_is_called_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    network = ResNet()
    cputrain.optimize(network)
    seen = []
    network.layer2[0].bn1.register_forward_hook(lambda *_: seen.append(1))
    network(images())
    assert seen == [1]
    cputrain.explain(network)
    assert "torch's now: BasicBlock (hooks of bn1): layer2.0" in capsys.readouterr().out


class UsesNormTwice(ResNet):
    def forward(self, x):
        out = self.bn1(self.conv1(x))
        return self.linear(self.layer2(self.layer1(functional.relu(out) + out)).mean((2, 3)))


def test_batch_norm_whose_outputs_are_used_twice_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    cputrain.explain(cputrain.optimize(UsesNormTwice()))
    why = "its outputs are used 2 times, and must be kept"
    assert f"torch's: activation or addition after batch-norm, 1 layer ({why}):\n    bn1" in capsys.readouterr().out


def test_forward_passes_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[nn.Module] = []
    monkeypatch.setattr("cputrain.kernels.rewriting.trace", lambda module: (traced.append(module), trace(module))[1])
    network = cputrain.optimize(ResNet())
    cputrain.explain(network)
    assert len(traced) == len(set(traced)) > 0
    plan = plan_of(network)
    assert plan is not None and plan.forwards == {}, "the network does not keep its traces"
    other = cputrain.optimize(ResNet(), choose=plan)  # without traces of its own
    assert [type(module) for module in other.modules()] == [type(module) for module in network.modules()]


def test_a_plan_of_another_process_leaves_out_kernels_that_are_missing_here() -> None:
    plan = plan_of(cputrain.optimize(ResNet()))
    assert plan is not None and plan.layers("batch-norm")
    here = agree_on_plan(plan, {"batch-norm": "no compiler"})
    assert not [*here.layers("batch-norm")]
    assert {item.layer for item in here.kept if item.why == "no compiler"} == {*plan.layers("batch-norm")}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda found: torch.optim.SGD(found, lr=0.1),
    "momentum": lambda found: torch.optim.SGD(found, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "Adam": lambda found: torch.optim.Adam(found, lr=0.01, amsgrad=True),
    "AdamW": lambda found: torch.optim.AdamW([{"params": list(found), "lr": 0.01}], weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_s_optimizers_become_fused_and_go_on_from_their_state(name: str) -> None:
    results = []
    for fuses in (False, True):
        torch.manual_seed(3)
        layer = nn.Linear(6, 4)
        optimizer = OPTIMIZERS[name](layer.parameters())
        for number in range(4):
            if fuses and number == 2:
                assert fuse_optimizer(optimizer)
            optimizer.zero_grad()
            layer(torch.full((2, 6), 0.5 + number)).square().sum().backward()
            optimizer.step()
        assert bool(optimizer.param_groups[0]["fused"]) == fuses
        results.append(layer.weight.detach())
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        OPTIMIZERS[name](layer.parameters()).load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
    assert torch.allclose(*results, rtol=1e-5, atol=1e-6)


class OwnSgd(torch.optim.SGD):
    pass


@pytest.mark.parametrize("kept", ["momentum", "gradients"])
def test_momentum_and_gradients_of_another_layout_belong_to_the_same_weights(kept: str) -> None:
    found = []
    for native in (False, True):
        torch.manual_seed(1)
        network = nn.Conv2d(3, 8, 3)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        for number in range(3):
            if number == 1 and native:
                cputrain.optimize(network, optimizer)
            network(images()).pow(3).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=kept == "momentum")
        found.append(network.weight.detach())
    assert torch.allclose(*found, atol=1e-5)


def test_sparse_gradients_have_no_fused_optimizer() -> None:
    network = nn.Embedding(4, 2, sparse=True)
    _, optimizer = cputrain.optimize(network, torch.optim.SGD(network.parameters(), lr=0.1))
    before = network.weight.detach().clone()
    network(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert not torch.equal(network.weight, before)


def test_other_optimizers_stay_as_they_are() -> None:
    for optimizer in (
        OwnSgd([nn.Parameter(torch.zeros(2))], lr=0.1),
        torch.optim.RMSprop([nn.Parameter(torch.zeros(2))]),
        torch.optim.Adam([nn.Parameter(torch.zeros(2))], foreach=True),
        torch.optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1),
    ):
        groups = copy.deepcopy(optimizer.param_groups)
        assert not fuse_optimizer(optimizer)
        assert str(optimizer.param_groups) == str(groups)


def test_weights_in_a_buffer_of_another_package_stay_there() -> None:
    """DeepSpeed's ZeRO updates weights in one flat buffer."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    flat = torch.cat([weight.detach().flatten() for weight in network.parameters()])
    sizes = [weight.numel() for weight in network.parameters()]
    for weight, part in zip(network.parameters(), flat.split(sizes), strict=True):
        weight.data = part.view_as(weight)
    expected = network(images()).detach()
    cputrain.optimize(network)
    assert torch.allclose(network(images()), expected, atol=1e-4)
    flat.zero_()
    assert not any(weight.any() for weight in network.parameters())


def test_networks_sharded_by_fsdp2_train_as_without_kernels() -> None:
    """FSDP2 keeps views of its shards, DTensors, which have no fused optimizers."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for optimizes in (False, True):
            network, _ = built(ResNet)
            fully_shard(network.to(memory_format=torch.contiguous_format))
            optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
            if optimizes:
                cputrain.optimize(network, optimizer)
                assert not optimizer.param_groups[0]["fused"]
            for _ in range(2):
                step(network, optimizer)
            found.append(torch.cat([value.detach().full_tensor().flatten() for value in network.parameters()]))
        assert off(found[1], found[0]) < 1e-3
    finally:
        dist.destroy_process_group()


def test_an_average_of_weights_is_that_of_the_optimized_network() -> None:
    results = []
    for optimizes in (False, True):
        network, optimizer = built(ResNet)
        if optimizes:
            cputrain.optimize(network, optimizer)
        average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        for _ in range(2):
            step(network, optimizer)
            average.update_parameters(network)
        average.eval()
        results.append(average(images()).detach())
    assert off(results[1], results[0]) < 1e-3


# On each of two ranks: gradients of plain layers and of optimized ones, of which rank 1 misses a kernel at first.
RANKS = """
import sys, torch, torch.distributed as dist, cputrain
from torch.nn.parallel import DistributedDataParallel
from cputrain.kernels import apply
from tests.cputrain.test_optimize import ResNet, images, off, built, step

dist.init_process_group("gloo")
rank = dist.get_rank()
plan = apply.agree_on_plan(apply.plan_of(cputrain.optimize(ResNet())), {"batch-norm": "broken"} if rank else {})
lines = [f"{plan.layers('batch-norm')} {plan.kept[-1].why}"]
results = []
for optimizes in (False, True):
    network, optimizer = built(ResNet)
    if optimizes:
        cputrain.optimize(network, optimizer, sample_input=images())
    ddp = DistributedDataParallel(network)
    results.append(step(ddp, optimizer))
lines.append(f"{off(results[1][1], results[0][1]) < 1e-3}")
try:
    cputrain.optimize(ddp)
except cputrain.affinity.InputError as error:
    lines.append(str(error))
sys.stdout.write("\\n".join(lines) + "\\n")
dist.destroy_process_group()
"""


def test_ranks_agree_on_the_kernels_and_train_alike(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", *forking_python(), "-m", "ranks")
    root = str(Path(__file__).parents[2])
    with forked(*words, cwd=tmp_path, MASTER_PORT=str(free_port()), PYTHONPATH=root) as job:
        end = ended(job)
    assert end.status == 0, end.err
    assert end.out.count("() rank 1: broken") == 2
    assert end.out.count("True") == 2
    assert end.out.count("model is in DistributedDataParallel already: call cputrain.optimize(model) before it") == 2
