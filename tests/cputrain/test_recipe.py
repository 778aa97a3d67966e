import re
import shlex
import time
from itertools import pairwise
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.cli.data import prepare_command as prepare
from cputrain.cli.recipes import aligned
from cputrain.data.from_settings import survey_data
from cputrain.files import recipe_names
from cputrain.recipe.derivation import derive, explain, rate_warning
from cputrain.recipe.loading import dump_recipe, find_recipe, load_recipe
from cputrain.recipe.schema import Recipe, SweepSection
from cputrain.studies.sweep.trainings import variants


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


HEAD = re.compile(r"# On ([\d,]+) hosts? with (\d+) workers? each, ([\d,]+) (?:images|points):\n((?:#  .*\n)+)")


@pytest.mark.parametrize("name", recipe_names())
def test_the_arithmetic_in_a_recipe_s_comments_is_recomputed(name: str) -> None:
    head = HEAD.search(find_recipe(name).read_text())
    assert head, "every shipped recipe shows its derivation for a number of hosts"
    nodes, ppn, images = (int(number.replace(",", "")) for number in head.groups()[:3])
    recipe = load_recipe(name)
    assert recipe.plan.ppn in ("auto", ppn) and recipe.data.train_images in (None, images)
    reasons = explain(recipe, derive(recipe, ppn=ppn, nodes=nodes, images=images), ppn=ppn, nodes=nodes)
    assert head[4].splitlines() == [f"#{line}" for line in aligned(reasons).splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipe_names() if load_recipe(name).sweep != SweepSection()])
def test_every_training_of_a_recipe_s_sweep_is_a_valid_recipe(name: str) -> None:
    made = variants(load_recipe(name).sweep, (), ())
    assert len({load_recipe(name, variant.arguments).model_dump_json() for variant in made}) == len(made) > 2


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


