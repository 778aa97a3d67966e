"""Networks and losses of users: parameters of losses, buffers, layers of every kind, outputs of any type."""

import json
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset, default_collate

from cputrain.affinity.errors import InputError, RunError
from cputrain.data.formats.dataset import Dataset, UserSamples
from cputrain.data.loader import Batch
from cputrain.optim import build_optimizer
from cputrain.recipe.schema import CommSection, OptimSection, Recipe
from cputrain.training.building import prepare_user_network
from cputrain.training.engine import choose_engine, prepare_model
from cputrain.training.snapshot import TrainProgress, load, restore
from cputrain.training.state import Learner, TrainState, make_train_state
from cputrain.training.step import StepSettings, train_step
from cputrain.training.task import UserTask
from cputrain.training.watchers.replicas import replica_tensors
from tests.cputrain.test_own_code import OF_RANKS, ROOT
from tests.support.checkpoint_files import written
from tests.support.forked import ended, forked, in_fork
from tests.support.own_networks import Heads, Scale
from tests.support.trainings import raw_events

pytestmark = pytest.mark.usefixtures("group")
CLASSES = 2
SGD = OptimSection(name="sgd", weight_decay=0.0)


@dataclass
class Training:
    """A user's network on the only rank."""

    state: TrainState
    task: Any
    inputs: Tensor
    notes: list[str]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            targets = torch.arange(len(self.inputs)) % CLASSES
            batch = Batch(images=self.inputs, labels=targets, weights=torch.ones(len(targets)), damaged=())
            settings = StepSettings(images=len(targets), passes=1, lr=0.1, weight_decay=0.0)
            assert train_step(self.state, iter([batch]), settings, self.task).finite


def training(network: nn.Module, inputs: Tensor, loss: Any = None, **keys: Any) -> Training:
    recipe = Recipe(**{"optim": SGD, **keys})
    rows = UserSamples(TensorDataset(inputs, torch.arange(len(inputs)) % CLASSES), default_collate, "training")
    dataset = Dataset(classes=(), train=rows, val=rows)
    own = UserTask(network=network, loss=loss or nn.CrossEntropyLoss(), dataset=dataset, classifies=False)
    task = own.task(recipe.precision)
    notes = prepare_user_network(task.build(), task, recipe.precision)
    prepare_model(network, choose_engine("eager", recipe.precision, {}), recipe.precision)
    optimizer = build_optimizer(network, recipe.optim, task.loss_module)
    learner = Learner(network, task.losses, recipe.precision, task.loss_module)
    return Training(
        make_train_state(learner, optimizer, recipe.comm, ema_decay=recipe.ema_decay, bucket_mib=25.0),
        task,
        inputs,
        notes,
    )


def rows(*shape: int) -> Tensor:
    return torch.randn(6, *shape, generator=torch.Generator().manual_seed(1))


