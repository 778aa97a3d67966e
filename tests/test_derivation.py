import pytest
from hypothesis import given
from hypothesis import strategies as st

from affinity.errors import InputError
from cputrain.derivation import Numbers, derive, explain
from cputrain.optim.schedules import rate_at
from cputrain.recipe import load_recipe
from cputrain.schema import BatchSection, DataSection, Recipe, ScheduleSection


def test_the_256_node_numbers() -> None:
    recipe = load_recipe("resnet50-skx-256node")
    numbers = derive(recipe, ppn=2, nodes=256, images=1_281_167)
    assert (numbers.global_batch, numbers.steps_per_epoch) == (24_576, 52)
    assert (numbers.warmup_steps, numbers.total_steps) == (260, 4_680)
    assert numbers.peak_rate == pytest.approx(4.8)
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

    schedule = ScheduleSection(start_rate=start)
    numbers = Numbers(
        global_batch=1, images=1, used=1, steps_per_epoch=1, warmup_steps=warmup, total_steps=total, peak_rate=peak
    )

    def rate(step: int) -> float:
        return rate_at(step, schedule, numbers)

    assert rate(0) == (start if warmup else peak)
    assert rate(warmup) == peak
    assert rate(total) == rate(total + 1) == 0
    step = data.draw(st.integers(1, total - 1)) if total > 1 else 0
    if step and step != warmup:
        assert rate(step + 1) - rate(step) == pytest.approx(rate(step) - rate(step - 1), abs=1e-9)
    assert 0 <= rate(step) <= max(start, peak) * (1 + 1e-12)


def test_the_256_node_schedule() -> None:
    recipe = load_recipe("resnet50-skx-256node")
    numbers = derive(recipe, ppn=2, nodes=256, images=1_281_167)
    assert rate_at(130, recipe.schedule, numbers) == pytest.approx(2.45)
    assert rate_at(2_470, recipe.schedule, numbers) == pytest.approx(2.4)


def numbers_of(**how: object) -> Numbers:
    known = {"global_batch": 1, "images": 1, "used": 1, "steps_per_epoch": 100, "warmup_steps": 400}
    return Numbers(**{**known, "total_steps": 4000, "peak_rate": 32.0, **how})


def test_every_way_down_against_its_source() -> None:
    """Rates worked out by hand from the published formulas."""
    caffe = ScheduleSection(name="poly_of_all", start_rate=1.0)  # AlexNet-BN at 32K: 32 (1 - step / 4000)^2
    expected = {0: 1.0, 200: 16.5, 400: 32 * 0.9**2, 2000: 8.0, 3999: 32 * (1 / 4000) ** 2, 4000: 0.0}
    assert {step: rate_at(step, caffe, numbers_of()) for step in expected} == pytest.approx(expected)
    mlperf = ScheduleSection(name="poly", end_rate=1e-4)
    expected = {400: 32.0, 2200: 1e-4 + (32 - 1e-4) / 4, 4000: 1e-4, 9000: 1e-4}
    assert {step: rate_at(step, mlperf, numbers_of()) for step in expected} == pytest.approx(expected)
    goyal = ScheduleSection(name="steps", milestones=(30.0, 60.0, 80.0))
    expected = {2999: 32.0, 3000: 3.2, 5999: 3.2, 6000: 0.32, 8000: 0.032}
    found = {step: rate_at(step, goyal, numbers_of(total_steps=9000)) for step in expected}
    assert found == pytest.approx(expected)
    cosine = ScheduleSection(name="cosine")
    expected = {400: 32.0, 1300: 16 * (1 + 2**-0.5), 2200: 16.0, 4000: 0.0}
    assert {step: rate_at(step, cosine, numbers_of()) for step in expected} == pytest.approx(expected)
    constant = ScheduleSection(name="constant")
    assert rate_at(3999, constant, numbers_of()) == rate_at(10**6, constant, numbers_of()) == 32.0


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("name=linear", "0 -> 0.0125 -> 0 linear over steps 0-10, then linear to 0 at step 20"),
        ("name=poly", "then to 0 at step 20 by the power of 2"),
        ("name=poly_of_all", "by the power of 2 of what is left of all steps"),
        ("name=steps", "0 -> 0.0125 linear over steps 0-10, then times 0.1 after epochs 30, 60, 80"),
        ("name=cosine", "then half a cosine to 0 at step 20"),
        ("name=constant", "then constant"),
        ("rate_factor=0.5", "linear scaling: 0.1 x 32 / 256 = 0.0125, halved to 0.00625 in the recipe"),
    ],
)
def test_schedules_are_explained(how: str, told: str) -> None:
    settings = ["epochs=10", "schedule.start_rate=0", "schedule.warmup_epochs=5", f"schedule.{how}"]
    recipe = load_recipe("imagefolder", settings)
    numbers = derive(recipe, ppn=2, nodes=1, images=64)
    assert told in "\n".join(f"{r.value} {r.why}" for r in explain(recipe, numbers, ppn=2, nodes=1))


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
