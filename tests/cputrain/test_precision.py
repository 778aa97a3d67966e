"""precision=auto: what decides, what is measured and kept, and that a run keeps its first choice."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.cli.recipes import precision_lines
from cputrain.manifest import read_manifest
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.request import for_measurement, request_of
from cputrain.recipe.resume import differences, first_precision, recipe_text, record_precision
from cputrain.runs.folder import make_folder
from cputrain.training import precision
from cputrain.training.engine import Engine
from cputrain.training.precision import (
    Choice,
    Trial,
    choose_precision,
    decided,
    instructions_missing,
    kept_step_speedup,
)
from cputrain.training.session import recipe_task
from tests.support.ccl_jobs import unmeasured_cache
from tests.support.checkpoints import differing, newest
from tests.support.commands import PPN, here, refused
from tests.support.trainings import SMALL, trained

HAS_BF16 = any("bf16" in flag for flag in this_machine().isa)
AUTO = ("imagefolder", *SMALL, "comm.backend=gloo", "precision=auto")


@pytest.fixture
def trial(group: None, tmp_path: Path) -> Trial:
    """Steps of a small network by torch's layers, with a cache of their own."""
    recipe = load_recipe("imagefolder", (*SMALL, "precision=float32", "engine=eager"))
    return Trial(
        model=recipe.model,
        optim=recipe.optim,
        engine_setting=recipe.engine,
        task=recipe_task(recipe, 3, None, lambda images: images),
        engine=Engine(name="eager", why="engine=eager"),
        images=6,
        side=recipe.data.crop,
        workers=1,
        cpus=("a CPU",),
        env={**os.environ, "CPUTRAIN_CACHE": str(tmp_path / "cache")},
    )


def counting(speedup: float, calls: list[Trial]) -> Callable[[Trial], float]:
    def measure(tried: Trial) -> float:
        calls.append(tried)
        return speedup

    return measure


@pytest.mark.parametrize(
    ("speedup", "chosen", "words"),
    [
        (2.314, "bf16", "X are 2.31 times as fast in bf16 as in float32 on this CPU, 1.3 or more; precision=float32"),
        (1.3, "bf16", "1.30 times"),
        (1.296, "bf16", "1.30 times"),
        (1.294, "float32", "X are 1.29 times as fast in bf16 as in float32 on this CPU, less than 1.3; precision=bf16"),
        (0.5, "float32", "0.50 times"),
    ],
)
def test_bf16_is_taken_from_1_3_times_the_speed_on(speedup: float, chosen: str, words: str) -> None:
    choice = decided(speedup, "X")
    assert choice.precision == chosen and words in choice.why


def test_without_instructions_for_bf16_nothing_is_measured(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Trial] = []
    for name in ("skx-8160-2s", "knl-7250-quad-cache"):
        isa = find_machine(name).isa
        assert instructions_missing(isa) == "no instructions for bfloat16 (AVX512-BF16 or AMX)"
    if HAS_BF16:
        assert instructions_missing(this_machine().isa) == ""
        with monkeypatch.context() as patched:
            patched.setattr(precision, "has_bf16", lambda: False)
            assert instructions_missing(this_machine().isa) == "no bfloat16 in this torch"
    monkeypatch.setattr(precision, "this_machine", lambda: find_machine("skx-8160-2s"))
    choice = choose_precision(trial, None, counting(9.0, calls))
    assert choice.precision == "float32" and choice.why.startswith("the CPU of rank 0 has no instructions for bfloat16")
    assert not calls


def test_a_run_that_goes_on_keeps_its_precision_and_nothing_is_measured(trial: Trial) -> None:
    calls: list[Trial] = []
    for first in ("bf16", "float32", "float64"):
        assert choose_precision(trial, first, counting(9.0, calls)) == Choice(precision=first, why="as this run began")
    assert not calls


def test_a_network_of_your_own_is_not_measured(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "instructions_missing", lambda _: "")
    calls: list[Trial] = []
    own = replace(trial, task=replace(trial.task, traceable=False))
    choice = choose_precision(own, None, counting(9.0, calls))
    assert choice.precision == "float32" and "precision=bf16 takes bf16" in choice.why and not calls
    assert choose_precision(trial, None, counting(9.0, calls)).precision == "bf16" and calls == [trial]


def test_a_speedup_is_measured_once_for_each_network_batch_optimizer_engine_and_cpu(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Trial] = []
    monkeypatch.setattr(precision, "step_speedup", counting(1.7, calls))
    others = (
        replace(trial, images=7),
        replace(trial, cpus=("a CPU", "another")),
        replace(trial, workers=2),
        replace(trial, engine=Engine(name="native", why="")),
        replace(trial, optim=load_recipe("imagefolder", (*SMALL, "optim.name=adam")).optim),
        replace(trial, side=32),
    )
    for _ in range(2):
        assert [kept_step_speedup(each) for each in (trial, *others)] == [1.7] * 7
    assert calls == [trial, *others]


def test_steps_are_timed_in_both_precisions_and_change_nothing_else(trial: Trial) -> None:
    import torch

    before = torch.get_rng_state()
    assert 0.02 < precision.step_speedup(trial) < 50
    assert torch.equal(torch.get_rng_state(), before)


