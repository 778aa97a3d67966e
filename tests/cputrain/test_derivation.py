import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.data.order import rank_share
from cputrain.recipe.derivation import derive, explain, rate_warning, schedule_of
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import BatchSection, DataSection, Recipe
from cputrain.schedule import lr_at


def test_the_sizes_of_the_256_node_run() -> None:
    recipe = load_recipe("resnet50-skx-256node")
    sizes = derive(recipe, ppn=2, nodes=256, images=1_281_167)
    assert (sizes.global_batch, sizes.steps_per_epoch) == (24_576, 52)
    assert (sizes.warmup_steps, sizes.total_steps) == (260, 4_680)
    assert sizes.peak_rate == pytest.approx(4.8)
    text = "\n".join(f"{r.value}: {r.why}" for r in explain(recipe, sizes, ppn=2, nodes=256))
    for shown in (
        "96 x 256 = 24,576",
        "1,280,000 / 24,576 = 52.08",
        "260",
        "4,680",
        "0.1 x 24,576 / 256 = 9.6, x 0.5 = 4.8 (schedule.auto_rate_factor=0.5)",
    ):
        assert shown in text


def peak(*settings: str, ppn: int = 2, nodes: int = 1) -> tuple[float, str]:
    """The peak rate of imagefolder with settings, and why."""
    recipe = load_recipe("imagefolder", settings)
    sizes = derive(recipe, ppn=ppn, nodes=nodes, images=100_000)
    why = next(r.why for r in explain(recipe, sizes, ppn=ppn, nodes=nodes) if r.what == "peak rate")
    return sizes.peak_rate, why


@pytest.mark.parametrize(
    ("settings", "rate", "expected"),
    [
        ((), 0.1 / 8, "linear scaling (Goyal et al. 2017, 2.1): 0.1 x 32 / 256"),
        (("optim.name=sgd",), 0.1 / 8, "linear scaling (Goyal et al. 2017, 2.1): 0.1 x 32 / 256"),
        (("optim.name=adam",), 1e-3 / 8**0.5, "square-root scaling (Malladi et al. 2022): 0.001 x sqrt(32 / 256)"),
        (("optim.name=adamw",), 1e-3 / 8**0.5, "square-root scaling"),
        (("optim.name=rmsprop", "optim.momentum=0"), 1e-3 / 8**0.5, "0.001 x sqrt(32 / 256)"),
        (("optim.name=rmsprop",), 1e-4 / 8**0.5, "0.001 x (1 - 0.9) x sqrt(32 / 256)"),
        (("optim.name=lamb",), 0.04 / 32, "square-root scaling (You et al. 2020): 0.04 x sqrt(32 / 32768)"),
        (
            ("optim.name=adam", "schedule.auto_rate_factor=3"),
            3e-3 / 8**0.5,
            "= 0.0003536, x 3 = 0.00106066 (schedule.auto_rate_factor=3)",
        ),
        (("optim.scale_rate_by=none",), 0.1, "0.1, not scaled (optim.scale_rate_by=none)"),
        (
            ("optim.scale_rate_by=workers",),
            0.1 / 8,
            "linear scaling (Goyal et al. 2017, 2.1): 0.1 x 16 / 256 x 2 workers",
        ),
        (("optim.name=adam", "optim.scale_rate_by=workers"), 2e-3 / 16**0.5, "0.001 x sqrt(16 / 256) x 2 workers"),
        (("optim.name=lars", "schedule.peak_rate=3"), 3.0, "set in the recipe"),
        (
            ("schedule.peak_rate=3", "schedule.reference_batch=64"),
            3.0,
            "set in the recipe for a global batch of 64",
        ),
        (
            ("optim.name=adam", "schedule.peak_rate=0.1", "optim.scale_rate_by=workers"),
            0.2,
            "0.1 x 2 workers (optim.scale_rate_by=workers)",
        ),
        (
            ("schedule.peak_rate=3", "schedule.reference_batch=64", "optim.scale_rate_by=batch"),
            1.5,
            "linear scaling (Goyal et al. 2017, 2.1): 3 x 32 / 64",
        ),
        (
            (
                "optim.name=adam",
                "schedule.peak_rate=3",
                "schedule.reference_batch=128",
                "optim.scale_rate_by=batch",
            ),
            1.5,
            "square-root scaling (Malladi et al. 2022): 3 x sqrt(32 / 128)",
        ),
    ],
)
def test_each_optimizer_has_its_own_scaling_rule_which_the_explanation_names(
    settings: tuple[str, ...], rate: float, expected: str
) -> None:
    found, why = peak(*settings)
    assert found == pytest.approx(rate) and expected in why
    assert ("linear" in why) == ("linear" in expected)


def test_untuned_lamb_is_the_paper_s_table() -> None:
    """4 / (2 ^ x 100) for ResNet-50: x is 3.0 at 512, 1.5 at 4,096, 0 at 32,768."""
    for batch, x in ((512, 3.0), (4096, 1.5), (32_768, 0.0)):
        assert peak("optim.name=lamb", f"batch.global={batch}")[0] == pytest.approx(4 / (2**x * 100))


