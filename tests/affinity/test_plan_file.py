"""plan.json: written, read back, and as docs/plan.schema.json says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from site_pages.plan_json import plan_schema

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.plan_file import (
    plan_from_dict,
    plan_json,
    plan_to_dict,
    plan_to_json,
    read_plan,
    worker_of,
)
from cputrain.affinity.planner.request import PROFILES, Request
from cputrain.affinity.planner.workload import RESNET50
from cputrain.affinity.topology.catalog import find_machine
from tests.affinity.test_plan import RUNTIME, machines_and_requests
from tests.support.machines import build_machine

SCHEMA_FILE = Path(__file__).parents[2] / "docs/plan.schema.json"
SCHEMA = Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))

EXAMPLE = plan_to_json(plan_machine(find_machine("skx-8160-2s"), Request(ppn=2), Runtime()))
SMALL_EXAMPLE = plan_to_json(plan_machine(build_machine(2, 1, 3, 2), Request(ppn=2), Runtime()))


@pytest.mark.slow
@given(machines_and_requests(packages=3, cores=8))
def test_a_plan_survives_json(drawn) -> None:
    plan = plan_machine(*drawn, RUNTIME)
    data = json.loads(plan_to_json(plan))
    assert data == json.loads(json.dumps(plan_to_dict(plan)))
    assert plan_from_dict(data) == plan
    SCHEMA.validate(data)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", ["skx-8160-2s", "knl-7250-snc4-flat", "genoa-9654-2s-nps4"])
def test_plans_of_big_hosts_follow_the_schema(name: str, profile: str) -> None:
    request = Request(profile=profile, nodes=16, workload=RESNET50, local_batch=32, balance="batch")
    SCHEMA.validate(json.loads(plan_to_json(plan_machine(find_machine(name), request, Runtime()))))


def test_the_schema_s_file_is_that_of_the_types(pytestconfig: pytest.Config) -> None:
    """`pytest --update-golden` writes it."""
    if pytestconfig.getoption("update_golden"):
        SCHEMA_FILE.write_text(f"{plan_json(plan_schema())}\n")
    assert json.loads(SCHEMA_FILE.read_text()) == plan_schema()


def test_the_schema_refuses_what_is_no_plan() -> None:
    data = plan_to_dict(plan_machine(find_machine("skx-8160-2s"), Request(), Runtime()))
    data["workers"][0]["compute_pus"] = []
    assert not SCHEMA.is_valid(json.loads(json.dumps(data)))


@pytest.mark.parametrize("value", [{}, [], [{}], {"a": [{"b": [1, 2]}]}, "x", [["a", "b" * 200]], {"l": ["c" * 200]}])
def test_our_layout_is_json(value: object) -> None:
    assert json.loads(plan_json(value)) == value


JUNK = st.sampled_from([None, True, -1, 0.5, 10**30, "", "x", [], [1, 1], [-1], ["a"], {}, {"a": 1}])


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300)
def test_every_edit_that_the_schema_refuses_is_refused(data: st.DataObject) -> None:
    """A value replaced, removed or added anywhere; jsonschema is the judge of what is a plan."""
    plan = json.loads(SMALL_EXAMPLE)
    place = plan
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        inside = isinstance(place[key], dict | list) and place[key]
        if not inside or data.draw(st.booleans()):
            break
        place = place[key]
    if data.draw(st.booleans()):
        place[key] = data.draw(JUNK)
    else:
        del place[key]
    try:
        plan_from_dict(plan)
        assert SCHEMA.is_valid(plan)
    except InputError as error:
        assert "\n" not in str(error)


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    for text in ("", "{", "[]", "null", '{"schema_version": 1}'):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(InputError, match="plan"):
            read_plan(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("workers.1.compute_pus.0", 300),
        ("workers.1.comm_pus", [10**9]),
        ("workers.0.memory_nodes", [7]),
        ("workers.1.memory_bytes", -1),
        ("machine.core_list.0.pus.0", 3),
        ("machine.core_list.1.pus", []),
        ("machine.core_list.0.numa_node", 9),
        ("machine.allowed_pus", [10**6]),
        ("machine.allowed_nodes", [5]),
        ("unused", [{"pus": [400], "why": "none"}]),
        ("workers", True),
        ("workers", [{}]),
        ("workers", [None]),
        ("workers", [{"local_rank": 0}]),
        ("machine.numa_node_list.0.kind", "\x1b[2J"),
        ("machine.numa_node_list.0.kind", "dram\n"),
        ("workers.0.own\n", 1),
        ("machine.name", "\x1b[2Jn1"),
        ("machine.model", "a\x9b6n"),
        ("warnings", ["two\nlines"]),
        ("workers.0.env", {"A\x07": "b"}),
        ("workers.0.env", {"A=B": "c"}),
        ("workers.0.env", {"": "c"}),
        ("workers.0.env", {"A": "\ud800"}),
        ("machine.name", "\udc00"),
    ],
)
def test_an_edit_that_leaves_valid_json_is_refused_in_a_line(tmp_path: Path, place: str, value: object) -> None:
    part: Any = json.loads(EXAMPLE)
    data = part
    *way, last = [int(word) if word.isdigit() else word for word in place.split(".")]
    for word in way:
        part = part[word]
    part[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"^the plan is damaged: ") as refused:
        read_plan(tmp_path / "plan.json")
    assert str(refused.value).isprintable()


def test_a_plan_of_another_schema_and_a_worker_that_it_lacks_are_refused() -> None:
    for version, shown in ((99, "99"), (True, "true"), ("\x1b", r'"\\u001b"'), (None, "null")):
        with pytest.raises(InputError, match=f"schema_version {shown}, but this version reads 1: plan again"):
            plan_from_dict(json.loads(EXAMPLE) | {"schema_version": version})
    with pytest.raises(InputError, match="local rank 2 is not in the plan, which has 2 workers"):
        worker_of(plan_from_dict(json.loads(EXAMPLE)), 2)
