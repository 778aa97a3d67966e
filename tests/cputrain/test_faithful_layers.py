"""Native layers in own networks: hooks, forwards, options, second derivatives, tracing and recomputation as with
torch's layers, beside which each network runs."""

import copy
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cputrain.affinity.errors import InputError
from cputrain.kernels.apply import restore
from cputrain.kernels.batchnorm import load
from cputrain.kernels.convolution import (
    ConvolutionShape,
    load_convolutions,
    native_weight_gradients,
    pointwise_as_matmul,
    use_winograd,
    winograd_shapes,
)
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.models.vision import import_torchvision
from tests.support.forked import ROOT, ended, forked
from tests.support.kernels import assert_same, fuse_batchnorms, left_to_torch

pytestmark = pytest.mark.slow

resnet = import_torchvision("models.resnet")


def block(channels: int = 16) -> nn.Module:
    return resnet.BasicBlock(channels, channels)


def small() -> nn.Sequential:
    """Convolutions, pairs of batch-norm and ReLU, and two residual blocks, with statistics that are not the first."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        nn.Sequential(block(), block()),
        *(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


def native(network: nn.Module) -> nn.Module:
    fuse_batchnorms(network, load(os.environ))
    return network


def images(count: int = 4, channels: int = 3, side: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, channels, side, side, generator=generator).to(memory_format=torch.channels_last)


def built(change: Callable[[nn.Module], None] = lambda _: None) -> nn.Module:
    torch.manual_seed(1)
    network = small().to(memory_format=torch.channels_last)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.bias is not None:
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    change(network)
    return network


def run(network: nn.Module) -> dict[str, Tensor]:
    """Two steps of training and an evaluation: outputs, gradients and buffers."""
    found = {}
    for step in range(2):
        x = images().requires_grad_()
        y = network(x)
        y.square().sum().backward()
        found |= {f"y{step}": y.detach(), f"x{step}": x.grad}
    found |= {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in network.named_buffers()}
    with torch.no_grad():
        found["evaluated"] = network.eval()(images())
    network.train()
    return found


class Doubled(nn.BatchNorm2d):
    """A class of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Pair(nn.Sequential):
    """A class of one's own with torch's forward."""


def set_last(network: nn.Module, layer: nn.Module) -> None:
    network[5] = layer


def own_forward(layer: nn.Module, forward: Callable[..., Tensor]) -> None:
    layer.forward = partial(forward, layer)  # type: ignore[method-assign]


