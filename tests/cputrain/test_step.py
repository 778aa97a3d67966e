"""One update against its plainest form: clipping, label smoothing, the mean of the weights, lost numbers, phases."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from affinity.ranks.rank import Rank
from cputrain.comm.hooks import Bf16Gradients, CommClock
from cputrain.data.loader import Batch
from cputrain.optim.build import build_optimizer
from cputrain.optim.schedules import lr_at, scheduled_lr
from cputrain.recipe.derivation import TrainingSizes
from cputrain.recipe.phases import EpochSettings, settings_at
from cputrain.recipe.schema import DataSection, OptimSection, PhaseSection, Recipe, ScheduleSection
from cputrain.training.engine import bf16_speedup, computing, prepare_model
from cputrain.training.step import Learner, Sums, update

IMAGES, CLASSES, RATE = 6, 4, 0.5
NUMBERS = TrainingSizes(
    global_batch=IMAGES,
    images_per_epoch=60,
    used_images_per_epoch=60,
    steps_per_epoch=10,
    warmup_steps=0,
    total_steps=40,
    peak_rate=RATE,
)


class Plain(nn.Module):
    """Flatten and one layer, batch-norm before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.fc = nn.BatchNorm2d(3), nn.Linear(3 * 4 * 4, CLASSES)
        self.poison = 0.0

    def forward(self, images: Tensor) -> Tensor:
        return self.fc((self.norm(images) + self.poison).flatten(1))


def learner(recipe: Recipe, clock: CommClock | None = None) -> Learner:
    """A network as DDP hands it on with one rank: its gradients are their own mean."""
    network = prepare_model(Plain(), "native", recipe.precision)
    mean = prepare_model(Plain(), "native", recipe.precision).requires_grad_(False) if recipe.ema_decay else None
    optimizer = build_optimizer(network, recipe.optim)
    return Learner(network=network, model=network, optimizer=optimizer, clock=clock or CommClock(), mean=mean)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(7)
    return Batch(
        images=torch.randint(0, 256, (IMAGES, 4, 4, 3), dtype=torch.uint8, generator=generator),
        labels=torch.arange(IMAGES) % CLASSES,
        weights=torch.ones(IMAGES),
        damaged=(),
    )


