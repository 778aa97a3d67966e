"""cputrain tune: which plans are tried, what is said and kept, and that plan and train use it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.records import machine_name
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.data.formats.source import DatasetSummary
from cputrain.measurements import save_measurement
from cputrain.recipe.derivation import derive
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.request import request_of
from cputrain.studies.tune import (
    Choices,
    PlanCandidate,
    Race,
    Result,
    choices_of,
    distinct_names,
    outcome_text,
    result_json,
    result_text,
    run_race,
    suggestions,
    tuned_record,
    worker_counts,
)
from cputrain.training.local import PlannedTraining
from tests.support.commands import cputrain, here, needs_two_cores, refused
from tests.support.trainings import LENET

SMALL = ("data.path=synthetic", *LENET, "batch.local=4")
ALLOCATORS, ENGINES = ("glibc", "tcmalloc"), ("native", "eager")


def planned(machine: Machine, *settings: str) -> PlannedTraining:
    """A training on any machine."""
    recipe = load_recipe("imagefolder", (*SMALL, *settings))
    plan = plan_machine(machine, request_of(recipe, images=1000))
    survey = DatasetSummary(classes=("a", "b"), train=1000, val=0)
    sizes = derive(recipe, ppn=len(plan.workers), nodes=1, images=1000)
    return PlannedTraining(recipe=recipe, plan=plan, survey=survey, sizes=sizes)


def choices(machine: Machine, *settings: str, bf16: bool = False) -> Choices:
    return choices_of(planned(machine, *settings), allocators=ALLOCATORS, engines=ENGINES, has_bf16=bf16)


def test_what_is_tried_suits_the_machine() -> None:
    small = choices(find_machine("numa:1(memory=34359738368) core:2 pu:1"))
    assert small.values["workers"] == ["2", "1"] and small.values["comm"] == ["0"] and small.values["loader"] == ["0"]
    assert len(small.all(("workers", "comm", "loader", "allocator", "engine"))) == 2 * 2 * 2
    resnet = ("model.name=resnet50", "data.crop=224")
    large = choices(find_machine("skx-8160-2s"), "data.path=/tmp", *resnet, bf16=True)
    assert large.values["workers"] == ["2", "1", "4"] and large.values["comm"] == ["0", "1", "2"]
    assert large.values["loader"][0] == "1" and sorted(large.values["loader"]) == ["0", "1", "2"]
    assert large.values["precision"] == ["float32", "bf16"] and large.values["batch"] == ["4", "8", "2"]
    every = large.all(("workers", "comm", "loader", "allocator", "engine"))
    assert dict(every[0]) == {"workers": "2", "comm": "0", "loader": "1", "allocator": "glibc", "engine": "native"}
    assert not [
        each for each in every if {("workers", "1"), ("comm", "1")} <= {*each}
    ]  # one worker does not communicate
    assert 60 < len(every) < 200


def test_values_that_the_recipe_sets_stay() -> None:
    fixed = choices(find_machine("skx-8160-2s"), "plan.ppn=4", "plan.comm_cores=1", "engine=eager", "precision=bf16")
    assert (fixed.values["workers"], fixed.values["comm"]) == (["4"], ["1"])
    assert fixed.values["engine"] == [] and fixed.values["precision"] == ["bf16"]


def test_worker_counts_follow_packages_nodes_and_caches() -> None:
    assert worker_counts(find_machine("genoa-9654-2s-nps4"), 24) == [24, 1, 2, 4, 8, 16]
    assert worker_counts(find_machine("core:4 pu:2"), 4) == [4, 1, 2, 3]


def result(costs: list[float], workers: list[int]) -> Result:
    machine = find_machine("numa:1(memory=34359738368) core:4 pu:1")
    candidates = [
        PlanCandidate(
            values=(("workers", str(count)), ("comm", "0"), ("loader", "0"), ("engine", engine)),
            named=("workers", "engine"),
            planned=planned(machine, f"plan.ppn={count}", "plan.comm_cores=0", "plan.loader_cores=0"),
        )
        for count in workers
        for engine in ("native", "eager")
    ]
    race = run_race(len(candidates), lambda i: costs[i], seed=1, resolution=0.02)
    return Result(candidates=candidates, race=race)


def test_the_reason_names_the_winner_and_the_present_plan() -> None:
    found = result([1.31, 1.6, 1.0, 1.5], [1, 2])
    assert found.winner.name == "2 x 2, native"
    assert found.why.startswith("measured: 2 x 2 is 1.31 (1.") and found.why.endswith(" times as fast as 1 x 4")
    kept = result([1.0, 1.2, 1.31, 1.5], [2, 1])  # the present plan wins: beside the best other number of workers
    assert kept.why.startswith("measured: 2 x 2 is 1.31 (") and kept.why.endswith("times as fast as 1 x 4")
    assert distinct_names("2 x 1, tcmalloc, native", "2 x 1, glibc, native") == ("2 x 1, tcmalloc", "2 x 1, glibc")


def test_the_table_and_the_json_have_every_plan_and_how_sure_the_result_is() -> None:
    found = result([1.31, 1.6, 1.0, 1.5], [1, 2])
    lines = result_text(found).splitlines()
    assert lines[1].startswith("2 x 2, native") and lines[1].endswith("fastest")
    assert "no other plan can be faster by more than 2 %" in outcome_text(found)
    data = json.loads(result_json(found, None))
    assert [row["won"] for row in data["plans"]] == [False, False, True, False] and data["decided"]
    assert data["plans"][2]["times"]["value"] == pytest.approx(1.31)


def test_what_changes_the_training_is_suggested_only() -> None:
    found = result([1.0, 0.8, 2.0, 2.0], [2, 1])
    assert suggestions(None) == []
    machine = find_machine("numa:1(memory=34359738368) core:4 pu:1")
    values = (*found.winner.values, ("batch", "8"))
    more = PlanCandidate(values=values, named=("batch",), planned=planned(machine, "plan.ppn=2", "batch.local=8"))
    same = replace(more, values=(*found.winner.values, ("batch", "4")), planned=found.winner.planned)
    race = run_race(2, lambda i: (1.0, 0.8)[i], seed=1, resolution=0.02)
    changed = suggestions(Result(candidates=[same, more], race=race))[-1]
    assert changed.startswith("batch.local=8 has 1.25 (") and "with a global batch of 16 instead of 8" in changed
    assert changed.endswith("this changes the training: it is used only if you set it")


def test_what_is_kept_is_for_this_network_precision_and_batch() -> None:
    record = tuned_record(result([1.31, 1.6, 1.0, 1.5], [1, 2]), "cputrain tune x")
    assert record is not None and record.values["ppn"] == 2 and record.values["why"].startswith("measured: 2 x 2 is")
    assert record.name == "lenet at 28 x 28, float32, libjpeg-turbo, batch of 4 a worker"


def test_tune_lists_its_plans_and_refuses_wrong_input(tmp_path: Path) -> None:
    env = {"CPUTRAIN_CACHE": str(tmp_path)}
    listed = here("tune", "imagefolder", *SMALL, "--dry-run", "--axes", "workers,engine", **env)
    assert listed.returncode == 0 and "plans to try, with generated images" in listed.stdout, listed.stderr
    assert "plan.ppn=1" in listed.stdout and "kept" not in listed.stderr
    for options, expected in (
        (("--axes", "workers,color"), "--axes 'color' is not one of workers, comm"),
        (("--time", "soon"), "--time 'soon' is not a time limit"),
        (("batch.locla=3",), "unknown key 'batch.locla'"),
    ):
        assert expected in refused(here("tune", "imagefolder", *SMALL, *options, **env))


def test_plan_and_train_use_what_was_kept_for_this_training(tmp_path: Path) -> None:
    """Of one worker, where the rules alone plan one for each core of a small host."""
    machine, env = this_machine(), {"CPUTRAIN_CACHE": str(tmp_path / "cache")}
    record = tuned_record(result([1.31, 1.6, 1.0, 1.5], [2, 1]), "cputrain tune imagefolder")
    assert record is not None and record.values["ppn"] == 1
    save_measurement(replace(record, machine=machine_name(machine)), env)
    for command in (("plan",), ("train", "--dry-run")):
        told = here(command[0], "imagefolder", *SMALL, *command[1:], cwd=tmp_path, **env)
        assert f"workers per host 1: {record.values['why']}" in " ".join(told.stdout.split()), told.stderr
    for other in ("batch.local=8", "plan.threads=1", "precision=bf16"):
        told = here("plan", "imagefolder", *SMALL, other, cwd=tmp_path, **env)
        assert "workers per host" in told.stdout and "measured: " not in told.stdout


@pytest.mark.long
@pytest.mark.nightly
@needs_two_cores
def test_what_tune_finds_is_the_reason_of_the_next_plan(tmp_path: Path) -> None:
    """Whichever plan is faster here."""
    env = {"CPUTRAIN_CACHE": str(tmp_path / "cache")}
    quick = ("comm.backend=gloo", "engine=eager", "data.decoder=pillow")  # nothing to compile
    tuning = ("--axes", "workers", "--steps", "3", "--resolution", "50", "--format", "json")
    ran = cputrain("tune", "imagefolder", *SMALL, *quick, *tuning, cwd=tmp_path, **env)
    assert ran.returncode == 0, ran.stderr
    data = json.loads(ran.stdout)
    assert {row["name"].split(" x ")[0] for row in data["plans"]} >= {"1", "2"} and data["why"].startswith("measured: ")
    assert data["trials"] >= 10 and "saved in " in ran.stderr
    (winner,) = [row for row in data["plans"] if row["won"]]
    told = here("plan", "imagefolder", *SMALL, *quick, cwd=tmp_path, **env)
    assert f"workers per host {winner['name'].split(' x ')[0]}: {data['why']}" in " ".join(told.stdout.split())


def test_a_tuning_that_is_too_short_keeps_nothing() -> None:
    found = result([1.31, 1.6, 1.0, 1.5], [1, 2])
    assert found.sure
    short = Race(count=4, resolution=0.02)
    short.add_round({i: 1.0 + i for i in range(4)})
    early = replace(found, race=short)
    assert not early.sure and "too few to estimate the noise" in outcome_text(early)


@pytest.mark.parametrize("leader", [0, 2])
def test_an_undecided_race_is_not_sure_whichever_plan_leads(leader: int) -> None:
    found = result([1.31, 1.6, 1.0, 1.5], [1, 2])
    race = Race(count=4, resolution=0.02)
    for number in range(12):
        costs = {i: 1.5 + 0.1 * ((number + i) % 3) for i in range(4)}
        race.add_round({**costs, leader: costs[leader] - 0.03})
        race.drop_slower()
    undecided = replace(found, race=race)
    assert race.knows_noise and len(race.running) > 1 and not undecided.sure
    assert "not decided" in outcome_text(undecided)