def reversed_children(network: nn.Module) -> None:
    """The same convolution twice, so that neighbors by name are not neighbors in the forward pass."""
    conv = nn.Conv2d(16, 16, 1)
    network[3] = nn.Sequential(conv, nn.BatchNorm2d(16), conv, nn.ReLU())


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda _: None,
    "the activation of a block removed": lambda n: setattr(n[3][1], "relu", nn.Identity()),
    "another activation in a block": lambda n: setattr(n[3][0], "relu", nn.GELU()),
    "a block's own forward": lambda n: own_forward(n[3][0], lambda block, x: block.bn1(block.conv1(x)) + 3 * x),
    "a shortcut that is a function": lambda n: setattr(n[3][0], "downsample", lambda x: 0.5 * x),
    "a batch-norm's own forward": lambda n: own_forward(n[1], lambda layer, x: nn.BatchNorm2d.forward(layer, x) * 2),
    "a ReLU's own forward": lambda n: own_forward(n[2], lambda _layer, x: x.abs()),
    "a class of one's own": lambda n: set_last(n, Doubled(16)),
    "a derived Sequential": lambda n: n.__setitem__(3, Pair(nn.BatchNorm2d(16), nn.ReLU())),
    "momentum=None": lambda n: set_last(n, nn.BatchNorm2d(16, momentum=None)),
    "momentum=None later": lambda n: setattr(n[5], "momentum", None),
    "momentum=0": lambda n: set_last(n, nn.BatchNorm2d(16, momentum=0)),
    "track_running_stats=False": lambda n: set_last(n, nn.BatchNorm2d(16, track_running_stats=False)),
    "statistics that are not tracked now": lambda n: setattr(n[1], "track_running_stats", False),
    "affine=False": lambda n: set_last(n, nn.BatchNorm2d(16, affine=False)),
    "no bias": lambda n: setattr(n[5], "bias", None),
    "eps is large": lambda n: setattr(n[1], "eps", 2.0),
    "eps is an integer": lambda n: setattr(n[1], "eps", 1),
    "a layer in evaluation": lambda n: own_forward(n, lambda s, x: nn.Sequential.forward(freeze(s), x)),
    "frozen parameters": lambda n: n[1].requires_grad_(False),
    "a frozen network": lambda n: n[:5].requires_grad_(False),
    "one batch-norm twice": lambda n: n[3][0].__setattr__("bn2", n[3][0].bn1),
    "one batch-norm with ReLU and without": lambda n: n.insert(5, n[1]),
    "a convolution between, by another name": reversed_children,
    "weights without gaps missing": lambda n: setattr(n[1], "weight", nn.Parameter(torch.rand(32)[::2])),
    "statistics with gaps": lambda n: n[1].register_buffer("running_var", torch.rand(32)[::2]),
    "no number of batches": lambda n: setattr(n[1], "num_batches_tracked", None),
    "parametrized": lambda n: torch.nn.utils.parametrizations.weight_norm(n[0]),
    "weight-normed by hooks": lambda n: torch.nn.utils.weight_norm(n[4]),
    "pruned": lambda n: torch.nn.utils.prune.l1_unstructured(n[4], "weight", 0.5),
    "a parametrized batch-norm": lambda n: torch.nn.utils.parametrize.register_parametrization(
        n[5], "weight", nn.Softplus()
    ),
    "dropout between": lambda n: n.insert(6, nn.Dropout(0.0)),
    "a linear layer after NCHW": lambda n: n.__setitem__(
        3, nn.Sequential(NCHW(), nn.BatchNorm2d(16), nn.ReLU(), NCHW())
    ),
}