class Wrapped(nn.Module):
    """A layer whose outputs are in something else."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.wrap = nn.Linear(3, CLASSES), wrap

    def forward(self, inputs: Tensor) -> Any:
        return self.wrap(self.fc(inputs))


def scale_of(loss: Any) -> Scale:
    """The module behind a method or a partial."""
    return loss if isinstance(loss, Scale) else scale_of(loss.func if isinstance(loss, partial) else loss.__self__)


@pytest.mark.parametrize(
    "kind", [Scale, lambda: Scale().forward, lambda: partial(Scale()), lambda: partial(Scale().forward)]
)
def test_a_loss_s_parameters_are_trained_as_by_hand(kind: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    network, loss = nn.Linear(3, CLASSES), kind()
    by_hand, hand_loss = nn.Linear(3, CLASSES), Scale()
    by_hand.load_state_dict(network.state_dict())
    made = training(network, rows(3), loss)
    made.step(2)
    optimizer = torch.optim.SGD([*by_hand.parameters(), *hand_loss.parameters()], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        hand_loss(by_hand(rows(3)), torch.arange(6) % CLASSES).mean().backward()
        optimizer.step()
    assert float(hand_loss.scale.detach()) != 1.0
    assert torch.allclose(scale_of(loss).scale, hand_loss.scale) and torch.allclose(network.weight, by_hand.weight)
    assert scale_of(loss).scale.grad is None


class Counting(Scale):
    """A loss with a buffer that it changes."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(start))

    def forward(self, outputs: Any, targets: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(outputs, targets) + 0.01 * self.calls


def test_a_loss_is_saved_and_restored_with_its_optimizer_state(tmp_path: Path) -> None:
    momentum = OptimSection(name="momentum", weight_decay=0.0)
    made = training(nn.Linear(3, CLASSES), rows(3), Counting(), optim=momentum, ema_decay=0.5)
    made.step(2)
    path = written(tmp_path, made.state, TrainProgress(step=2))
    assert sorted(file.name for file in path.glob("*.safetensors")) == [
        "ema.safetensors",
        "loss.safetensors",
        "model.safetensors",
        "optimizer.safetensors",
        "rank-00000.safetensors",
    ]
    again = training(nn.Linear(3, CLASSES), rows(3), Counting(7.0), optim=momentum, ema_decay=0.5)
    notes = restore(load(path, 0, 1), again.state, "momentum")
    assert notes == ["buffers of the loss have the checkpoint's values: calls"]
    made.step()
    again.step()
    ours, theirs = (replica_tensors(each.state.learner, each.state.optimizer) for each in (made, again))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert float(again.state.learner.loss_module.calls) == 3
    with pytest.raises(InputError, match="has parameters or buffers of a loss, and this training none"):
        restore(load(path, 0, 1), training(nn.Linear(3, CLASSES), rows(3)).state, "momentum")


def test_parameters_that_no_module_has_are_refused() -> None:
    hidden, tensor = Scale(), torch.ones((), requires_grad=True)
    unregistered = Wrapped(lambda outputs: hidden.scale * outputs)
    unregistered.fc, unregistered.layers = nn.Linear(3, CLASSES), [nn.Linear(3, CLASSES)]
    unregistered.forward = lambda inputs: unregistered.fc(inputs) + unregistered.layers[0](inputs)
    for network, loss in (
        (nn.Linear(3, CLASSES), lambda outputs, targets: hidden(2 * outputs, targets)),
        (nn.Linear(3, CLASSES), lambda outputs, targets: functional.cross_entropy(tensor * outputs, targets)),
        (unregistered, None),
    ):
        with pytest.raises((InputError, RunError), match=r"requires_grad .* that no module has"):
            training(network, rows(3), loss).step(2)


def test_a_network_may_make_tensors_with_gradients_in_its_forward_pass() -> None:
    training(Wrapped(lambda outputs: outputs.detach().requires_grad_() + outputs), rows(3)).step(3)


@dataclass
class Outputs:
    """Outputs as libraries return them."""

    logits: Tensor
    hidden: Any = None


class Plain:
    """Outputs of a class that no library knows."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


Named = namedtuple("Named", "logits name")


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: (y, None), lambda o: o[0]),
        (Outputs, lambda o: o.logits),
        (Plain, lambda o: o.logits),
        (lambda y: Named(y, "a"), lambda o: o.logits),
        (lambda y: [{"a": (Outputs(y), 3, "text")}, None, []], lambda o: o[0]["a"][0].logits),
        (lambda y: {"y": y, "unused": 2 * y}, lambda o: o["y"]),
    ],
)
@pytest.mark.parametrize("search", [False, True])
def test_outputs_may_be_anything_that_the_loss_takes(wrap: Any, unwrap: Any, search: bool) -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return functional.cross_entropy(unwrap(outputs), targets, reduction="none")

    comm = CommSection(find_unused_parameters=search)
    made = training(Wrapped(wrap), rows(3), loss, comm=comm)
    made.step(2)
    assert made.state.unused == ()


def test_parameters_that_the_loss_does_not_reach_are_named_and_kept() -> None:
    network = Heads()
    made = training(network, rows(3), Scale(), ema_decay=0.5)
    before = network.other.weight.detach().clone()
    made.step(3)
    assert made.state.unused == ("other.weight", "other.bias") and torch.equal(network.other.weight, before)


def test_a_loss_that_reaches_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="does not depend on any parameter that is trained"):
        training(nn.Linear(3, CLASSES), rows(3), lambda outputs, _: outputs.detach().sum(1)).step()
    with pytest.raises(InputError, match="no parameter of the network requires a gradient"):
        training(nn.Linear(3, CLASSES).requires_grad_(False), rows(3))


class Recomputed(nn.Module):
    """A layer that is recomputed in the backward pass, which hides it from the graph."""

    def __init__(self, *, spare: bool) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), nn.Linear(3, CLASSES)
        if spare:
            self.spare = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Any:
        return checkpoint(self.inner, self.first(inputs), use_reentrant=True)


def test_reentrant_checkpointing_hides_no_parameter() -> None:
    network = Recomputed(spare=False)
    before = network.inner.weight.detach().clone()
    made = training(network, rows(3))
    made.step(3)
    assert made.state.unused == () and not torch.equal(network.inner.weight, before)
    with pytest.raises(InputError, match=r"spare.weight.*use_reentrant=False"):
        training(Recomputed(spare=True), rows(3)).step()


def flat(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, CLASSES))


class Viewed(nn.Module):
    """Parameters and buffers of four dimensions that are used in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shift = nn.Conv2d(1, 2, 3), nn.Parameter(torch.zeros(1, 2, 2, 2))
        self.register_buffer("mask", torch.ones(1, 2, 2, 2))

    def forward(self, images: Tensor) -> Any:
        return (self.conv(images).flatten(1) + self.shift.view(1, 8) * self.mask.view(1, 8))[:, :CLASSES]


def bag(**options: Any) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, **options), nn.Linear(4, CLASSES))