@pytest.mark.parametrize("name", ["lars", "adagrad", "adadelta", "adagrad_da"])
def test_an_optimizer_without_a_scaling_rule_needs_a_numeric_rate(name: str) -> None:
    with pytest.raises(InputError, match=f"optim.name={name} has none, unlike sgd, .*: set schedule.peak_rate to"):
        peak(f"optim.name={name}")
    with pytest.raises(InputError, match=r"optim\.scale_rate_by=batch needs a scaling rule"):
        peak(f"optim.name={name}", "schedule.peak_rate=1", "optim.scale_rate_by=batch")


def test_a_rate_cannot_be_scaled_from_an_unknown_batch() -> None:
    with pytest.raises(InputError, match=r"global batch that schedule\.peak_rate=3 was tuned for: set schedule"):
        peak("schedule.peak_rate=3", "optim.scale_rate_by=batch")


def test_a_rate_tuned_for_another_batch_gives_a_warning() -> None:
    recipe = load_recipe("resnet50-mlperf-32768")
    assert rate_warning(recipe.schedule, recipe.optim, global_batch=32_768) == ""
    assert rate_warning(recipe.schedule, recipe.optim, global_batch=4096) == (
        "schedule.peak_rate=21.2 was tuned for a global batch of 32,768 images, but this job's is 4,096: set "
        "batch.global=32768, or tune schedule.peak_rate for 4,096"
    )
    momentum = load_recipe("caltech256-finetune")
    warning = rate_warning(momentum.schedule, momentum.optim, global_batch=4096)
    assert warning.endswith("batch.global=64, or optim.scale_rate_by=batch")
    scaled, automatic = load_recipe("caltech256-finetune", ["optim.scale_rate_by=batch"]), load_recipe("imagefolder")
    assert rate_warning(scaled.schedule, scaled.optim, global_batch=4096) == ""
    assert rate_warning(automatic.schedule, automatic.optim, global_batch=4096) == ""


@given(batch=st.integers(1, 500), local=st.integers(1, 40), workers=st.integers(1, 60), spare=st.integers(0, 900))
def test_a_fixed_global_batch_is_divided_into_accumulation_steps_of_at_most_the_local_batch(
    batch: int, local: int, workers: int, spare: int
) -> None:
    recipe = Recipe(batch=BatchSection.model_validate({"global": batch, "local": local}))
    images = batch + spare
    if images < workers:
        return
    try:
        sizes = derive(recipe, ppn=workers, nodes=1, images=images)
    except InputError:
        assert batch < workers or (local == 1 and batch % workers)
        return
    assert sizes.global_batch == batch and sizes.used_images_per_epoch % batch == 0
    order = np.arange(sizes.used_images_per_epoch)
    shares = [rank_share(order, 0, sizes.steps_per_epoch, (local,) * workers, rank) for rank in range(workers)]
    assert np.array_equal(np.concatenate(shares), order[:batch])
    passes = [len(part) for share in shares for part in np.array_split(share, sizes.accumulation_steps)]
    assert min(passes) >= 1 and max(passes) <= local
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    if sizes.accumulation_steps > 1:
        assert max(lengths) > (sizes.accumulation_steps - 1) * local, "no more accumulation steps than needed"


@pytest.mark.parametrize(
    ("settings", "ppn", "value", "why"),
    [
        (
            ("batch.global=64",),
            2,
            "64",
            "32 images on each of 2 workers, in 2 accumulation steps of at most 16 images (batch.local=16)",
        ),
        (
            ("batch.global=64",),
            3,
            "64",
            "21 or 22 images on each of 3 workers, in 2 accumulation steps of at most 11 images (b",
        ),
        (("batch.global=64",), 8, "64", "8 images on each of 8 workers, in 1 backward pass (batch.local=16)"),
        ((), 2, "32 x 1 = 32", "16 images x 2 workers per host, 1 host"),
    ],
)
def test_the_global_batch_is_explained(settings: tuple[str, ...], ppn: int, value: str, why: str) -> None:
    recipe = load_recipe("imagefolder", settings)
    reason = explain(recipe, derive(recipe, ppn=ppn, nodes=1, images=640), ppn=ppn, nodes=1)[0]
    assert reason.value == value and why in reason.why