class NCHW(nn.Module):
    """Images contiguous in memory, which those after it must be as well, or `view` fails."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        return x.view(x.shape[0], -1).view(x.shape)


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1).view(x.shape)


def freeze(network: nn.Module) -> nn.Module:
    network[5].eval()
    return network


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("late", [False, True])
def test_a_changed_network_computes_what_torch_does(change: str, late: bool) -> None:
    """Changed before the layers become native, or after."""
    plain = built(CHANGES[change])
    if late:
        got = native(built())
        CHANGES[change](got)
        torch.manual_seed(1)
    else:
        got = native(built(CHANGES[change]))
    with torch.no_grad():  # changes may draw random weights
        got.load_state_dict(plain.state_dict())
    assert_same(run(got), run(plain))


def test_what_stays_torch_s_is_counted_with_reasons() -> None:
    network = built()
    set_last(network, nn.BatchNorm2d(16, momentum=None))
    network[3][0].register_forward_hook(lambda *_: None)
    network[3][1].relu = nn.GELU()
    network[2].register_forward_pre_hook(lambda *_: None)
    network.append(Doubled(4))
    assert left_to_torch(native(network)) == (
        "not native, but torch's: 1 BasicBlock (hooks), 1 BatchNorm2d (momentum=None), "
        "1 Doubled (not torch's BatchNorm2d), 1 ReLU (hooks)"
    )
    assert left_to_torch(native(built())) == ""


def hooked(network: nn.Module, seen: list[tuple[str, float]], when: str) -> None:
    """Register hooks that record the sums of what they see, of one kind, on all modules."""

    def forward(name: str, _module: nn.Module, _inputs: object, outputs: Tensor) -> None:
        seen.append((name, float(outputs.detach().sum())))

    def before(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append((name, float(inputs[0].detach().sum())))

    def backward(name: str, _module: nn.Module, _inputs: object, gradients: tuple[Tensor, ...]) -> None:
        seen.append((name, float(gradients[0].sum())))

    def before_backward(name: str, _module: nn.Module, gradients: tuple[Tensor, ...]) -> None:
        seen.append((name, float(gradients[0].sum())))

    for name, module in network.named_modules():
        if when == "forward":
            module.register_forward_hook(partial(forward, name))
        elif when == "before":
            module.register_forward_pre_hook(partial(before, name))
        elif "inplace" in vars(module):
            module.inplace = False  # torch's backward hooks do not allow it
        if name.endswith("bn2"):
            continue  # whose outputs are changed in place, which torch refuses with backward hooks
        if when == "backward":
            module.register_full_backward_hook(partial(backward, name))
        elif when == "before backward":
            module.register_full_backward_pre_hook(partial(before_backward, name))


@pytest.mark.parametrize("when", ["forward", "before", "backward", "before backward"])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_are_called_as_by_torch(when: str, late: bool) -> None:
    results = []
    for fused in (False, True):
        network, seen = built(), list[tuple[str, float]]()
        if fused and late:
            native(network)
        hooked(network, seen, when)
        if fused and not late:
            native(network)
        y = network(images().requires_grad_())
        y.square().sum().backward()
        results.append(seen)
    expected, got = results
    assert [name for name, _ in got] == [name for name, _ in expected]
    off = [abs(one - other) / max(1.0, abs(other)) for (_, one), (_, other) in zip(got, expected, strict=True)]
    assert max(off) < 1e-3


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_all_modules_are_called(kind: str) -> None:
    register = getattr(nn.modules.module, f"register_module_{kind}_hook")
    results = []
    for network in (built(), native(built())):
        for module in network.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False
        seen: list[type] = []
        handle = register(lambda module, *_, seen=seen: seen.append(type(module).__mro__[-3]))
        try:
            network[4:](images(channels=16).requires_grad_()).sum().backward()
        finally:
            handle.remove()
        results.append(len(seen))
    assert results[0] == results[1] > 0


def test_each_layer_may_be_called_by_itself() -> None:
    """As by networks that keep the maps after some of their layers, and differentiate by them."""
    results = []
    for network in (built(), native(built())):
        x, kept = images().requires_grad_(), []
        for layer in network:
            for part in layer if isinstance(layer, nn.Sequential) else [layer]:
                x = part(x)
                kept.append(x)
        gradients = torch.autograd.grad(x.square().sum(), [each for i, each in enumerate(kept) if i != 1])
        results.append({str(i): each.detach() for i, each in enumerate((*kept, *gradients))})
    assert_same(results[1], results[0])


def test_maps_seen_by_a_hook_have_their_whole_gradient() -> None:
    results = []
    for network in (built(), native(built())):
        seen: list[Tensor] = []
        network[3][0].register_forward_hook(lambda _module, _inputs, outputs, seen=seen: seen.append(outputs))
        (gradient,) = torch.autograd.grad(network(images()).square().sum(), seen)
        results.append({"gradient": gradient})
    assert_same(results[1], results[0])


class Keeping(nn.Module):
    """A convolution that keeps its inputs."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution, self.seen = convolution, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.convolution(x)


