"""What there is: recipes, machines and keys, listed, searched and shown."""

import json
from pathlib import Path

import pytest
import yaml

from cputrain import __version__
from cputrain.affinity.topology.catalog import machine_names
from cputrain.affinity.wording import first_sentence
from cputrain.cli import main
from cputrain.files import recipe_names
from cputrain.recipe.keys import all_keys, other_names, reference
from cputrain.recipe.loading import shipped_recipes

Captured = pytest.CaptureFixture[str]


def printed(capsys: Captured, *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def refusal(capsys: Captured, *words: str) -> str:
    assert main(list(words)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version_is_told(option: str, capsys: Captured) -> None:
    assert __version__ in printed(capsys, option)


def test_every_recipe_is_listed_with_what_it_trains(capsys: Captured) -> None:
    lines = printed(capsys, "recipes").splitlines()
    rows = {line.split()[0]: line for line in lines[1:] if line.split()[:1] and line.split()[0] in recipe_names()}
    assert list(rows) == recipe_names()
    assert all(10 < len(each.summary) < 260 and not each.summary.endswith(".") for each in shipped_recipes())
    assert rows["mnist-sgd"].endswith("Softmax regression on MNIST with SGD at a constant learning rate of 0.5")
    found = json.loads(printed(capsys, "recipes", "list", "--format", "json"))
    assert [each["name"] for each in found["recipes"]] == recipe_names()


def test_recipes_are_found_by_any_text_of_their_file(capsys: Captured) -> None:
    found = json.loads(printed(capsys, "recipes", "search", "SURFsara", "--format", "json"))
    names = [each["name"] for each in found["recipes"]]
    assert "resnet50-8k" in names and "mnist-sgd" not in names
    assert "no shipped recipe contains 'frobnicate'" in refusal(capsys, "recipes", "search", "frobnicate")


def test_a_recipe_is_shown_as_its_file_has_it(capsys: Captured) -> None:
    text = printed(capsys, "recipes", "show", "demo-digits")
    assert text.startswith("# ResNet-50 on scikit-learn's") and yaml.safe_load(text)["name"] == "demo-digits"
    found = json.loads(printed(capsys, "recipes", "show", "demo-digits", "--format", "json"))
    assert found["text"] == text and Path(found["file"]).read_text(encoding="utf-8") == text
    assert "did you mean demo-digits?" in refusal(capsys, "recipes", "show", "demo-digit")


def test_every_machine_is_listed(capsys: Captured) -> None:
    found = json.loads(printed(capsys, "machines", "--format", "json"))["machines"]
    assert [each["name"] for each in found] == machine_names()
    text = printed(capsys, "machines", "list")
    assert all(f"\n{name} " in text for name in machine_names())


@pytest.mark.slow
def test_machines_are_found_by_processor_memory_and_features(capsys: Captured) -> None:
    def names(text: str) -> set[str]:
        found = json.loads(printed(capsys, "machines", "search", text, "--format", "json"))["machines"]
        return {each["name"] for each in found}

    assert {name for name in machine_names() if name.startswith("skx-8160")} == names("8160")
    assert (
        names("Sapphire Rapids")
        == names("sapphire")
        == {name for name in machine_names() if name.startswith(("spr-", "max-9480"))}
    )
    assert names("icelake") == {name for name in machine_names() if name.startswith("icx-")}
    assert "knl-7250-snc4-flat" in names("HBM") and "skx-8160-2s" not in names("hbm")
    assert names("snc4") == {name for name in machine_names() if "snc4" in name}
    assert names("flat") == {name for name in machine_names() if "flat" in name}
    for text in ("smt", "largest", "1s intel", "run"):  # of remarks, and across fields
        assert f"no machine in the catalog matches {text!r}: cputrain machines lists" in refusal(
            capsys, "machines", text
        )
    assert "no machine in the catalog matches 'z80'" in refusal(capsys, "machines", "search", "z80")


def test_a_name_alone_is_shown_and_another_text_searched(capsys: Captured) -> None:
    for words in (("recipes", "demo-digits"), ("machines", "skx-8160-2s")):
        assert printed(capsys, *words) == printed(capsys, words[0], "show", words[1])
    for words in (("recipes", "mnist"), ("machines", "cascade")):
        assert printed(capsys, *words) == printed(capsys, words[0], "search", words[1])
    assert "no shipped recipe contains 'zzz'" in refusal(capsys, "recipes", "zzz")


@pytest.mark.parametrize("text", ["research", "shown", "list of"])
def test_a_text_like_a_command_s_name_is_searched_too(text: str, capsys: Captured) -> None:
    status = main(["recipes", text])
    found = capsys.readouterr()
    assert main(["recipes", "search", text]) == status
    assert capsys.readouterr() == found and (status == 0 or "contains" in found.err)


def test_a_misspelled_command_is_named_where_nothing_is_found(capsys: Captured) -> None:
    assert refusal(capsys, "machines", "serach").endswith("matches 'serach': did you mean cputrain machines search?")
    assert "did you mean cputrain recipes search?" in refusal(capsys, "recipes", "serach", "resnet")


def test_a_machine_is_shown_with_its_memory(capsys: Captured) -> None:
    text = printed(capsys, "machines", "show", "knl-7250-snc4-flat")
    assert "1 package, 8 NUMA nodes, 68 cores, 272 CPUs" in text and "none, next to node 3" in text
    found = json.loads(printed(capsys, "machines", "show", "knl-7250-snc4-flat", "--format", "json"))
    assert found["cores"] == 68 and {node["kind"] for node in found["numa_nodes"]} == {"dram", "hbm"}
    assert "nearest are" in refusal(capsys, "machines", "show", "skx-9999")


def test_every_key_has_a_line(capsys: Captured) -> None:
    text = printed(capsys, "keys")
    sections = {section.name for section in reference()}
    assert {line.split()[0] for line in text.splitlines()[1:]} >= {*all_keys()} - sections


@pytest.mark.parametrize(
    ("topic", "expected", "not_expected"),
    [
        ("optim", "optim.lars_variant", "schedule.name"),
        ("optim.momentum", "optim.momentum  (default: 0.9)", "optim.momentum_correction"),
        ("data.augment", "data.augment.", "data.crop  "),
        ("Szegedy", "label_smoothing", "epochs  "),
        ("batch_size", "batch.local", "optim.name"),
        ("--lr", "schedule.peak_rate", "optim.name"),
    ],
)
def test_keys_are_found_by_section_name_and_text(
    topic: str, expected: str, not_expected: str, capsys: Captured
) -> None:
    text = printed(capsys, "keys", "--", topic)
    assert expected in text and not_expected not in text
    assert max(map(len, text.splitlines())) <= 100


def test_keys_as_json_and_an_unknown_one(capsys: Captured) -> None:
    found = json.loads(printed(capsys, "keys", "optim.name", "--format", "json"))
    (key,) = found["sections"][0]["keys"]
    assert key["key"] == "optim.name" and key["default"] == "momentum" and "lars" in key["values"]
    assert "the nearest are optim.momentum" in refusal(capsys, "keys", "optim.momentun")


def test_a_sentence_does_not_end_at_et_al(capsys: Captured) -> None:
    lines = {line.split()[0]: line for line in printed(capsys, "keys").splitlines() if line}
    assert lines["label_smoothing"].endswith("(Szegedy et al. 2016, section 7)")
    assert first_sentence("Of one (Goyal et al. 2017,\n  2.1), 0.5 of it. 0: none. End.") == (
        "Of one (Goyal et al. 2017, 2.1), 0.5 of it"
    )
    assert first_sentence("One only.") == first_sentence("One only") == "One only"


def test_other_trainers_names_are_of_keys_that_exist() -> None:
    named = {key for keys in other_names().values() for key in keys}
    assert named - {key.key for section in reference() for key in section.keys} == set()