def pruned() -> nn.Module:
    return nn.Sequential(prune.random_unstructured(nn.Linear(3, 4), "weight", amount=0.5), nn.Linear(4, CLASSES))


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.Sequential(weight_norm(nn.Linear(3, CLASSES)))


WORDS = torch.arange(24).view(6, 4) % 10
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv3d": (lambda: flat(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2), features=16), rows(1, 4, 4, 4)),
    "lazy": (
        lambda: nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2)),
        rows(1, 4, 4),
    ),
    "viewed": (Viewed, rows(1, 4, 4)),
    "sparse": (bag, WORDS),
    "sparse max": (lambda: bag(mode="sum", max_norm=1.0), WORDS),
    "instance norm": (lambda: flat(nn.InstanceNorm1d(3, track_running_stats=True), features=6), rows(3, 2)),
    "pruned": (pruned, rows(3)),
    "weight norm": (old_weight_norm, rows(3)),
    "parametrized": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, CLASSES))), rows(3)),
    "parametrized conv": (lambda: flat(parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), features=8), rows(1, 4, 4)),
    "compiled": (lambda: torch.compile(nn.Linear(3, CLASSES), backend="eager"), rows(3)),
    "compiled layer": (lambda: nn.Sequential(torch.compile(nn.Linear(3, CLASSES), backend="eager")), rows(3)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "compiled" in name else name for name in NETWORKS]
)
def test_layers_of_every_kind_train_average_and_resume_bit_for_bit(name: str, tmp_path: Path) -> None:
    build, inputs = NETWORKS[name]
    torch.manual_seed(4)
    made = training(build(), inputs, ema_decay=0.75)
    assert ("dense" in "".join(made.notes)) == name.startswith("sparse")
    made.step(2)
    path = written(tmp_path, made.state, TrainProgress(step=2))
    assert not [key for key in load(path, 0, 1).files["model.safetensors"] if "_orig_mod" in key]
    again = training(build(), inputs, ema_decay=0.75)
    restore(load(path, 0, 1), again.state, "momentum")
    made.step()
    again.step()
    ours, theirs = made.state, again.state
    for one, other in ((ours.learner.weights(), theirs.learner.weights()), (ours.averages, theirs.averages)):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    trained = {key: value.detach().clone() for key, value in ours.learner.weights().items()}
    with ours.averaged() as network, torch.no_grad():
        network.eval()
        assert network(inputs).isfinite().all()
        assert any(not torch.equal(value, trained[key]) for key, value in ours.learner.weights().items())
    assert all(torch.equal(value, trained[key]) for key, value in ours.learner.weights().items())


@pytest.mark.parametrize("gather", [False, True])
def test_operators_with_sparse_gradients_are_refused(gather: bool) -> None:
    network = nn.Linear(3, CLASSES)
    index = torch.zeros(6, CLASSES, dtype=torch.int64)
    network.forward = lambda words: (
        network.weight.t().gather(0, index[:3], sparse_grad=True).sum(0) + words
        if gather
        else functional.embedding(words.long().clamp(0, 1)[:, 0], network.weight, sparse=True)
    )
    with pytest.raises(InputError, match=r"Backward0 of the network has sparse gradients: pass sparse=False"):
        training(network, rows(CLASSES)).step()


def test_lazy_layers_are_refused_if_the_forward_pass_does_not_use_them() -> None:
    network = nn.Linear(3, CLASSES)
    network.spare = nn.LazyLinear(3)
    with pytest.raises(InputError, match=r"forward pass does not initialize spare.weight, spare.bias"):
        training(network, rows(3))


class Auxiliary(nn.Module):
    """A network with a lazy head, and batch norms before it, that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, CLASSES)
        self.auxiliary = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.norm(self.body(inputs))
        return self.head(seen) + (self.auxiliary(seen) if self.training else 0)


def test_lazy_layers_that_only_training_uses_are_initialized_without_a_trace_in_buffers() -> None:
    network = Auxiliary()
    state = training(network, rows(3))
    assert tuple(network.auxiliary[1].weight.shape) == (CLASSES, 4) and network.training
    for norm in (network.norm, network.auxiliary[0]):
        assert norm.running_mean.eq(0).all() and norm.running_var.eq(1).all() and norm.num_batches_tracked == 0
    state.step()
    assert network.auxiliary[0].num_batches_tracked == 1


class Late(nn.Module):
    """A network that registers a buffer in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(3))
        if self.training:
            self.mean.lerp_(inputs.mean(0), 0.5)
        return self.fc(inputs - self.mean)