@pytest.mark.parametrize("how", ["hook", "layer", "downsample"])
def test_maps_kept_by_a_layer_in_a_block_have_their_whole_gradient(how: str) -> None:
    """As for attributions to the inputs of a layer. The images of a block are used twice, also by its residual."""
    results = []
    for network in (built(), native(built())):
        block, keeping = network[3][1], Keeping(network[3][1].conv1)
        if how == "hook":
            block.conv1.register_forward_pre_hook(lambda _layer, inputs, kept=keeping.seen: kept.append(inputs[0]))
        elif how == "layer":
            block.conv1 = keeping
        else:
            keeping.convolution = nn.Identity()
            block.downsample = nn.Sequential(keeping)
        (gradient,) = torch.autograd.grad(network(images()).square().sum(), keeping.seen)
        results.append({"gradient": gradient})
    assert_same(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torch_s_default_dtype_and_device_do_not_count(dtype: torch.dtype) -> None:
    results, x = [], images(2, 64, 6)
    for network in (convolutions("torch"), convolutions("winograd")):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                network(x).square().sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        results.append({name: p.grad for name, p in network.named_parameters()})
    assert_same(results[1], results[0], 1e-3)


def test_saved_tensors_of_another_dtype_are_not_read_as_what_they_were() -> None:
    """As when hooks keep all saved tensors in float32: statistics are float64."""
    results = []
    for network in (built(), native(built())):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x.float()):
            loss = network(images()).square().sum()
        loss.backward()
        results.append({name: p.grad for name, p in network.named_parameters()})
    assert_same(results[1], results[0])


class Numbered(nn.Sequential):
    """Takes arguments before it is made."""

    def __new__(cls, *_layers: nn.Module) -> "Numbered":
        return super().__new__(cls)


class Rebuilt(nn.Sequential):
    """Is copied by its constructor."""

    def __reduce__(self) -> tuple[object, ...]:
        return Rebuilt, tuple(self._modules.values())


@pytest.mark.parametrize("kind", [Numbered, Rebuilt])
def test_a_class_with_its_own_construction_computes_and_is_copied(kind: type[nn.Sequential]) -> None:
    network = native(kind(nn.BatchNorm2d(16), nn.ReLU()))
    expected = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU())(images(channels=16))
    for each in (copy.deepcopy(network), network):
        assert torch.allclose(each(images(channels=16)), expected, atol=1e-5)


def test_methods_assigned_to_a_class_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    early = native(built())
    monkeypatch.setattr(nn.ReLU, "forward", lambda _layer, x: functional.softplus(x))
    monkeypatch.setattr(resnet.BasicBlock, "forward", lambda block, x: block.bn2(block.conv2(x)) + x)
    expected = run(built())
    assert_same(run(early), expected)
    assert_same(run(native(built())), expected)
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda _layer, x: 2 * x)
    assert_same(run(native(built())), run(built()))


