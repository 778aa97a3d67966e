"""The descriptions of recipe keys, from which the reference page and error messages are made."""

import re

from cputrain.recipe.keys import all_keys, describe_key, reference

KEYS = [key for section in reference() for key in section.keys]
UNITS = re.compile(
    r"\b(seconds?|mib|pixels?|images?|epochs?|steps?|number of (outputs|workers|checkpoints|cores)|-op threads"
    r"|learning rate|factor|coefficient|fraction|scale of 0 to 1|ratio|power|norm|seed|small number)\b"
)


def test_every_key_is_described_in_full_sentences() -> None:
    for section in reference():
        assert len(section.description.split()) >= 2 and section.description[-1] == ".", section.name
        for key in section.keys:
            assert re.fullmatch(r"[A-Z].*\.", key.description) and len(key.description.split()) >= 7, key.key
            first = describe_key(tuple(key.key.replace("[]", ".0").split(".")))
            assert 10 <= len(first) <= 120, f"an error message cannot quote the first sentence of {key.key}"


def test_every_number_is_described_with_its_unit() -> None:
    keys = [key for key in KEYS if "number" in key.values and key.key != "sweep.grid"]
    assert len(keys) > 50
    assert [key.key for key in keys if not UNITS.search(key.description.lower())] == []


def test_every_null_and_auto_is_explained() -> None:
    for key in KEYS:
        for word in ("null", "auto"):
            if re.search(rf"\b{word}\b", key.values) and not key.key.startswith(("plan.", "sweep.")):
                assert word in key.description, key.key


def test_every_choice_is_described() -> None:
    """Except auto, which a section may explain for all its keys."""
    choices = re.compile(r"[\w.-]+(, [\w.-]+)* or [\w.-]+")
    for key in KEYS:
        if not choices.fullmatch(key.values) or "number" in key.values:
            continue
        words = set(re.split(r", | or ", key.values)) - {"auto", "null", "text", "true", "false", "on", "off"}
        repeated = key.key.startswith("phases")  # described under data
        assert repeated or [word for word in words if word not in key.description] == [], key.key


def test_the_reference_has_every_key_once_with_its_values_and_default() -> None:
    keys = {key.key: key for key in KEYS}
    sections = {section.name for section in reference()} - {"", "phases[]"}
    assert {key for key in keys if "[]" not in key} | sections == set(all_keys())
    assert (keys["batch.global"].values, keys["batch.global"].default) == ("whole number, 1 or more, or null", "null")
    assert keys["ema_decay"].values == "number, more than 0 and less than 1, or null"
    assert keys["model.bn_decay"].values == "number, more than 0 and less than 1"
    assert (keys["schedule.milestones"].values, keys["schedule.milestones"].default) == (
        "list of numbers, more than 0",
        "[30.0, 60.0, 80.0]",
    )
    assert keys["data.mean"].values == "list of 3 numbers" and keys["optim.weight_decay"].default == "5e-05"
    assert keys["phases[].from_epoch"].default == "required" and keys["output"].default == '""'