def test_plans_and_measurements_take_float32_for_auto() -> None:
    recipe = load_recipe("resnet50-small", ("precision=auto", "data.path=synthetic"))
    fixed = load_recipe("resnet50-small", ("data.path=synthetic",))
    assert request_of(recipe) == request_of(fixed)
    assert for_measurement(recipe) == for_measurement(fixed)
    for name, words in (
        ("skx-8160-2s", "will be float32"),
        ("spr-8480plus-2s", "takes bf16 from 1.3 times the speed on"),
    ):
        (line,) = precision_lines("auto", plan_machine(find_machine(name), request_of(recipe)))
        assert line.startswith("precision=auto") and words in line


def test_auto_is_no_other_recipe_than_what_was_chosen(tmp_path: Path) -> None:
    auto, chosen = (load_recipe("imagefolder", (*SMALL, f"precision={each}")) for each in ("auto", "bf16"))
    assert differences(auto, chosen) == differences(chosen, auto) == {}
    assert "precision" in differences(chosen, load_recipe("imagefolder", (*SMALL, "precision=float32")))
    make_folder(tmp_path / "run", recipe_text(auto), overwrite=False)
    record_precision(tmp_path / "run", "bf16")
    assert (tmp_path / "run/recipe.yaml").read_text(encoding="utf-8") == recipe_text(chosen)
    assert first_precision(tmp_path / "run") is None, "it has not trained a step"


def test_another_word_is_refused_in_a_line(tmp_path: Path) -> None:
    line = refused(here("train", "imagefolder", "precision=fp16", "data.path=none", cwd=tmp_path))
    assert "precision must be auto, float32, bf16 or float64, not fp16" in line


def recorded(run: Path) -> set[str]:
    """The precision in a run's records: recipe, environment and checkpoint."""
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    checkpoint = read_manifest(newest(run)).recipe["precision"]
    return {load_recipe(str(run / "recipe.yaml")).precision, environment["precision"], checkpoint}


@pytest.mark.long
@pytest.mark.processes
def test_ranks_agree_record_their_choice_and_a_resumed_run_keeps_it(place: Path) -> None:
    """Bit for bit the training with precision=bf16. Without a number, measuring fails."""
    cache = unmeasured_cache(place / "cache")
    runs = {name: f"output={name}" for name in ("whole", "fixed", "parts", "slow")}
    slow = (*AUTO, "batch.local=5", runs["slow"])
    result = trained(
        place,
        PPN,
        (*AUTO, runs["whole"], "--speedup=2"),
        (*AUTO, runs["fixed"], "precision=bf16"),
        (*AUTO, runs["parts"], "--speedup=", "--signal=1"),
        (*slow, "--signal=1", "--speedup=1.1"),
        **cache,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    lines = [line for line in result.stdout.splitlines() if "(auto)" in line]
    assert len(lines) == 3 and all("precision bf16 (auto): steps of lenet at 28 x 28" in line for line in lines[:2])
    assert "precision float32 (auto)" in lines[2] and "1.10 times as fast" in lines[2]
    (record,) = (place / "cache").rglob("precision-*.json")
    speedups = json.loads(record.read_text(encoding="utf-8"))["values"]
    assert sorted(speedups.values()) == [1.1, 2.0]
    record.write_text(record.read_text(encoding="utf-8").replace("2.0", "1.0").replace("1.1", "3.0"), encoding="utf-8")
    again = trained(place, PPN, (*AUTO, runs["parts"], "--resume"), (*slow, "--resume"), **cache)
    assert again.returncode == 0, again.stderr + again.stdout
    assert "precision bf16 (auto): as this run began" in again.stdout
    for name in ("fixed", "parts"):
        assert differing(newest(place / "whole"), newest(place / name)) in ([], ["training"]), "buckets are measured"
    assert [recorded(place / name) for name in runs] == [{"bf16"}] * 3 + [{"float32"}]


@pytest.mark.long
@pytest.mark.processes
def test_train_measures_says_and_records_and_eval_takes_the_checkpoints_precision(place: Path) -> None:
    cache = unmeasured_cache(place / "cache")
    done = here("train", *AUTO, "max_steps=2", cwd=place, **cache)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "(auto)" in line)
    figure = r"steps of lenet at 28 x 28 with 6 images and \d+ threads? are [\d.]+ times as fast in bf16"
    assert re.search(figure if HAS_BF16 else "no instructions for bfloat16", line)
    chosen = line.split()[1]
    assert recorded(place / "run") == {chosen}
    assert len(list((place / "cache").rglob("precision-*.json"))) == int(HAS_BF16)
    for record in (place / "cache").rglob("precision-*.json"):
        values = json.loads(record.read_text(encoding="utf-8"))
        values["values"] = dict.fromkeys(values["values"], 0.5 if chosen == "bf16" else 9.0)
        record.write_text(json.dumps(values), encoding="utf-8")
    more = here("train", *AUTO, "max_steps=4", "--resume", cwd=place, **cache)
    assert more.returncode == 0 and f"precision {chosen} (auto): as this run began" in more.stdout, more.stderr
    assert recorded(place / "run") == {chosen}
    checkpoint = str(newest(place / "run"))
    asked = here("eval", *AUTO, "--checkpoint", checkpoint, "--format", "json", cwd=place, **cache)
    assert asked.returncode == 0 and json.loads(asked.stdout), asked.stderr