def all_native(network: nn.Module) -> nn.Module:
    native(network)
    use_winograd(network, load_convolutions(os.environ))
    pointwise_as_matmul(network)
    return network


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((nn.Conv2d, "forward"), (nn.Conv2d, "_conv_forward"), (nn.BatchNorm2d, "_check_input_dim")),
        *((functional, "conv2d"), (functional, "batch_norm"), (functional, "relu")),
    ],
)
def test_functions_in_the_place_of_torch_s_are_called_as_by_torch(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of profilers, which count, here later than the layers became native."""
    counts = []
    networks = [built(), all_native(built())]
    as_written = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **named: counts.append(name) or as_written(*args, **named))
    for network in networks:
        counts.append("next")
        network(images())
    first, second = "/".join(counts[1:]).split("next")
    assert first.count(name) == second.count(name) > 0
    if owner is functional:
        all_layers = f"not native, but torch's: all layers, because torch.nn.functional.{name} is replaced"
        assert left_to_torch(networks[1]) == all_layers


@pytest.mark.parametrize(
    ("layer", "method"), [("0", "_conv_forward"), ("3.0.conv1", "_conv_forward"), ("4", "forward")]
)
def test_a_layer_s_own_methods_are_called(layer: str, method: str) -> None:
    results = []
    for network in (built(), all_native(built())):
        convolution = network.get_submodule(layer)
        as_written = getattr(nn.Conv2d, method)
        setattr(convolution, method, lambda *args, one=convolution, by=as_written: 2 * by(one, *args))
        results.append(run(network))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", ["3.0.conv1", "4", "1", "3.0.bn2"])
def test_layers_take_arguments_by_torch_s_names(name: str) -> None:
    x = images(channels=16)
    got, expected = (network.get_submodule(name)(input=x) for network in (all_native(built()), built()))
    assert torch.allclose(got, expected, atol=1e-4)


def test_methods_that_a_forward_calls_may_be_assigned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the class or the module; here they leave out the ReLU after a batch-norm layer."""

    def without_relu(network: nn.Module, x: Tensor) -> Tensor:
        return network.layer1(network.bn1(network.conv1(x)))

    results = []
    for make in (lambda network: network, native):
        torch.manual_seed(1)
        network = make(resnet.resnet18().to(memory_format=torch.channels_last))
        with monkeypatch.context() as patched:
            patched.setattr(resnet.ResNet, "_forward_impl", without_relu)
            of_class = network(images())
        network._forward_impl = partial(without_relu, network)
        results.append({"class": of_class.detach(), "module": network(images()).detach()})
    assert_same(results[1], results[0])


def penalized(network: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = network(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.square().mean() + gradient.square().sum()


def gradients_of(network: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    loss(network, images()).backward()
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return found | dict(network.named_buffers())


def test_second_derivatives_are_torch_s() -> None:
    assert_same(gradients_of(native(built()), penalized), gradients_of(built(), penalized), 1e-3)
    evaluated = [gradients_of(each.eval(), penalized) for each in (native(built()), built())]
    assert_same(*evaluated, 1e-3)


def convolutions(kind: str) -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(), nn.Conv2d(64, 64, 1, bias=False))
    network = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    if kind == "winograd":
        use_winograd(network, load_convolutions(os.environ))
    elif kind == "direct":
        native_weight_gradients(network, load_convolutions(os.environ))
    elif kind == "products":
        pointwise_as_matmul(network)
    return network


def by_64(loss: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda network, _: loss(network, images(2, 64, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["winograd", "direct", "products"])
def test_second_derivatives_of_convolutions_are_torch_s(kind: str, dtype: torch.dtype) -> None:
    def penalty(network: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            return penalized(network, x)

    got, expected = (gradients_of(convolutions(each), by_64(penalty)) for each in (kind, "torch"))
    for name, value in expected.items():
        off = float((got[name] - value).norm() / value.norm())
        assert off < (1e-4 if dtype == torch.float32 else 5e-2), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_update_their_statistics_as_in_torch(reentrant: bool) -> None:
    def recomputed(network: nn.Module, x: Tensor) -> Tensor:
        for layer in network:
            for part in layer if isinstance(layer, nn.Sequential) else [layer]:
                x = checkpoint(part, x, use_reentrant=reentrant)
        return x.square().sum()

    def by_stages(network: nn.Module, x: Tensor) -> Tensor:
        x = checkpoint(network[:3], x, use_reentrant=reentrant)
        return network[4:](checkpoint(network[3], x, use_reentrant=reentrant)).square().sum()

    def made() -> nn.Module:
        return built(lambda network: setattr(network[2], "inplace", False))

    for loss in (recomputed, by_stages):
        run_of = lambda network, x, loss=loss: loss(network, x.requires_grad_())  # noqa: E731
        assert_same(gradients_of(native(made()), run_of), gradients_of(made(), run_of))


def test_functional_transforms_compute_what_torch_s_layers_do() -> None:
    results = []
    for network in (built(), native(built())):
        parameters = {name: p.detach() for name, p in network.eval().named_parameters()}

        def loss(values: dict[str, Tensor], network: nn.Module = network) -> Tensor:
            return torch.func.functional_call(network, values, (images(),)).square().sum()

        x = images(2)
        batched = torch.autograd.functional.jacobian(lambda x, n=network: n(x).sum(0), x, vectorize=True)
        _, tangent = torch.func.jvp(network, (x,), (torch.ones_like(x),))
        mapped = torch.func.vmap(lambda one, n=network: n(one[None])[0])(x)
        with torch.autograd.forward_ad.dual_level():
            dual = network(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            forward = torch.autograd.forward_ad.unpack_dual(dual).tangent
        found = {"batched": batched, "tangent": tangent, "mapped": mapped, "forward": forward}
        results.append(torch.func.grad(loss)(parameters) | found)
    assert_same(results[1], results[0])


def test_watchers_of_operators_see_torch_s() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for network in (convolutions("torch"), convolutions("winograd")):
        with FlopCounterMode(display=False) as counter:
            network(images(2, 64, 6)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_a_native_network_can_be_traced_exported_and_copied() -> None:
    network, x = native(built()).eval(), images(2)
    expected = network(x)
    traced = torch.jit.trace(network, x)
    exported = torch.export.export(network, (x,)).module()
    copied = copy.deepcopy(network)
    assert type(copied) is type(network) and type(copied[3][0]) is type(network[3][0])
    for made in (traced, exported, copied):
        assert torch.allclose(made(x), expected, atol=1e-5)


def test_torch_fx_records_a_native_network_as_torch_s() -> None:
    """Also as torchvision's feature extraction does, at the same names."""
    extraction = import_torchvision("models.feature_extraction")
    features, names = [], []
    for make in (lambda network: network, all_native):
        torch.manual_seed(1)
        network = make(resnet.resnet18(num_classes=4).to(memory_format=torch.channels_last))
        names.append([str(node) for node in torch.fx.Tracer().trace(network).nodes])
        extractor = extraction.create_feature_extractor(network, ["layer1.0.bn1", "layer2.1.relu", "layer3", "fc"])
        features.append({name: maps.detach() for name, maps in extractor(images(side=64)).items()})
    assert names[1] == names[0]
    assert_same(features[1], features[0])


def test_in_evaluation_batch_norm_alone_is_torch_s() -> None:
    """Which is faster there, and equal to the bit."""
    network, plain, x = native(built()).eval(), built().eval(), images(channels=16)
    with torch.no_grad():
        for name in ("1", "3.0.bn2"):
            assert torch.equal(network.get_submodule(name)(x), plain.get_submodule(name)(x))
    assert network.get_submodule("1")(x).grad_fn.name() == "_FusedBatchNormBackward"


def test_layers_become_native_once() -> None:
    network = all_native(built())
    kinds = [type(module) for module in network.modules()]
    assert [type(module) for module in all_native(network).modules()] == kinds
    assert_same(run(network), run(built()))


def test_parametrized_layers_are_restored_and_keep_their_parametrizations() -> None:
    """Set while the layers were native; torch removes them later."""

    def parametrized(network: nn.Module) -> nn.Module:
        torch.nn.utils.parametrize.register_parametrization(network[1], "weight", nn.Softplus())
        torch.nn.utils.parametrizations.weight_norm(network[3][0].conv1)
        return network

    def described(network: nn.Module) -> list[object]:
        return [(type(module).__name__, type(module).__bases__, set(vars(module))) for module in network.modules()]

    network, plain = parametrized(all_native(built())), parametrized(built())
    restore(network)
    assert described(network) == described(plain)
    assert_same(run(network), run(plain))
    for each in (network, plain):
        torch.nn.utils.parametrize.remove_parametrizations(each[1], "weight")
    assert described(network) == described(plain)


def test_restored_networks_have_their_own_classes() -> None:
    network = built()
    before = [type(module) for module in network.modules()]
    attributes = [set(vars(module)) for module in network.modules()]
    native(network)
    use_winograd(network, load_convolutions(os.environ))
    pointwise_as_matmul(network)
    assert isinstance(network[3][0], resnet.BasicBlock) and type(network[3][0]).__name__ == "BasicBlock"
    assert [type(module) for module in network.modules()] != before
    restore(network)
    assert [type(module) for module in network.modules()] == before
    assert [set(vars(module)) for module in network.modules()] == attributes
    torch.fx.symbolic_trace(network)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.double(),
        lambda layer: layer.bfloat16(),
        lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias.double())),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight[:8].detach())),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(1, 16))),
        lambda layer: setattr(layer, "running_mean", layer.running_mean.double()),
        lambda layer: setattr(layer, "running_var", layer.running_var[:8]),
        lambda layer: layer.to("meta"),
        lambda layer: setattr(layer, "running_mean", layer.running_mean.to("meta")),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_tensors_that_the_kernels_cannot_read_are_torch_s(
    change: Callable[[nn.Module], object], training: bool
) -> None:
    """With torch's result, or its error."""
    results: list[object] = []
    for network in (nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()), native(nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()))):
        change(network[0])
        try:
            found = network.train(training)(images(channels=16))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            results.append(str(error))
        else:
            results.append(found)
    assert type(results[0]) is type(results[1])
    if isinstance(results[0], Tensor) and not results[0].is_meta:
        assert torch.allclose(results[0], results[1], atol=1e-5)
    elif isinstance(results[0], str):
        assert results[0] == results[1]