MISTAKES = {  # a recipe -> its line, the keys, values and numbers of the answer
    "name: x\nbatch:\n  locla: 3\n": "r.yaml:3 batch.locla batch.local",
    "epoch: 3\n": "r.yaml:1 epoch epochs",
    "name: x\n\nepochs: ten\n": "r.yaml:3 epochs number ten",
    "schedule: {peak_rate: -0.1}\n": "r.yaml:1 schedule.peak_rate 0 auto -0.1",
    "optim: {weight_decay: .nan}\n": "optim.weight_decay finite .nan",
    "epochs: 1.5\n": "epochs whole 1.5",
    "epochs: true\n": "epochs whole true",
    "epochs:\n": "epochs whole null",
    "data: {mean: [1, 2]}\n": "r.yaml:1 data.mean 3 [1, 2]",
    "data: {mean: [1, 2, 3, 4]}\n": "data.mean 3 [1, 2, 3, 4]",
    "data: {mean: [1, 2, x]}\n": "3 data.mean number x",
    "data: {flip: 1}\n": "data.flip 1 mirrored",
    "data: {path: [3]}\n": "data.path text null [3]",
    "data: {augment: 0.1}\n": "data.augment section 0.1 rotate, zoom,",
    "ema_decay: 1\n": "ema_decay less 1, null",
    "comm: {timeout_s: 0}\n": "comm.timeout_s more 0, seconds",
    "precision: fp16\n": "precision float32, bf16 float64, fp16",
    "schedule: {milestones: [30, -1]}\n": "2 schedule.milestones 0, -1",
    "sweep: {grid: {batch.local: 32}}\n": "batch.local sweep.grid list 32",
    "sweep: {runs: [[1]]}\n": "1 sweep.runs text [1]",
    "plan: {ppn: many}\n": "plan.ppn whole auto many",
    "plan: {ppn: 0}\n": "plan.ppn 1 auto 0",
    "model: {name: resnet51}\n": "model.name=resnet51 resnet50",
    "model: {name: torchvision:../x}\n": "model.name=torchvision:../x unknown",
    "model:\n  zero_gamma: last_of_block\n  name: alexnet\n": (
        "r.yaml:3 model.zero_gamma=last_of_block resnet18, resnet34, resnet50, resnet101, resnet152, alexnet "
        "model.zero_gamma=none"
    ),
    "model: {name: resnet18, resnet_version: v1}\n": (
        "model.resnet_version=v1 resnet50, resnet101, resnet152, resnet18 model.resnet_version=v1.5"
    ),
    "model: {bn_stats: sync, bn_ghost_batch: 8}\n": (
        "model.bn_ghost_batch=8 model.bn_stats=local, sync model.bn_ghost_batch=null"
    ),
    "phases:\n- {from_epoch: 3}\n- {from_epoch: 5,\n   crp: 64}\n": "r.yaml:4 phases.1.crp",
    "phases: [{from_epoch: 5}, {from_epoch: 3}]\n": "phases [5, 3] order",
    "epochs: 3\nschedule: {warmup_epochs: 0}\nphases: [{from_epoch: 3}]\n": "phase 3 epochs=3 4",
    "phases: [{crop: 64}]\n": "r.yaml:1 phases.0.from_epoch missing",
    "phases: [3]\n": "r.yaml:1 phases.0 section 3 from_epoch, crop, train_crop",
    "phases: 3\n": "r.yaml:1 phases list 3",
    "optim: {name: sgd, momentum: 0.5}\n": "r.yaml:1 optim.momentum momentum, lars rmsprop, sgd remove",
    "model: resnet50\n": "r.yaml:1 model section model.name=resnet50",
    "batch: 32\n": "r.yaml:1 batch section 32 local, accumulation, global",
    "schedule: {warmup_epochs: 4}\n\nepochs: 3\n": (
        "r.yaml:3 schedule.warmup_epochs=4 epochs=3 schedule.warmup_epochs 3 epochs 4"
    ),
    "optim: {trust_coefficient: 0.02}\n": "optim.trust_coefficient lars, momentum remove",
    "optim: {name: lars, lars_variant: nus, momentum_correction: true}\n": (
        "optim.momentum_correction optim.lars_variant=caffe, nus remove"
    ),
    "batch: {global: 64, accumulation: 2}\n": "batch.global=64 batch.accumulation=2",
    "batch: {global_: 64}\n": "batch.global_ batch.global",
    "schedule: {reference_batch: 64}\n": "schedule.reference_batch=64 schedule.peak_rate, auto remove",
    "schedule: {peak_rate: 1, auto_rate_factor: 2}\n": "schedule.auto_rate_factor=2 schedule.peak_rate=auto 1 remove",
    "data: {path: line}\nloss: mse\n": "model.name=resnet50 model.name=linear",
    "data: {path: line}\nmodel: {name: linear}\n": "loss=cross_entropy loss=mse",
    "weight_decay: 1e-4\n": "weight_decay optim.weight_decay",
    "optim: {wieght_decay: 1e-4}\n": "optim.wieght_decay optim.weight_decay",
    "every_epochs: 2\n": "every_epochs evaluate.every_epochs checkpoint.every_epochs",
    "lr: 0.1\n": "lr schedule.peak_rate",
    "drop_last: true\n": "drop_last data.last_batch",
    "comm: {bucket_cap_mb: 25}\n": "comm.bucket_cap_mb comm.bucket_mib",
    "batch_size: 64\n": "batch_size batch.local batch.global",
    "optimizer: adam\n": "optimizer optim.name",
    "optimizer: {name: adam}\n": "optimizer optim",
    "frobnicate: 1\n": "frobnicate known name, model, data",
    "[1, 2]\n": "r.yaml:1 keys key: value",
    "a: [\n": "not YAML",
    "optim: {name: adam, epsilon: 0}\n": "optim.epsilon=0 adam 1.2e-38 auto",
    "optim: {name: rmsprop, epsilon: 1.0e-39}\n": "optim.epsilon=1e-39 rmsprop 1.2e-38 auto",
    "optim: {name: lars, momentum: 0, nesterov: true}\n": "optim.nesterov needs momentum optim.momentum is 0",
}
AS_THEY_READ = 4  # every so many are golden: the style of all


def names(message: str) -> set[str]:
    """The words of a message without punctuation around them."""
    return {word.strip(",:;'`()[]?") for word in message.split()}


