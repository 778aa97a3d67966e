"""A training step against its definition: clipping, label smoothing, the EMA model, NaN and Inf; phases."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cputrain.comm.hooks import AllReduceHook, Bf16AllReduceHook
from cputrain.data.loader import Batch
from cputrain.optim import build_optimizer
from cputrain.recipe.derivation import TrainingSizes, schedule_of
from cputrain.recipe.schema import DataSection, EpochSettings, OptimSection, PhaseSection, Recipe, ScheduleSection
from cputrain.schedule import lr_at
from cputrain.training.engine import autocast, bf16_speedups, choose_engine, prepare_model
from cputrain.training.session import recipe_task
from cputrain.training.state import Learner, TrainState, make_train_state
from cputrain.training.step import EpochMetrics, StepResult, StepSettings, train_step
from cputrain.training.task import Task

pytestmark = pytest.mark.usefixtures("group")
EAGER = choose_engine("eager", "float32", {})
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
        self.shift = 0.0

    def forward(self, images: Tensor) -> Tensor:
        return self.fc((self.norm(images) + self.shift).flatten(1))


def state_of(recipe: Recipe, all_reduce: AllReduceHook | None = None) -> TrainState:
    """The state of the only rank."""
    network = prepare_model(Plain(), EAGER, recipe.precision)
    learner = Learner(network, task_of(recipe).losses, recipe.precision)
    return make_train_state(
        learner,
        build_optimizer(network, recipe.optim),
        recipe.comm,
        ema_decay=recipe.ema_decay,
        bucket_mib=25.0,
        all_reduce=all_reduce,
    )


def task_of(recipe: Recipe) -> Task:
    return recipe_task(recipe, CLASSES, None, normalized)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(7)
    return Batch(
        images=torch.randint(0, 256, (IMAGES, 4, 4, 3), dtype=torch.uint8, generator=generator),
        labels=torch.arange(IMAGES) % CLASSES,
        weights=torch.ones(IMAGES),
        damaged=(),
    )


def normalized(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float() / 128 - 1


def step(state: TrainState, recipe: Recipe) -> StepResult:
    settings = StepSettings(
        images=IMAGES,
        passes=1,
        lr=RATE,
        weight_decay=recipe.optim.weight_decay,
        clip_norm=recipe.optim.clip_norm,
        skips_non_finite=recipe.on_nan == "skip",
    )
    return train_step(state, iter([batch()]), settings, task_of(recipe))


def plain(smoothing: float = 0.0) -> tuple[Plain, Tensor]:
    """The network with the gradients of the batch, and its loss written out."""
    network, data = Plain(), batch()
    logs = functional.log_softmax(network(normalized(data.images)), dim=1)
    hit = logs[torch.arange(IMAGES), data.labels]
    loss = -((1 - smoothing) * hit + smoothing * logs.mean(1)).mean()
    loss.backward()
    return network, loss.detach()


def check_weights(state: TrainState, reference: Plain, atol: float = 1e-6) -> None:
    """Fail unless each weight has gone against the reference's gradient."""
    for p, q in zip(state.network.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q - RATE * q.grad, atol=atol)


SGD = OptimSection(name="sgd", weight_decay=0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_is_the_gradient_of_the_mean_loss(smoothing: float) -> None:
    recipe = Recipe(optim=SGD, label_smoothing=smoothing)
    state, (reference, loss) = state_of(recipe), plain(smoothing)
    result = step(state, recipe)
    assert result.finite and result.loss == pytest.approx(float(loss)) and result.metrics.images == IMAGES
    check_weights(state, reference)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mean_squared_error_is_to_the_label_s_one_hot_vector(smoothing: float) -> None:
    recipe = Recipe(optim=SGD, loss="mse", label_smoothing=smoothing)
    state, reference, data = state_of(recipe), Plain(), batch()
    result = step(state, recipe)
    wanted = torch.full((IMAGES, CLASSES), smoothing / CLASSES)
    wanted[torch.arange(IMAGES), data.labels] += 1 - smoothing
    loss = nn.MSELoss()(reference(normalized(data.images)), wanted)
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach())) and result.metrics.images == IMAGES
    check_weights(state, reference)


@pytest.mark.parametrize(("limit", "clipped"), [(0.01, True), (1e6, False)])
def test_gradients_are_scaled_to_the_norm_where_theirs_is_larger(limit: float, clipped: bool) -> None:
    recipe = Recipe(optim=SGD.model_copy(update={"clip_norm": limit}))
    state, (reference, _) = state_of(recipe), plain()
    step(state, recipe)
    norm = float(nn.utils.clip_grad_norm_(reference.parameters(), limit))
    assert (norm > limit) == clipped
    check_weights(state, reference, 1e-5 * limit + 1e-7)