class Tagged(Tensor):
    """A class of tensors of one's own."""


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x.double(),
        lambda x: x.half(),
        lambda x: x.to("meta"),
        lambda x: x.contiguous(),
        lambda x: x[:, :, ::2],
        lambda x: x[:0],
        lambda x: x[0],
        lambda x: x[:, :8],
        lambda x: x[:1, :, :1, :1],
        torch._neg_view,
        lambda x: x.to_mkldnn(),
        lambda x: x.as_subclass(Tagged),
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x.long(),
    ],
)
@pytest.mark.parametrize("layers", ["batch-norm", "residual", "winograd", "direct", "products"])
def test_images_that_the_kernels_cannot_read_are_torch_s(given: Callable[[Tensor], Tensor], layers: str) -> None:
    results: list[object] = []
    for fused in (False, True):
        torch.manual_seed(2)
        made = {
            "batch-norm": lambda: nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()),
            "residual": lambda: block().to(memory_format=torch.channels_last),
            "winograd": lambda: nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last),
            "direct": lambda: nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last),
            "products": lambda: nn.Conv2d(16, 16, 1),
        }[layers]()
        if fused:
            native(made)
            if layers == "winograd":
                use_winograd(made, load_convolutions(os.environ))
            elif layers == "products":
                pointwise_as_matmul(made)
        try:
            found = made(given(images(channels=16)))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            results.append(str(error))
        else:
            results.append(found)
    expected, got = results
    assert type(got) is type(expected), (expected, got)
    if isinstance(expected, Tensor):
        assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device)
        if expected.layout is torch.strided and not expected.is_meta and expected.numel():
            assert torch.allclose(got, expected, atol=1e-4) and got.stride() == expected.stride()
    else:
        assert got == expected