@pytest.mark.parametrize(("text", "expected"), MISTAKES.items())
def test_mistakes_are_reported_with_their_place_in_plain_words(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(tmp_path, text)
    assert names(expected) <= names(message.replace(f"{tmp_path}/", "")), message
    foreign = ("Input should", "Value error", "valid dictionary", "instance of", "Extra inputs", "{'", "tuple")
    assert not [words for words in foreign if words in message]


def test_some_messages_as_they_read(tmp_path: Path, golden) -> None:
    messages = [refusal(tmp_path, text).replace(f"{tmp_path}/", "") for text in [*MISTAKES][::AS_THEY_READ]]
    golden("recipe-mistakes.txt", "\n".join(messages))


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbfname: own\n")
    assert load_recipe(str(tmp_path / "r.yaml")).name == "own"


def test_a_recipe_in_another_encoding_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes("name: café\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"r\.yaml is not UTF-8 \(.*\): save it as UTF-8 text"):
        load_recipe(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("batch.locl=3", "setting 'batch.locl=3': unknown key 'batch.locl': did you mean 'batch.local'?"),
        ("epochs=-1", "setting 'epochs=-1': epochs must be 1 or more, not -1"),
        ("phases=[3]", "setting 'phases=[3]': phases.0 is a section"),
        ("epochs=4", "setting 'epochs=4': schedule.warmup_epochs=5 is longer than epochs=4"),
        ("epochs", "is not key=value"),
        ("epochs.x=1", "epochs is a value"),
    ],
)
def test_mistakes_in_settings_are_reported(tmp_path: Path, setting: str, expected: str) -> None:
    assert expected in refusal(tmp_path, "epochs: 5\n", setting)


def test_on_and_off_are_words_as_in_yaml_1_2(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("plan: {smt: on}\ndata: {flip: false}\n")
    recipe = load_recipe(str(tmp_path / "r.yaml"))
    assert (recipe.plan.smt, recipe.data.flip) == ("on", False)
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe
    assert load_recipe("imagefolder", ["plan.smt=off"]).plan.smt == "off"


@pytest.mark.parametrize(
    "text",
    ["0123", "2026-02-30", "2026-11-22", "1:30", "yes", "null", "12e3", "0x10", "a: b", "[a", "*x", "5", "#1", "-"],
)
def test_settings_are_text_where_the_schema_wants_text(tmp_path: Path, text: str) -> None:
    for setting in (f"output={text}", f"output='{text}'", f'output="{text}"', f"name={text}"):
        recipe = load_recipe("imagefolder", ["data.path=x", setting])
        assert (recipe.output if setting.startswith("output") else recipe.name) == text
        (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(str(tmp_path / "again.yaml")) == recipe
    (tmp_path / "r.yaml").write_text("data: {path: 0123, resize: 0123}\noutput: 2026-02-30\n")
    recipe = load_recipe(str(tmp_path / "r.yaml"), ["batch.local=010", "optim.weight_decay=5e-5", "model.weights=null"])
    assert (recipe.data.path, recipe.output) == ("0123", "2026-02-30")
    assert (recipe.data.resize, recipe.batch.local, recipe.model.weights) == (123, 10, None), (
        "YAML 1.2 has no octal 0123"
    )


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOMB, "in line 2, *a is an alias; write out its value"),
        ("phases: &a [*a]\n", "in line 1, *a is an alias"),
        (
            "epochs: !!python/object/apply:os.system [ls]\n",
            "in line 1, tag:yaml.org,2002:python/object/apply:os.system is a tag",
        ),
        ("epochs: !!int 5\n", "in line 1, tag:yaml.org,2002:int is a tag; remove it"),
        ("phases: " + "[" * 50_000, "in line 1, more than 16 levels of nesting"),
        ("? " * 5000, "levels of nesting"),
        ("epochs: 5\n" * 2, "in line 2, the key 'epochs' occurs twice, remove one"),
        ("[a, b]: 5\n", "in line 1, a key is a list or a section"),
        ("# " + "x" * 50_000_000, "recipe r.yaml has more than 100,000 bytes: give a recipe file"),
        ("seed: 12345678901234567890123\n", "in line 1, 12345678901234567890123... has more than 18 digits"),
        ("epochs: 99999999999\n", "r.yaml:1: epochs must be 10000000000 or less, not 99999999999"),
        ("optim: {clip_norm: .inf}\n", "optim.clip_norm must be a finite number, or null, not .inf"),
        ("name: \x00\n", "is not YAML: unacceptable character #x0000"),
    ],
)
def test_a_recipe_is_bounded_in_all_ways(tmp_path: Path, text: str, expected: str) -> None:
    started = time.process_time()
    message = refusal(tmp_path, text)
    assert expected in message and len(message) < 400 + len(str(tmp_path)), message
    assert time.process_time() - started < 2, "seconds of computing"


