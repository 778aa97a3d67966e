"""Own networks whose batch-norm, additions and ReLUs are computed together: what is fused, and what is as torch's."""

import copy
import math
import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cputrain.affinity.errors import RunError
from cputrain.kernels.batchnorm import load
from cputrain.kernels.fusion import FusedModule
from cputrain.kernels.tracing import NotTraceable, trace
from tests.support.kernels import assert_same, fuse_batchnorms, left_to_torch

pytestmark = pytest.mark.slow

SCALE = 1.0
OPTIONS = {"scale": 2.0}


class Config:
    scale = 2.0


calls: list[str] = []


def halved(x: Tensor) -> Tensor:
    return x / 2


def noted(x: Tensor) -> Tensor:
    calls.append("noted")
    return x


class Base(nn.Module):
    """Two convolutions with batch-norm; each network below has its own forward."""

    expansion = 1

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.act, self.other = nn.ReLU(inplace=True), nn.Identity()
        self.downsample: nn.Module | None = None
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2)]
        )
        self.gain = nn.Parameter(torch.ones(8, 1, 1))
        self.register_buffer("shift", torch.zeros(8, 1, 1))
        self.scale, self.steps, self.cache, self.use_act = 2.0, 0, [], True
        self.nonlinearity = functional.relu


class FunctionalResNet(Base):
    """As people write ResNets for CIFAR."""

    def forward(self, x):
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return functional.relu(out)


class Sum(Base):
    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.act(self.bn1(self.conv1(x)))
        return self.act(identity + self.bn2(self.conv2(out)))


class Methods(Base):
    def forward(self, x):
        return self.head(self.body(x)) * self.scale + self.gain * self.shift

    def body(self, x):
        return torch.relu(self.bn1(self.conv1(x)))

    def head(self, x, again=False):
        return self.body(x) if again else self.bn2(self.conv2(x)).relu_()


class Loop(Base):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return halved(self.nonlinearity(self.bn1(x), inplace=False)) * SCALE * math.pi


class Branches(Base):
    def forward(self, x, flag=None):
        x = self.bn1(self.conv1(x))
        if self.use_act and not self.training:
            return functional.leaky_relu(x)
        if flag is not None:
            return x
        return self.act(self.other(x))


class LinearBottleneck(Base):
    def forward(self, x):
        return x + self.bn2(self.conv2(functional.relu6(self.bn1(self.conv1(x)))))


class PreActivation(Base):
    def forward(self, x):
        out = self.conv1(self.act(self.bn1(x)))
        out = self.conv2(functional.relu(self.bn2(out)))
        return out + x


class Derived(FunctionalResNet):
    def forward(self, x):
        return super().forward(x) * 2


class Lists(Base):
    def forward(self, inputs):
        images = [inputs] if isinstance(inputs, Tensor) else inputs
        return self.act(self.bn1(self.conv1(torch.cat(images, 0))))


class Dimensions(Base):
    """Its addition broadcasts, and its sum has another dtype."""

    def forward(self, x):
        out = self.act(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + x.double().mean((2, 3), keepdim=True))


class UpdatesBuffer(Base):
    def forward(self, x):
        self.shift.add_(1)
        return self.act(self.bn1(self.conv1(x)))


class ChangesResidual(Base):
    """Changes what it has added, before ReLU."""

    def forward(self, x):
        y = self.other(x) * 1
        out = self.bn1(self.conv1(x)) + y
        y.mul_(3)
        return functional.relu(out) + y


class CallsNormTwice(Base):
    """Adds after the second call, which must be the second in the running statistics, too."""

    def forward(self, x):
        first = self.bn1(self.conv1(x))
        second = functional.relu(self.bn1(3 * self.conv2(x)))
        return functional.relu(first + second)


class NamesInput(Base):
    def forward(self, x):
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(input=self.conv2(out)) + x)


class AddsToItself(Base):
    def forward(self, x):
        out = self.bn1(self.conv1(x))
        out = out + out
        return functional.relu(self.bn2(self.conv2(out)))


class ChangesAlias(Base):
    def forward(self, x):
        alias = x.data
        alias += 1
        return functional.relu(self.bn1(self.conv1(x)))