def test_odd_gradients_are_torch_s() -> None:
    results = []
    for network in (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), native(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))):
        x = images().requires_grad_()
        y = network(x)
        (batched,) = torch.autograd.grad(y, x, torch.stack([y.detach(), 2 * y.detach()]), True, is_grads_batched=True)
        found = {"batched": batched}
        for name, gradient in {
            "NCHW": y.detach().contiguous() + 1,
            "expanded": torch.ones(()).expand(y.shape),
            "negative view": torch._neg_view(y.detach()),
        }.items():
            (found[name],) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        results.append(found)
    assert_same(results[1], results[0])


class Watched(nn.Module):
    """Keeps what a call leaves: a list, a cache of the first shape, buffers, random numbers, and its modes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []
        self.modes: list[bool] = []

    def train(self, mode: bool = True) -> "Watched":
        super().train(mode)
        self.body[1].eval()
        self.modes.append(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        if not hasattr(self, "grid"):
            self.grid = torch.rand(x.shape[2:]) + np.random.rand() + random.random()
        return self.body(x) + self.grid


def test_a_network_that_is_tried_with_one_example_stays_as_it_is() -> None:
    network = Watched().train()
    modes = [module.training for module in network.modules()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = torch.rand(()), np.random.rand(), random.random()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    shape = ConvolutionShape(inputs=16, outputs=16, height=8, width=8, padding=1)
    assert winograd_shapes(network, images(1, 16)) == {"body.0": shape}
    assert (torch.rand(()), np.random.rand(), random.random()) == expected
    assert network.calls == 0 and network.seen == [] and not hasattr(network, "grid")
    assert [module.training for module in network.modules()] == modes and network.modes == [True]
    assert not any(module._forward_hooks for module in network.modules())


def test_a_network_that_cannot_be_tried_is_refused_with_the_reason() -> None:
    network = Watched()
    with pytest.raises(InputError, match="a copy of the network fails with one example: "):
        winograd_shapes(network, images(1, 3))
    seen: list[nn.Module] = []
    network.body.register_forward_hook(lambda module, *_: seen.append(module))
    with pytest.raises(InputError, match="hooks of the network would be called"):
        winograd_shapes(network, images(1, 16))
    assert not seen


@pytest.mark.long
def test_networks_of_libraries_are_native_throughout() -> None:
    for name in ("resnet18", "resnet50", "torchvision:densenet121", "torchvision:mobilenet_v3_small"):
        assert left_to_torch(native(build_model(ModelSettings(name=name), 10, 32))) == ""


TRAINED = """
import sys, torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from cputrain import train
from tests.cputrain.test_faithful_layers import small

