import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinity.errors import InputError
from cputrain.derivation import derive, explain
from cputrain.optim.schedules import warmup_linear
from cputrain.recipe import BatchSection, DataSection, Recipe, load_recipe


def test_the_256_node_numbers() -> None:
    recipe = load_recipe("resnet50-skx-256node")
    numbers = derive(recipe, ppn=2, nodes=256, images=1_281_167)
    assert (numbers.global_batch, numbers.steps_per_epoch) == (24_576, 52)
    assert (numbers.warmup_steps, numbers.total_steps, numbers.peak_rate) == (260, 4_680, 4.8)
    text = "\n".join(f"{r.value}: {r.why}" for r in explain(recipe, numbers, ppn=2, nodes=256))
    for shown in (
        "96 x 256 = 24,576",
        "1,280,000 / 24,576 = 52.08",
        "260",
        "4,680",
        "0.1 x 24,576 / 256 = 9.6, halved to 4.8",
    ):
        assert shown in text


def test_the_auto_rate_is_linear_scaling() -> None:
    numbers = derive(load_recipe("imagefolder"), ppn=2, nodes=1, images=400)
    assert numbers.peak_rate == pytest.approx(0.1 * 32 / 256)


@pytest.mark.parametrize(
    ("settings", "images", "told"),
    [
        (
            ["batch.local=16"],
            20,
            "batch.local=16 on 2 worker.s. needs 32 images a step; an epoch has 20: .* 10 or fewer",
        ),
        ([], 1, "2 workers need 2 images; train/ holds 1"),
        (["data.images_per_epoch=50"], 40, "images_per_epoch=50 but train/ holds 40"),
    ],
)
def test_too_few_images_are_refused(settings: list[str], images: int, told: str) -> None:
    with pytest.raises(InputError, match=told):
        derive(load_recipe("imagefolder", settings), ppn=2, nodes=1, images=images)


@given(
    warmup=st.integers(0, 300),
    rest=st.integers(1, 5_000),
    start=st.floats(0, 1),
    peak=st.floats(0, 50),
    data=st.data(),
)
def test_the_schedule_is_two_straight_lines(
    warmup: int, rest: int, start: float, peak: float, data: st.DataObject
) -> None:
    total = warmup + rest

    def rate(step: int) -> float:
        return warmup_linear(step, start_rate=start, peak_rate=peak, warmup_steps=warmup, total_steps=total)

    assert rate(0) == (start if warmup else peak)
    assert rate(warmup) == peak
    assert rate(total) == rate(total + 1) == 0
    step = data.draw(st.integers(1, total - 1)) if total > 1 else 0
    if step and step != warmup:
        assert rate(step + 1) - rate(step) == pytest.approx(rate(step) - rate(step - 1), abs=1e-9)
    assert 0 <= rate(step) <= max(start, peak) * (1 + 1e-12)


def test_the_256_node_schedule() -> None:
    kwargs = {"start_rate": 0.1, "peak_rate": 4.8, "warmup_steps": 260, "total_steps": 4_680}
    assert warmup_linear(130, **kwargs) == pytest.approx(2.45)
    assert warmup_linear(2_470, **kwargs) == pytest.approx(2.4)


def test_a_remainder_is_dropped_or_spread() -> None:
    recipe = Recipe(data=DataSection(remainder="spread"), batch=BatchSection(local=8), epochs=6)
    numbers = derive(recipe, ppn=2, nodes=1, images=100)
    assert (numbers.steps_per_epoch, numbers.used, numbers.total_steps) == (7, 100, 42)
    each = [numbers.images_until(step + 1) - numbers.images_until(step) for step in range(14)]
    assert sum(each) == 200 and set(each) == {14, 15}
    told = explain(recipe, numbers, ppn=2, nodes=1)[1]
    assert told.value == "100 / 16 = 6.25 -> 7" and told.why == "images / global batch, all of them: 14 a step"
    dropped = derive(recipe.model_copy(update={"data": DataSection()}), ppn=2, nodes=1, images=100)
    assert (dropped.steps_per_epoch, dropped.used, dropped.images_until(7)) == (6, 96, 112)
    whole = derive(recipe, ppn=2, nodes=1, images=96)
    assert (whole.steps_per_epoch, whole.used) == (6, 96)
    with pytest.raises(InputError, match="leaves a step 5 images, too few for 8 worker"):
        derive(recipe.model_copy(update={"batch": BatchSection(local=1)}), ppn=8, nodes=1, images=10)
