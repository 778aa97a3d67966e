import re
from pathlib import Path

import pytest

from affinity.errors import InputError
from cputrain.cli.derived import aligned
from cputrain.derivation import derive, explain
from cputrain.recipe import dump_recipe, find_recipe, load_recipe, recipe_names
from cputrain.schema import Recipe, SweepSection
from cputrain.sweep import variants


def refusal(tmp_path: Path, text: str, *settings: str) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_recipe(str(path), settings)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(path), "r.yaml")


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load_and_round_trip(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe


HEAD = re.compile(r"# On ([\d,]+) host\(s\) with (\d+) worker\(s\) each, ([\d,]+) (?:images|points):\n((?:#  .*\n)+)")


@pytest.mark.parametrize("name", recipe_names())
def test_the_arithmetic_in_a_recipe_s_comments_is_its_derivation(name: str) -> None:
    told = HEAD.search(find_recipe(name).read_text())
    assert told, "every shipped recipe derives its numbers for hosts that it names"
    nodes, ppn, images = (int(number.replace(",", "")) for number in told.groups()[:3])
    recipe = load_recipe(name)
    assert recipe.plan.ppn in ("auto", ppn) and recipe.data.train_images in (None, images)
    reasons = explain(recipe, derive(recipe, ppn=ppn, nodes=nodes, images=images), ppn=ppn, nodes=nodes)
    assert told[4].splitlines() == [f"#{line}" for line in aligned(reasons).splitlines()]


@pytest.mark.parametrize("name", [name for name in recipe_names() if load_recipe(name).sweep != SweepSection()])
def test_all_trainings_of_a_recipe_s_sweep_are_recipes(name: str) -> None:
    made = variants(load_recipe(name).sweep, (), ())
    assert len({dump_recipe(load_recipe(name, variant.arguments)) for variant in made}) == len(made) > 2


def test_every_field_has_its_manual() -> None:
    def fields(section):
        for name, field in section.model_fields.items():
            nested = getattr(field.annotation, "model_fields", None)
            if nested is None:
                yield name, field
            else:
                yield from fields(field.annotation)

    assert [name for name, field in fields(Recipe) if not field.description] == []


def test_settings_win_over_the_file() -> None:
    settings = [
        "batch.local=7",
        "plan.ppn=1",
        "optim.weight_decay=1e-3",
        "data.path=a b/c",
        "evaluate.every_epochs=null",
    ]
    recipe = load_recipe("demo-digits", settings)
    assert (recipe.batch.local, recipe.plan.ppn, recipe.optim.weight_decay) == (7, 1, 1e-3)
    assert (recipe.data.path, recipe.evaluate.every_epochs) == ("a b/c", None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: x\nbatch:\n  locla: 3\n", "r.yaml:3: unknown key 'batch.locla': did you mean 'local'?"),
        ("epoch: 3\n", "r.yaml:1: unknown key 'epoch': did you mean 'epochs'?"),
        ("name: x\n\nepochs: ten\n", "r.yaml:3: epochs='ten':"),
        ("schedule: {peak_rate: -0.1}\n", "r.yaml:1: schedule.peak_rate=-0.1:"),
        ("optim: {weight_decay: .nan}\n", "weight_decay=nan"),
        ("epochs: 1.5\n", "epochs=1.5"),
        ("epochs: true\n", "epochs=True"),
        ("data: {mean: [1, 2]}\n", "r.yaml:1: data.mean"),
        ("plan: {ppn: many}\n", "plan.ppn='many'"),
        ("plan: {ppn: 0}\n", "plan.ppn=0"),
        ("model: {name: resnet51}\n", "model.name='resnet51': no such network: did you mean 'resnet50'?"),
        ("model: {name: torchvision:../x}\n", "no such network"),
        ("model: {name: alexnet, zero_gamma: last_of_block}\n", "resnet152, not alexnet"),
        ("model: {name: resnet18, stride: v1}\n", "model.stride is for resnet50, resnet101, resnet152"),
        ("model: {bn_stats: sync, bn_stats_batch: 8}\n", "model.bn_stats_batch cuts a worker's own images"),
        (
            "phases:\n- {from_epoch: 3}\n- {from_epoch: 5,\n   crp: 64}\n",
            "r.yaml:4: unknown key 'phases.1.crp'",
        ),
        (
            "phases: [{from_epoch: 5}, {from_epoch: 3}]\n",
            "phases begin at epochs [5, 3]: each after the one",
        ),
        ("epochs: 3\nschedule: {warmup_epochs: 0}\nphases: [{from_epoch: 3}]\n", "all before 3"),
        ("phases: [{crop: 64}]\n", "r.yaml:1: phases.0.from_epoch"),
        ("phases: 3\n", "r.yaml:1: phases=3"),
        ("optim: {name: sgd, momentum: 0.5}\n", "optim.momentum is for momentum or lars or rmsprop, not sgd"),
        ("model: resnet50\n", "r.yaml:1: model='resnet50'"),
        ("epochs: 3\nschedule: {warmup_epochs: 4}\n", "schedule.warmup_epochs=4 exceeds epochs=3"),
        ("optim: {trust: 0.02}\n", "optim.trust is for lars, not momentum: leave it out"),
        (
            "optim: {name: lars, family: nus, momentum_correction: true}\n",
            "momentum_correction is family caffe's alone",
        ),
        ("[1, 2]\n", "holds no keys"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, told: str) -> None:
    assert told in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("batch.locl=3", "setting 'batch.locl=3': unknown key 'batch.locl': did you mean 'local'?"),
        ("epochs=-1", "setting 'epochs=-1': epochs=-1"),
        ("epochs", "is not key=value"),
        ("epochs.x=1", "epochs is a value"),
    ],
)
def test_mistakes_in_settings_are_named(tmp_path: Path, setting: str, told: str) -> None:
    assert told in refusal(tmp_path, "epochs: 5\n", setting)


def test_an_unknown_recipe_shows_the_nearest() -> None:
    with pytest.raises(InputError, match="demo-digits"):
        load_recipe("demo-digit")
    with pytest.raises(InputError, match="is not there"):
        load_recipe("nowhere/x.yaml")


def test_an_empty_recipe_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("")
    assert load_recipe(str(tmp_path / "r.yaml")) == Recipe()