torch.manual_seed(3)
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.active = small(), []
        for block in self.body[3]:
            block.register_forward_hook(lambda _module, _inputs, outputs: self.active.append(outputs.abs().mean()))

    def forward(self, x):
        self.active.clear()
        if not torch.is_grad_enabled():
            return self.body(x), sum(self.active)
        x = checkpoint(self.body[:3], x.detach().requires_grad_(), use_reentrant=False)
        y = self.body[4:](self.body[3](x))
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, sum(self.active) + gradient.square().sum()

def loss(outputs, targets):
    y, penalty = outputs
    return functional.cross_entropy(y, targets, reduction="none") + penalty

network = Network()
before = [type(module) for module in network.modules()]
samples = torch.utils.data.TensorDataset(torch.randn(32, 3, 16, 16), torch.arange(32) % 4)
schedule = ["schedule.peak_rate=0.001", "schedule.warmup_epochs=0"]
settings = ["epochs=1", "batch.local=8", f"engine={sys.argv[1]}", f"output={sys.argv[1]}", *schedule]
result = train(network, loss, samples, samples, settings=settings, quiet=True)
assert [type(module) for module in network.modules()] == before and len(network.active) == 2
count = network.body[1].num_batches_tracked
traced = torch.fx.symbolic_trace(network.body)
print("found", result.accuracy.loss, int(count), [float(each.double().sum()) for each in network.buffers()], flush=True)
"""


@pytest.mark.long
def test_a_training_with_native_layers_is_that_of_torch_s(tmp_path: Path) -> None:
    """With hooks, second derivatives and recomputation; afterwards the network has its own classes."""
    found = []
    for engine in ("native", "eager"):
        with forked("-c", TRAINED, engine, cwd=tmp_path, PYTHONPATH=str(ROOT)) as process:
            end = ended(process)
        assert end.status == 0, end.err
        words = end.out.partition("found ")[2].replace("[", "").replace("]", "").replace(",", "").split()
        found.append(torch.tensor([float(word) for word in words]))
        stays = "not native, but torch's: 2 BasicBlock (hooks)" in end.out + end.err
        assert stays == (engine == "native")
    assert found[0][1] == 8  # four steps, each with a recomputation
    assert torch.allclose(*found, rtol=1e-2, atol=1e-2)