def test_the_ema_model_follows_the_weights_and_is_evaluated_with_the_network_s_statistics() -> None:
    recipe = Recipe(optim=SGD, ema_decay=0.75)
    state = state_of(recipe)
    expected = [p.detach().clone() for p in state.network.parameters()]
    for _ in range(3):
        step(state, recipe)
        expected = [0.75 * e + 0.25 * p.detach() for e, p in zip(expected, state.network.parameters(), strict=True)]
    trained = [p.detach().clone() for p in state.network.parameters()]
    with state.averaged() as model:
        assert all(torch.allclose(e, p, atol=1e-6) for e, p in zip(expected, model.parameters(), strict=True))
        assert model.norm.running_mean.any()
    assert all(torch.equal(e, p) for e, p in zip(trained, state.network.parameters(), strict=True))


@pytest.mark.parametrize("on_nan", ["skip", "stop"])
def test_a_step_with_nan_or_inf_changes_no_weights_and_no_metrics(on_nan: str) -> None:
    recipe = Recipe(optim=SGD, ema_decay=0.5, on_nan=on_nan)
    all_reduce = Bf16AllReduceHook(residuals={0: torch.full((3,), torch.nan)})
    state = state_of(recipe, all_reduce)
    before = {name: value.clone() for name, value in state.network.state_dict().items()}
    state.network.shift = torch.inf
    result = step(state, recipe)
    assert not result.finite and result.non_finite == "first NaN or Inf in the output of fc"
    after = state.network.state_dict()
    kept = before.keys() if on_nan == "skip" else [name for name in before if name.startswith("fc")]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert result.metrics == EpochMetrics() and all_reduce.residuals == {}
    assert all(p.grad is None for p in state.network.parameters())


def test_an_infinite_loss_makes_the_gradients_of_all_ranks_nan() -> None:
    """Cross-entropy's gradients can be finite where its sum over a batch is not: other ranks need to learn of it."""
    recipe = Recipe(optim=SGD)
    state = state_of(recipe)
    with torch.no_grad():
        state.network.fc.bias[0] = 3e38  # images of other classes lose that much each
    result = step(state, recipe)
    assert result.loss == torch.inf and not result.finite
    assert result.non_finite == "the outputs of all layers are finite"


def test_float64_is_float64_throughout() -> None:
    recipe = Recipe(optim=SGD, precision="float64")
    state = state_of(recipe)
    step(state, recipe)
    assert {p.dtype for p in state.network.parameters()} == {torch.float64}


def test_bf16_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    recipe = Recipe(optim=SGD, precision="bf16")
    state, (_, loss) = state_of(recipe), plain()
    result = step(state, recipe)
    assert {p.dtype for p in state.network.parameters()} == {torch.float32}
    assert result.loss == pytest.approx(float(loss), rel=0.02) and result.loss != pytest.approx(float(loss), rel=1e-6)
    with autocast("bf16"):
        assert state.network(normalized(batch().images)).dtype == torch.bfloat16
    with autocast("float32"):
        assert state.network(normalized(batch().images)).dtype == torch.float32


@pytest.mark.slow
def test_the_self_test_times_a_real_convolution() -> None:
    assert all(0.001 < ratio < 1000 for ratio in bf16_speedups())


PHASES = (
    PhaseSection(from_epoch=0, crop=128),
    PhaseSection(from_epoch=2, crop=160, weight_decay=0.0),
    PhaseSection(from_epoch=3, train_crop="random", restart_rate=0.25, restart_power=2),
)


def test_each_value_is_that_of_the_last_phase_that_has_it() -> None:
    recipe = Recipe(
        epochs=4, phases=PHASES, data=DataSection(crop=224), schedule=ScheduleSection(warmup_epochs=0), optim=SGD
    )
    assert [recipe.at_epoch(epoch) for epoch in range(4)] == [
        EpochSettings(crop=128, train_crop="random_resized", weight_decay=0.0),
        EpochSettings(crop=128, train_crop="random_resized", weight_decay=0.0),
        EpochSettings(crop=160, train_crop="random_resized", weight_decay=0.0),
        EpochSettings(crop=160, train_crop="random", weight_decay=0.0),
    ]
    assert Recipe().at_epoch(50) == EpochSettings(crop=224, train_crop="random_resized", weight_decay=5e-5)


def test_a_phase_may_begin_the_rate_anew() -> None:
    recipe = Recipe(epochs=4, phases=PHASES, schedule=ScheduleSection(warmup_epochs=0))
    schedule = [lr_at(step, schedule_of(recipe.schedule, recipe.phases, NUMBERS)) for step in range(41)]
    assert schedule[:30] == [lr_at(step, schedule_of(recipe.schedule, (), NUMBERS)) for step in range(30)]
    assert schedule[30:] == pytest.approx([0.25 * ((40 - step) / 10) ** 2 for step in range(30, 41)])


@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_weights_have_the_strides_of_their_gradients(kernel: int) -> None:
    """DDP copies other gradients into its buckets."""
    layer = nn.Conv2d(8, 4, kernel, stride=2)  # a stride, so that oneDNN computes it
    prepare_model(nn.Sequential(layer), EAGER, "float32")
    outputs = layer(torch.ones(2, 8, 5, 5).to(memory_format=torch.channels_last))
    (gradient,) = torch.autograd.grad(outputs.sum(), layer.weight)
    assert layer.weight.stride() == gradient.stride()