def test_buffers_that_appear_in_a_forward_pass_are_evaluated_and_skipped_with_the_step() -> None:
    network = Late()
    made = training(network, rows(3), ema_decay=0.5, on_nan="skip")
    made.step()
    assert made.state.shares_buffers and "mean" in dict(network.named_buffers())
    before = network.mean.clone()
    with made.state.averaged() as averaged:
        averaged.eval()
        averaged(rows(3))
    made.inputs = torch.full((6, 3), torch.nan)
    with pytest.raises(AssertionError):
        made.step()
    assert torch.equal(network.mean, before)


ONE_EPOCH = """
import json, torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from cputrain import train

class Seen(nn.Sequential):
    kinds = set()

    def forward(self, inputs):
        self.kinds |= {type(layer).__name__ for layer in self if self.training}
        return super().forward(inputs)

images = TensorDataset(torch.randn(8, 3, 8, 8), torch.arange(8) % 2)
for layers in ([nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4)], [nn.Flatten(), nn.Linear(192, 4)]):
    network = Seen(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    settings = {"epochs": 1, "batch.local": 4, "schedule.warmup_epochs": 0, "comm.backend": "gloo"}
    train(network, nn.CrossEntropyLoss(), images, images, classes=("a", "b"), settings=settings, overwrite=True)
    environment = json.loads(Path("runs/training/environment.json").read_text())
    print(environment["engine"], "BatchNorm2d" in Seen.kinds, type(network[1]).__name__)
"""


@pytest.mark.slow
def test_layers_with_native_kernels_are_native_during_the_training_alone(tmp_path: Path) -> None:
    with forked("-c", ONE_EPOCH, cwd=tmp_path, PYTHONPATH=str(ROOT)) as process:
        end = ended(process)
    assert end.status == 0, end.err
    assert "native False BatchNorm2d\n" in end.out and "eager False Linear\n" in end.out
    assert end.out.count("faster: native kernels") == 0


class Frozen(nn.Linear):
    """A layer with a train() that returns nothing, as users override it to keep layers frozen."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)


def test_a_network_from_an_evaluation_is_trained_in_training_mode() -> None:
    network = nn.Sequential(nn.Linear(3, CLASSES), nn.Dropout()).eval()
    training(network, rows(3))
    assert network.training and network[1].training
    training(Frozen(3, CLASSES), rows(3)).step()


def test_complex_parameters_are_refused() -> None:
    network = nn.Linear(3, CLASSES)
    network.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InputError, match=r"phase of the network is torch\.complex64"):
        training(network, rows(3))


def test_buffers_count_among_the_replicas_and_statistics_do_not() -> None:
    made = training(flat(nn.InstanceNorm1d(3, track_running_stats=True), nn.BatchNorm1d(3), features=6), rows(3, 2))
    names = replica_tensors(made.state.learner, made.state.optimizer)
    assert "network.0.running_mean" in names and not [name for name in names if name.startswith("network.1.running")]


def json_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if "{" in line and '"own_loss"' in line:
            yield json.loads(line[line.index("{") :])


@pytest.mark.slow
def test_ranks_share_buffers_and_name_unused_parameters(tmp_path: Path) -> None:
    """Five trainings on two ranks; the last one ends, as its loss does not depend on a layer that it did before."""
    ran = in_fork(*OF_RANKS, "-m", "tests.support.own_networks", cwd=tmp_path, PYTHONPATH=str(ROOT))
    found: dict[str, list[dict[str, Any]]] = {}
    for line in json_lines(ran.stdout):
        found.setdefault(line["name"], []).append(line)
    assert list(found) == ["in_place", "assigned", "unused", "sometimes"], ran.stdout + ran.stderr
    for first, second in found.values():
        assert first["weights"] == second["weights"] and first["buffers"] == second["buffers"]
        assert first["loss"] == second["loss"] == pytest.approx(first["own_loss"], rel=1e-5)
        assert first["scale"] != 1.0
    for name in ("in_place", "assigned"):
        center = torch.zeros(3)
        for mean in next(line["seen"] for line in found[name] if line["rank"] == 0):
            center = 0.5 * center + 0.5 * torch.tensor(mean)
        assert torch.allclose(center, torch.tensor(found[name][0]["buffers"]["center"])), "rank 0's, as with DDP"
    for name in ("unused", "sometimes"):
        warned = [event for event in raw_events(tmp_path / name) if event["event"] == "warning"]
        assert "2 parameters without a gradient, on which the loss does not depend: other.weight, other.bias" in str(
            warned
        )
    assert ran.returncode == 1
    assert (
        "does not depend on other.weight, other.bias, that of the first batch did: set comm.find_unused" in ran.stderr
    )