class StaticMethod(Base):
    def forward(self, x):
        return self.shifted(functional.relu(self.bn1(self.conv1(x))), by=1)

    @staticmethod
    def shifted(x, by):
        return x + by


FUSES: dict[type[Base], int] = {
    **dict.fromkeys((FunctionalResNet, Sum, Methods, PreActivation, Dimensions), 2),
    **dict.fromkeys((Loop, Branches, Lists, UpdatesBuffer, StaticMethod), 1),
    **dict.fromkeys((ChangesResidual, CallsNormTwice, NamesInput, AddsToItself, ChangesAlias), 1),
    LinearBottleneck: 2,
    Derived: 2,
}
"""Networks with the number of their own batch-norm layers that are computed together with what follows."""


def built(kind: type[Base], change: Callable[[Any], None] = lambda _: None) -> Base:
    torch.manual_seed(1)
    network = kind().to(memory_format=torch.channels_last)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    change(network)
    return network


def native(network: nn.Module) -> Any:
    fuse_batchnorms(network, load(os.environ))
    return network


def images(side: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(3, 8, side, side, generator=generator).to(memory_format=torch.channels_last)


def run(network: nn.Module) -> dict[str, Tensor]:
    """Two steps of training, and two evaluations: outputs, gradients and buffers."""
    found = {}
    for step in range(2):
        x = images().requires_grad_()
        y = network(x)
        y.square().sum().backward()
        found |= {f"y{step}": y.detach(), f"x{step}": x.grad}
    found |= {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.eval()
    found["evaluated"] = network(images()).detach()
    with torch.no_grad():
        found["without gradients"] = network(images())
    network.train()
    return found


def joined(network: nn.Module) -> int:
    """How many calls of the network's own batch-norm layers are computed with what follows."""
    source = network.fusions[0].source if isinstance(network, FusedModule) else ""
    return sum("self.bn" in line and ("activation = " in line or line.count(",") > 0) for line in source.splitlines())


@pytest.mark.parametrize("kind", FUSES)
def test_an_own_network_is_fused_and_computes_the_same(kind: type[Base]) -> None:
    network = native(built(kind))
    assert joined(network) == FUSES[kind]
    assert left_to_torch(network) == ""
    for same in (network, copy.deepcopy(native(built(kind))), pickle.loads(pickle.dumps(native(built(kind))))):
        assert isinstance(same, kind)
        assert_same(run(same), run(built(kind)))


def call(network: nn.Module) -> str:
    try:
        trace(network)
    except NotTraceable as error:
        return str(error)
    return ""


class Counts(Base):
    def forward(self, x):
        self.steps += 1
        return self.act(self.bn1(self.conv1(x)))


class Keeps(Base):
    def forward(self, x):
        self.cache.append(x)
        return self.act(self.bn1(self.conv1(x)))


class Prints(Base):
    def forward(self, x):
        print("in forward")
        return self.act(self.bn1(self.conv1(x)))


class CallsHelper(Base):
    def forward(self, x):
        return noted(self.act(self.bn1(self.conv1(x))))


class Draws(Base):
    def forward(self, x):
        return self.act(self.bn1(self.conv1(x))) * torch.rand(1)


class Grows(Base):
    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        return y if x.shape[0] > 2 else 2 * y


class Detached(Base):
    def forward(self, x):
        with torch.no_grad():
            mean = x.mean()
        return self.act(self.bn1(self.conv1(x))) - mean


class Compares(Base):
    def forward(self, x):
        y = self.other(x)
        return self.act(self.bn1(self.conv1(x))) if y is not None else x


class AsksForHooks(Base):
    def forward(self, x):
        return self.act(self.bn1(self.conv1(x))) if not self.act._forward_hooks else x


class Tries(Base):
    def forward(self, x):
        try:
            return self.act(self.bn1(self.conv1(x)))
        except RuntimeError:
            return x


class Bypasses(Base):
    def forward(self, x):
        return self.act(self.bn1.forward(self.conv1(x)))


class ReadsEnvironment(Base):
    def forward(self, x):
        return self.act(self.bn1(self.conv1(x))) if os.environ.get("FLAG") is None else x


class AsksTorch(Base):
    def forward(self, x):
        return self.act(self.bn1(self.conv1(x))) if torch.is_grad_enabled() else x


class AnyNumber(Base):
    def forward(self, *inputs):
        return self.act(self.bn1(self.conv1(inputs[0])))


class ReadsDefault(Base):
    def forward(self, x, options=OPTIONS):
        return self.act(self.bn1(self.conv1(x))) * options["scale"]


class ReadsClass(Base):
    def forward(self, x):
        return self.act(self.bn1(self.conv1(x))) * Config.scale


class GetsOfClass(Base):
    def forward(self, x):
        return self.act(self.bn1(self.conv1(x))) * getattr(Config, "scale")  # noqa: B009


class WritesText(Base):
    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        return 2 * y if f"{x.device}" == "cpu" else y


class AsksOfClass(Base):
    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        return 2 * y if x.__class__ == Tensor else y


class AsksArgument(Base):
    def forward(self, x):
        ask = lambda each: each is not None and each._base is None  # noqa: E731
        return self.act(self.bn1(self.conv1(x))) if ask(x) else x


class ComparesWithAttribute(Base):
    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        return 2 * y if self.other(x) is self.downsample else y


class LooksUp(Base):
    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        return 2 * y if self.other(x) in {x} else y


class GetsWithDefault(Base):
    def forward(self, x):
        return self.act(self.bn1(self.conv1(x))) * getattr(x, "factor", 2.0)


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def __call__(self, x):
        return super().__call__(x) * self.steps

    def forward(self, x):
        self.steps = 2
        return x


class ReadsChild(Base):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(Steps())

    def forward(self, x):
        return self.act(self.bn1(self.other[0](x))) * self.other[0].steps


class CallsOtherCall(ReadsChild):
    def forward(self, x):
        return self.act(self.bn1(self.other(x)))


class HasProperty(Base):
    @property
    def width(self):
        return 2.0

    def forward(self, x):
        return self.act(self.bn1(self.conv1(x))) * self.width


class HasClassMethod(Base):
    def forward(self, x):
        return self.doubled(self.act(self.bn1(self.conv1(x))))

    @classmethod
    def doubled(cls, x):
        return 2 * x


class AsksForLayer(Base):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if layer is self.layers[0] else x + layer(x)
        return self.act(self.bn1(x))


class Repeats(Base):
    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        for number in range(x.shape[0]):
            y = y + number
        return y


REFUSED = {
    Repeats: "test_fusion.py:{+1} branches or loops by a tensor's values or shape: move it into",
    HasProperty: "test_fusion.py:{} reads self.width, a property: store its value in __init__",
    HasClassMethod: "test_fusion.py:{} calls self.doubled, a class method: make it a plain method",
    AsksForLayer: "test_fusion.py:{+1} compares by `is`: compare numbers by `==`, layers by their index",
    ReadsDefault: "a dict as default",
    ReadsClass: "reads scale of Config",
    GetsOfClass: "a class",
    WritesText: "writes a tensor as text",
    AsksOfClass: "reads __class__",
    AsksArgument: "compares by `is`",
    ComparesWithAttribute: "compares by `is`",
    LooksUp: "looks up a tensor in a set or dict",
    GetsWithDefault: "reads factor",
    ReadsChild: "calls __call__|may change",
    CallsOtherCall: "__call__ of its own",
    Counts: "test_fusion.py:{} assigns the attribute steps: move it into a layer that forward calls",
    Keeps: "test_fusion.py:{} reads self.cache, a list: read numbers, text, functions or layers",
    Prints: "test_fusion.py:{} calls print: move it into",
    CallsHelper: "calls append|reads the global calls",
    Draws: "calls rand",
    Grows: "test_fusion.py:{+1} branches or loops by a tensor's values or shape: move it into",
    Detached: "has a with statement|no_grad",
    Compares: "compares by `is`",
    AsksForHooks: "reads self.act._forward_hooks",
    Tries: "has a try statement",
    Bypasses: "BatchNorm2d.forward",
    ReadsEnvironment: "uses the module os",
    AsksTorch: "calls is_grad_enabled",
    AnyNumber: "takes any arguments",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_forward_that_may_do_something_else_is_left_as_it_is(
    kind: type[Base], capsys: pytest.CaptureFixture[str]
) -> None:
    calls.clear()
    network = built(kind)
    generator = torch.random.get_rng_state()
    why = call(network)
    line = kind.forward.__code__.co_firstlineno + 1
    expected = REFUSED[kind].replace("{}", str(line)).replace("{+1}", str(line + 1))
    assert any(words in why for words in expected.split("|")), why
    network = native(network)
    assert type(network) is kind
    assert f"1 {kind.__name__} ({why})" in left_to_torch(network)
    assert (network.steps, len(network.cache), calls, capsys.readouterr().out) == (0, 0, [], "")
    assert torch.equal(torch.random.get_rng_state(), generator)
    results = []
    for each in (network, built(kind)):
        torch.manual_seed(7)
        results.append(run(each))
    assert_same(*results)
    assert network.steps == (4 if kind is Counts else 0)


def seen(network: Base) -> None:
    network.act.register_forward_hook(lambda *_: calls.append("hook"))


def changed_global(_network: Base) -> None:
    globals()["SCALE"] = 3.0


def patched_base(_network: Base) -> None:
    FunctionalResNet.forward = lambda self, x: self.bn1(x).relu()  # type: ignore[method-assign]


def no_layers(network: Base) -> None:
    network.layers, network.gain, network.mask = None, None, None


class Optional(Base):
    mask: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(1)

    def forward(self, x):
        x = functional.relu(self.bn1(self.conv1(x)))
        if self.layers is not None:
            for layer in self.layers:
                x = layer(x)
        if self.gain is not None:
            x = x + self.gain
        return x if self.mask is None else 2 * x


LATER: dict[str, tuple[type[Base], Callable[[Any], None]]] = {
    "an attribute": (Methods, lambda network: setattr(network, "scale", 5.0)),
    "a branch": (Branches, lambda network: setattr(network, "use_act", False)),
    "a layer": (Sum, lambda network: setattr(network, "downsample", nn.AvgPool2d(1))),
    "an activation": (Sum, lambda network: setattr(network, "act", nn.GELU())),
    "a function": (Loop, lambda network: setattr(network, "nonlinearity", functional.leaky_relu)),
    "a global": (Loop, changed_global),
    "a method": (Methods, lambda network: setattr(network, "body", network.conv2)),
    "one layer more": (Loop, lambda network: network.layers.append(nn.ReLU())),
    "a norm": (FunctionalResNet, lambda network: setattr(network, "bn2", nn.InstanceNorm2d(8))),
    "a hook": (Sum, seen),
    "a forward": (FunctionalResNet, lambda network: setattr(network, "forward", network.conv1.forward)),
    "a parameter": (Methods, lambda network: setattr(network, "gain", nn.Parameter(torch.full((8, 1, 1), 3.0)))),
    "a method of a base class": (Derived, patched_base),
    "nothing in the place of tensors and layers": (Optional, no_layers),
    "a Python module": (FunctionalResNet, lambda _: globals().update(functional=SimpleNamespace(relu=torch.sigmoid))),
    "a buffer": (Methods, lambda network: network.shift.add_(1)),
}


@pytest.mark.parametrize("what", LATER)
def test_what_is_changed_later_counts(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, change = LATER[what]
    monkeypatch.setitem(globals(), "SCALE", SCALE)
    monkeypatch.setitem(globals(), "functional", functional)
    monkeypatch.setattr(FunctionalResNet, "forward", FunctionalResNet.forward)
    calls.clear()
    network = native(built(kind))
    run(network)
    network = native(built(kind))
    change(network)
    plain = built(kind, change)
    assert_same(run(network), run(plain))
    assert len(calls) % 2 == 0  # by both


def test_the_class_of_a_global_helper_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    network = native(built(Loop))
    monkeypatch.setitem(globals(), "halved", lambda x: x * 10)
    assert_same(run(network), run(built(Loop)))


def test_lists_and_tensors_have_a_forward_of_their_own() -> None:
    network, plain = native(built(Lists)), built(Lists)
    assert [each.tensors for each in network.fusions] == [True, False]
    for inputs in (images(), [images()], (images(), images())):
        assert torch.allclose(network(inputs), plain(inputs), atol=1e-5)


def test_a_replaced_call_of_all_modules_sees_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    network, plain, call, seen = native(built(Sum)), built(Sum), nn.Module.__call__, []
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *inputs: (seen.append(self), call(self, *inputs))[1])
    for each in (network, plain):
        each(images())
    assert [type(each).__name__ for each in seen].count("ReLU") == 4


class TwoInputs(Base):
    def forward(self, x, y):
        return self.act(self.bn1(self.conv1(x if isinstance(x, Tensor) else x[0])))


def test_tensors_beside_lists_are_computed_by_the_class_s_forward() -> None:
    network, plain = native(built(TwoInputs)), built(TwoInputs)
    for inputs in ((images(), [images()]), ([images()], images()), (images(), images()), ([images()], [])):
        assert torch.allclose(network(*inputs), plain(*inputs), atol=1e-5)


class Block(Base):
    def forward(self, x):
        return functional.relu(self.bn1(self.conv1(x)) + x)


class GivesInput(Base):
    def forward(self, x):
        skip = self.other(x)
        return functional.relu(self.bn1(self.conv1(x))), skip


def test_a_returned_input_retains_the_whole_gradient() -> None:
    found = []
    for change in (native, lambda network: network):
        torch.manual_seed(1)
        network = change(nn.Sequential(Block(), GivesInput()).to(memory_format=torch.channels_last))
        out, skip = network(images())
        skip.retain_grad()
        (out.square().sum() + skip.sum()).backward()
        found.append(skip.grad)
    assert torch.allclose(*found, atol=1e-4)


def test_a_thread_trains_while_another_traces() -> None:
    import threading

    networks, errors = [built(FunctionalResNet) for _ in range(4)], []

    def work(network: nn.Module, *, traces: bool) -> None:
        try:
            for _ in range(10):
                trace(network) if traces else network(images())
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    call = nn.Module.__call__
    threads = [threading.Thread(target=work, args=(each,), kwargs={"traces": i < 2}) for i, each in enumerate(networks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert nn.Module.__call__ is call


def test_arguments_by_name_and_with_defaults_are_those_of_the_class() -> None:
    network, plain = native(built(Branches)), built(Branches)
    for arguments in ({"flag": True}, {"flag": None}, {}):
        assert torch.allclose(network(images(), **arguments), plain(images(), **arguments), atol=1e-5)
        assert torch.allclose(network(x=images(), **arguments), plain(x=images(), **arguments), atol=1e-5)
    with pytest.raises(TypeError):
        network()


def test_an_error_in_a_layer_names_its_line() -> None:
    network = native(built(Sum))
    with pytest.raises(RuntimeError, match=r"expected input.*to have 8 channels") as error:
        network(torch.zeros(1, 3, 6, 6))
    assert "self.conv1(x)" in "".join(str(entry.statement) for entry in error.traceback)


def test_a_profiler_of_the_process_goes_on_after_a_trace() -> None:
    import sys

    events = []
    sys.setprofile(lambda _frame, event, _arg: events.append(event))
    try:
        native(built(Sum))
        profiler = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert profiler is not None
    assert "__getattribute__" not in vars(nn.Module)


class Sets(nn.Module):
    """Changes the attribute of another module."""

    def __init__(self, target: list[Any]) -> None:
        super().__init__()
        self.target = target

    def forward(self, x):
        self.target[0].scale = 5.0
        return x


class ReadsLate(Base):
    def forward(self, x):
        return self.act(self.bn1(self.conv1(self.other(x)))) * self.scale


def test_a_value_that_a_layer_changes_during_the_pass_is_an_error() -> None:
    network = built(ReadsLate)
    network.other = Sets([network])
    network = native(network)
    with pytest.raises(RunError, match=r"ReadsLate\.forward reads scale, which a layer changes during it"):
        network(images())
    network(images())  # of the new value, by the class's own forward