@pytest.mark.parametrize(
    ("settings", "images", "expected"),
    [
        (
            ["batch.local=16"],
            20,
            "batch.local=16 on 2 workers needs 32 images per step, but an epoch has 20: set batch.local to 10 or less",
        ),
        ([], 1, "2 workers need at least 2 images, but train/ has 1: set plan.ppn to 1 or less"),
        (["batch.global=1"], 40, "batch.global=1 leaves some of 2 workers without an image: set batch.global to 2 or"),
        (
            ["batch.global=41"],
            40,
            "batch.global=41 is more than the 40 images of an epoch: set batch.global to 40 or less",
        ),
        (["batch.global=5", "batch.local=1"], 40, "batch.global=5 does not divide .* set batch.local to 2 or more"),
        (
            ["data.images_per_epoch=50"],
            40,
            "images_per_epoch=50 is more than the 40 images in train/: lower it, or remove it",
        ),
    ],
)
def test_too_few_images_are_refused(settings: list[str], images: int, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        derive(load_recipe("imagefolder", settings), ppn=2, nodes=1, images=images)


@pytest.mark.parametrize(("nodes", "advice"), [(4, "set plan.ppn to 2 or less"), (16, "use 10 hosts or fewer")])
def test_too_few_images_for_many_hosts_are_refused(nodes: int, advice: str) -> None:
    with pytest.raises(InputError, match=f"train/ has 10: {advice}"):
        derive(load_recipe("imagefolder", []), ppn=4, nodes=nodes, images=10)


def test_the_256_node_schedule() -> None:
    recipe = load_recipe("resnet50-skx-256node")
    sizes = derive(recipe, ppn=2, nodes=256, images=1_281_167)
    assert lr_at(130, schedule_of(recipe.schedule, recipe.phases, sizes)) == pytest.approx(2.45)
    assert lr_at(2_470, schedule_of(recipe.schedule, recipe.phases, sizes)) == pytest.approx(2.4)


def test_a_recipe_s_schedule_is_in_steps() -> None:
    recipe = load_recipe(
        "imagefolder", ["schedule.name=steps", "schedule.milestones=[1.5,3]", "schedule.warmup_epochs=1", "epochs=4"]
    )
    sizes = derive(recipe, ppn=1, nodes=1, images=100 * recipe.batch.local)
    schedule = schedule_of(recipe.schedule, recipe.phases, sizes)
    assert schedule.milestones == (150, 300) and schedule.total_steps == 400
    assert schedule.peak_lr == sizes.peak_rate and schedule.warmup_steps == sizes.warmup_steps
    assert [lr_at(step, schedule) / sizes.peak_rate for step in (100, 150, 300)] == pytest.approx([1, 0.1, 0.01])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("name=linear", "0 -> 0.0125 -> 0 linear warm-up in steps 0-10, then linear decay to 0 at step 20"),
        ("name=poly", "then polynomial decay (power 2) to 0 at step 20"),
        ("name=poly_from_start", "then polynomial decay (power 2, counted from step 0) to 0 at step 20"),
        ("name=steps", "0 -> 0.0125 linear warm-up in steps 0-10, then multiplied by 0.1 after epochs 30, 60, 80"),
        ("name=cosine", "then cosine decay to 0 at step 20"),
        ("name=constant", "then constant"),
        (
            "auto_rate_factor=0.5",
            "2017, 2.1): 0.1 x 32 / 256 = 0.0125, x 0.5 = 0.00625 (schedule.auto_rate_factor=0.5)",
        ),
    ],
)
def test_schedules_are_explained(how: str, expected: str) -> None:
    settings = ["epochs=10", "schedule.start_rate=0", "schedule.warmup_epochs=5", f"schedule.{how}"]
    recipe = load_recipe("imagefolder", settings)
    sizes = derive(recipe, ppn=2, nodes=1, images=64)
    assert expected in "\n".join(f"{r.value} {r.why}" for r in explain(recipe, sizes, ppn=2, nodes=1))


def test_a_partial_last_batch_is_dropped_or_spread() -> None:
    recipe = Recipe(data=DataSection(last_batch="spread"), batch=BatchSection(local=8), epochs=6)
    sizes = derive(recipe, ppn=2, nodes=1, images=100)
    assert (sizes.steps_per_epoch, sizes.used_images_per_epoch, sizes.total_steps) == (7, 100, 42)
    each = [sizes.images_until(step + 1) - sizes.images_until(step) for step in range(14)]
    assert sum(each) == 200 and set(each) == {14, 15}
    reason = explain(recipe, sizes, ppn=2, nodes=1)[1]
    assert (
        reason.value == "100 / 16 = 6.25 -> 7"
        and reason.why == "images / global batch, spread over one step more: 14 per step"
    )
    dropped = derive(recipe.model_copy(update={"data": DataSection()}), ppn=2, nodes=1, images=100)
    assert (dropped.steps_per_epoch, dropped.used_images_per_epoch, dropped.images_until(7)) == (6, 96, 112)
    whole = derive(recipe, ppn=2, nodes=1, images=96)
    assert (whole.steps_per_epoch, whole.used_images_per_epoch) == (6, 96)
    with pytest.raises(
        InputError, match="leaves 5 images per step, too few for 8 workers with 1 accumulation step: set"
    ):
        derive(recipe.model_copy(update={"batch": BatchSection(local=1)}), ppn=8, nodes=1, images=10)