def test_contradicting_values_are_reported_at_the_setting_that_contradicts() -> None:
    for settings, expected in (
        (("data.path=x", "epochs=4"), "setting 'epochs=4': schedule.warmup_epochs=5 is longer than epochs=4"),
        (
            ("data.path=x", "model.zero_gamma=last_of_block", "model.name=torchvision:mobilenet_v2"),
            "setting 'model.name=torchvision:mobilenet_v2': model.zero_gamma=last_of_block is an option of resnet18, ",
        ),
        (("data.path=x", "optim.rho=0.5"), "setting 'optim.rho=0.5': optim.rho is an option of adadelta"),
    ):
        with pytest.raises(InputError) as error:
            load_recipe("imagefolder", settings)
        assert str(error.value).startswith(expected)


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:vit_b_16", "torchvision:resnet50", "alexnet", "lenet"])
def test_imagefolder_takes_any_network(name: str) -> None:
    assert load_recipe("imagefolder", ("data.path=x", f"model.name={name}")).model.name == name


def test_a_setting_that_replaces_a_value_drops_the_keys_that_depend_on_it() -> None:
    file = load_recipe("resnet50-mlperf-32768")
    assert (file.schedule.peak_rate, file.schedule.reference_batch) == (21.2, 32_768)
    other = load_recipe("resnet50-mlperf-32768", ["schedule.peak_rate=10.5"])
    assert (other.schedule.peak_rate, other.schedule.reference_batch) == (10.5, None)
    both = load_recipe("resnet50-mlperf-32768", ["schedule.peak_rate=10.5", "schedule.reference_batch=3264"])
    assert both.schedule.reference_batch == 3264
    assert load_recipe("resnet50-skx-256node", ["schedule.peak_rate=3.0"]).schedule.auto_rate_factor == 1
    assert load_recipe("resnet50-small", ["batch.global=256"]).batch.accumulation == 1


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_names_the_global_batch_of_its_numeric_rate(name: str) -> None:
    recipe = load_recipe(name)
    head = HEAD.search(find_recipe(name).read_text())
    assert head
    nodes, ppn, images = (int(number.replace(",", "")) for number in head.groups()[:3])
    sizes = derive(recipe, ppn=ppn, nodes=nodes, images=images)
    scaled = recipe.schedule.peak_rate == "auto" or recipe.optim.scale_rate_by == "workers"
    sweeps_batch = "batch.local" in recipe.sweep.grid  # one rate for all of them, as its source has it
    assert recipe.schedule.reference_batch == (None if scaled or sweeps_batch else sizes.global_batch)
    assert rate_warning(recipe.schedule, recipe.optim, global_batch=sizes.global_batch) == ""


@pytest.mark.parametrize("name", [name for name in recipe_names() if load_recipe(name).data.prepare])
def test_a_recipe_s_prepare_command_is_a_valid_command(name: str) -> None:
    data = load_recipe(name).data
    program, command, *words = shlex.split(data.prepare.replace("{path}", data.path))
    assert (program, command) == ("cputrain", "prepare")
    context = prepare.make_context("prepare", words)
    assert context.params["out"] == Path(data.path)


def test_the_error_for_missing_data_shows_the_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`cputrain prepare digits data/digits-folder '/a b'`, or set data\.path=DIR"):
        survey_data(load_recipe("demo-digits", ["data.path=/a b"]).data)


def test_generated_data_has_no_folder() -> None:
    recipe = load_recipe("imagefolder", ["data.path=synthetic"]).with_absolute_paths()
    assert recipe.data.path == "synthetic" and recipe.data.kind == "synthetic data"
    assert load_recipe("imagefolder", ["data.path=./line"]).with_absolute_paths().data.path.endswith("/line")
    assert survey_data(recipe.data).train == 1_281_167 and len(survey_data(recipe.data).classes) == 1000


def test_the_error_for_an_unknown_recipe_shows_similar_names() -> None:
    with pytest.raises(InputError, match=r"unknown recipe 'demo-digit': did you mean demo-digits\?"):
        load_recipe("demo-digit")
    with pytest.raises(InputError, match=r"recipe file nowhere/x\.yaml not found"):
        load_recipe("nowhere/x.yaml")


def test_an_empty_recipe_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("")
    assert load_recipe(str(tmp_path / "r.yaml")) == Recipe()


@pytest.mark.parametrize("text", ["a\\x1b[2J", "a\\0", "\\ud800", "a\\nb"])
def test_names_and_paths_have_no_control_characters(tmp_path: Path, text: str) -> None:
    for key in ("name", "output", "data.path"):
        quoted = f'"{text}"'
        line = f"data: {{path: {quoted}}}" if key == "data.path" else f"{key}: {quoted}"
        for found in (refusal(tmp_path, line), refusal(tmp_path, "epochs: 9", f"{key}={quoted}")):
            assert f"{key}=" in found and "which is a control character or not UTF-8; remove it" in found