def normalised(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float() / 128 - 1


def step(made: Learner, recipe: Recipe, sums: Sums | None = None) -> Any:
    rank = Rank(launcher="env", rank=0, world_size=1, local_rank=0, local_world_size=1)
    session = SimpleNamespace(recipe=recipe, numbers=NUMBERS, rank=rank, leads=True, normalize=normalised)
    return update(made, session, iter([batch()]), sums or Sums(), step=0, rate=RATE, decay=recipe.optim.weight_decay)


def plain(smoothing: float = 0.0) -> tuple[Plain, Tensor]:
    """The network with the gradients of the batch, and its loss written out."""
    network, data = Plain(), batch()
    logs = functional.log_softmax(network(normalised(data.images)), dim=1)
    hit = logs[torch.arange(IMAGES), data.labels]
    loss = -((1 - smoothing) * hit + smoothing * logs.mean(1)).mean()
    loss.backward()
    return network, loss.detach()


SGD = OptimSection(name="sgd", weight_decay=0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_is_the_gradient_of_the_mean_loss(smoothing: float) -> None:
    recipe = Recipe(optim=SGD, label_smoothing=smoothing)
    made, (reference, loss) = learner(recipe), plain(smoothing)
    sums = Sums()
    done = step(made, recipe, sums)
    assert done.finite and done.loss == pytest.approx(float(loss)) and sums.images == IMAGES
    for p, q in zip(made.network.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q - RATE * q.grad, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mean_squared_error_is_to_the_label_s_one_hot_vector(smoothing: float) -> None:
    recipe = Recipe(optim=SGD, loss="mse", label_smoothing=smoothing)
    made, reference, data, sums = learner(recipe), Plain(), batch(), Sums()
    done = step(made, recipe, sums)
    wanted = torch.full((IMAGES, CLASSES), smoothing / CLASSES)
    wanted[torch.arange(IMAGES), data.labels] += 1 - smoothing
    loss = nn.MSELoss()(reference(normalised(data.images)), wanted)
    loss.backward()
    assert done.loss == pytest.approx(float(loss.detach())) and sums.images == IMAGES
    for p, q in zip(made.network.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q - RATE * q.grad, atol=1e-6)


@pytest.mark.parametrize(("limit", "clipped"), [(0.01, True), (1e6, False)])
def test_gradients_are_scaled_to_the_norm_where_theirs_is_larger(limit: float, clipped: bool) -> None:
    recipe = Recipe(optim=SGD.model_copy(update={"clip_norm": limit}))
    made, (reference, _) = learner(recipe), plain()
    step(made, recipe)
    norm = float(nn.utils.clip_grad_norm_(reference.parameters(), limit))
    assert (norm > limit) == clipped
    for p, q in zip(made.network.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q - RATE * q.grad, atol=1e-5 * limit + 1e-7)


def test_the_mean_follows_the_weights_and_is_judged_with_the_network_s_statistics() -> None:
    recipe = Recipe(optim=SGD, ema_decay=0.75)
    made = learner(recipe)
    expected = [p.detach().clone() for p in made.network.parameters()]
    for _ in range(3):
        step(made, recipe)
        expected = [0.75 * e + 0.25 * p.detach() for e, p in zip(expected, made.network.parameters(), strict=True)]
    judged = made.judged()
    assert judged is made.mean
    assert all(torch.allclose(e, p, atol=1e-6) for e, p in zip(expected, judged.parameters(), strict=True))
    assert torch.equal(judged.norm.running_mean, made.network.norm.running_mean) and judged.norm.running_mean.any()


@pytest.mark.parametrize("on_nan", ["skip", "stop"])
def test_a_step_without_numbers_changes_nothing_that_is_kept(on_nan: str) -> None:
    recipe = Recipe(optim=SGD, ema_decay=0.5, on_nan=on_nan)
    clock = Bf16Gradients(left_over={0: torch.full((3,), torch.nan)})
    made = learner(recipe, clock)
    before = {name: value.clone() for name, value in made.network.state_dict().items()}
    made.network.poison = torch.inf
    sums = Sums()
    done = step(made, recipe, sums)
    assert not done.finite and done.lost == ", no number first in the output of fc"
    after = made.network.state_dict()
    kept = before.keys() if on_nan == "skip" else [name for name in before if name.startswith("fc")]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert sums == Sums() and clock.left_over == {}
    assert all(p.grad is None for p in made.network.parameters())


def test_a_loss_that_is_no_number_makes_the_gradients_none_for_all() -> None:
    """Cross-entropy's gradient can be finite where its sum over a batch is not: other ranks have to hear of it."""
    recipe = Recipe(optim=SGD)
    made = learner(recipe)
    with torch.no_grad():
        made.network.fc.bias[0] = 3e38  # images of other classes lose that much each
    done = step(made, recipe)
    assert done.loss == torch.inf and not done.finite and done.lost == ", none in any layer"


def test_float64_is_float64_throughout() -> None:
    recipe = Recipe(optim=SGD, precision="float64")
    made = learner(recipe)
    step(made, recipe)
    assert {p.dtype for p in made.network.parameters()} == {torch.float64}


def test_bf16_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    recipe = Recipe(optim=SGD, precision="bf16")
    made, (_, loss) = learner(recipe), plain()
    done = step(made, recipe)
    assert {p.dtype for p in made.network.parameters()} == {torch.float32}
    assert done.loss == pytest.approx(float(loss), rel=0.02) and done.loss != pytest.approx(float(loss), rel=1e-6)
    with computing("bf16"):
        assert made.network(normalised(batch().images)).dtype == torch.bfloat16
    with computing("float32"):
        assert made.network(normalised(batch().images)).dtype == torch.float32


def test_the_self_test_times_a_real_convolution() -> None:
    assert 0.001 < bf16_speedup() < 1000


PHASES = (
    PhaseSection(from_epoch=0, crop=128),
    PhaseSection(from_epoch=2, crop=160, weight_decay=0.0),
    PhaseSection(from_epoch=3, train_crop="random", restart_rate=0.25, restart_power=2),
)


def test_each_value_is_that_of_the_last_phase_that_has_it() -> None:
    recipe = Recipe(
        epochs=4, phases=PHASES, data=DataSection(crop=224), schedule=ScheduleSection(warmup_epochs=0), optim=SGD
    )
    assert [settings_at(recipe, epoch) for epoch in range(4)] == [
        EpochSettings(crop=128, train_crop="random_resized", weight_decay=0.0),
        EpochSettings(crop=128, train_crop="random_resized", weight_decay=0.0),
        EpochSettings(crop=160, train_crop="random_resized", weight_decay=0.0),
        EpochSettings(crop=160, train_crop="random", weight_decay=0.0),
    ]
    assert settings_at(Recipe(), 50) == EpochSettings(crop=224, train_crop="random_resized", weight_decay=5e-5)


def test_a_phase_may_begin_the_rate_anew() -> None:
    recipe = Recipe(epochs=4, phases=PHASES, schedule=ScheduleSection(warmup_epochs=0))
    schedule = [lr_at(step, recipe, NUMBERS) for step in range(41)]
    assert schedule[:30] == [scheduled_lr(step, recipe.schedule, NUMBERS) for step in range(30)]
    assert schedule[30:] == pytest.approx([0.25 * ((40 - step) / 10) ** 2 for step in range(30, 41)])
