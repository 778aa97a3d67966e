"""Measured rates: kept, found, and used by predictions."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.records import machine_name, read_records
from cputrain.affinity.topology.catalog import find_machine
from cputrain.cli import main
from cputrain.measurements import rate_record, save_measurement
from cputrain.predict.assumptions import CONSTANTS, link_of
from cputrain.predict.layers import Layer
from cputrain.recipe.loading import load_recipe
from cputrain.studies.simulate.predict import Scenario, layers_of, model_of, reference_of, rows_of, scenario_setup
from cputrain.studies.simulate.setup import (
    LayerSeconds,
    MeasuredTraining,
    Measurement,
    find_measured_rate,
    outdated_measurements,
    training_record,
)

MACHINE = "pack:2 core:16 pu:2"
RECIPE = load_recipe("resnet50-skx-256node")
WANTED = (RECIPE.precision, RECIPE.model.name, RECIPE.data.crop)
COMMAND = "cputrain bench model"
NEGATIVE = [{"weights": 1, "forward": -1.0, "backward": 1.0}]


@pytest.fixture
def measured() -> Measurement:
    return Measurement(
        network="resnet50",
        crop=224,
        precision="float32",
        optimizer="momentum",
        local_batch=48,
        workers=2,
        threads=15,
        comm_cores=0,
        loader_cores=1,
        backend="gloo",
        images_per_s=100.0,
        low=98.0,
        high=101.0,
        layers=(),
    )


def test_a_measurement_is_found_for_its_machine_and_precision(measured: Measurement, tmp_path: Path) -> None:
    env, machine = {"CPUTRAIN_CACHE": str(tmp_path)}, find_machine(MACHINE)
    assert find_measured_rate(read_records(machine, env), *WANTED) is None
    other = replace(measured, network="resnet18")
    kept = [save_measurement(training_record(machine, each, command=COMMAND), env) for each in (measured, other)]
    assert kept[0] != kept[1]
    found = find_measured_rate(read_records(machine, env), *WANTED)
    assert found is not None and found.rate == measured  # its own network before others
    assert found.source.startswith("resnet50 at 224, measured on 20") and "torch " in found.source
    assert find_measured_rate(read_records(find_machine("pack:2 core:8 pu:2"), env), *WANTED) is None
    assert find_measured_rate(read_records(machine, env), "bf16", *WANTED[1:]) is None


def test_a_measurement_with_other_fields_is_not_used(measured: Measurement, tmp_path: Path) -> None:
    env, machine = {"CPUTRAIN_CACHE": str(tmp_path)}, find_machine(MACHINE)
    record = training_record(machine, measured, command=COMMAND)
    values = asdict(measured)
    wrong = (
        {},
        {"workers": "2"},
        {"images_per_s": 0.0},
        {"layers": 3},
        {"layers": [{"weights": 1}]},
        {"layers": NEGATIVE},
    )
    for changes in wrong:
        save_measurement(replace(record, values={**values, **changes} if changes else {}), env)
        records = read_records(machine, env)
        assert find_measured_rate(records, *WANTED) is None
        (line,) = outdated_measurements(records)
        assert line.startswith(f"the measurement of `{COMMAND}` on 20") and line.endswith("; run it again")


def test_predictions_start_from_the_measured_rate(
    measured: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CPUTRAIN_CACHE", str(tmp_path))
    env, machine = {"CPUTRAIN_CACHE": str(tmp_path)}, find_machine(MACHINE)
    command = ["simulate", "resnet50-skx-256node", "--machine", MACHINE, "--nodes", "1", "data.path=synthetic"]
    assert main(command) == 2
    assert "run `cputrain bench model precision=float32` there" in capsys.readouterr().err
    save_measurement(training_record(machine, measured, command=COMMAND), env)
    settings = ("comm.backend=gloo", "plan.threads=15", "plan.loader_cores=1", "--workers", "2", "--format", "json")
    assert main([*command, *settings]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"][0]["images_per_s"] == pytest.approx(100, rel=1e-3)
    assert "measured on 20" in answer["assumptions"][0]["source"]


def test_published_runs_come_before_measurements_of_other_networks(measured: Measurement) -> None:
    """A measured rate of the network, a published one, a measured rate of another network: in this order."""
    own = MeasuredTraining(rate=measured, source="own")
    other = MeasuredTraining(rate=replace(measured, network="resnet18", workers=2, images_per_s=200.0), source="other")
    tiny = MeasuredTraining(rate=replace(measured, network="lenet", crop=28, images_per_s=1e4), source="tiny")
    known, unknown = find_machine("skx-8160-2s"), find_machine(MACHINE)
    assert reference_of(known, RECIPE, measured=own).source == "own"
    assert reference_of(known, RECIPE, measured=other).source.startswith("SURFsara")
    assert reference_of(unknown, RECIPE, measured=other).source == "other"
    with pytest.raises(InputError, match="no training rate of"):
        reference_of(unknown, RECIPE, measured=tiny)


def test_a_noisy_measurement_widens_the_range(measured: Measurement) -> None:
    machine = find_machine(MACHINE)
    noisy = MeasuredTraining(rate=replace(measured, low=80.0, high=115.0), source="noisy")
    reference = reference_of(machine, RECIPE, measured=noisy)
    assert reference.bounds == (80.0, 115.0)
    assert replace(reference, spread=(99.0, 101.0)).bounds == pytest.approx((97.0, 103.0))
    (row,) = rows_of(Scenario(recipe=RECIPE, machine=machine, link=link_of("opa"), reference=reference), (1,))
    assert row.low < 0.85 * row.images_per_s and row.high > 1.1 * row.images_per_s


def test_predictions_use_measured_rates_of_communication_and_tell_of_stale_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CPUTRAIN_CACHE", str(tmp_path))
    env, machine = {"CPUTRAIN_CACHE": str(tmp_path)}, find_machine(MACHINE)
    record = rate_record(machine, "all-reduce ccl", (1e9, 0.9e9, 1.1e9), command="cputrain bench comm")
    path = save_measurement(record, env)
    assert record.machine == machine_name(machine)
    command = ["simulate", "resnet50-skx-256node", "--machine", MACHINE, "--nodes", "16", "--rate", "100"]
    assert main([*command, "--explain"]) == 0
    said = capsys.readouterr()
    assert "core_move_bytes_per_s 1e+09 (9e+08 to 1.1e+09): measured on 20" in said.out and not said.err
    path.write_text(path.read_text().replace('"torch ', '"torch 1.0+'))
    assert main([*command, "--explain"]) == 0
    said = capsys.readouterr()
    assert "core_move_bytes_per_s 2e+09" in said.out
    assert said.err.startswith("measurements of `cputrain bench comm` on ") and "are stale (torch 1.0+" in said.err


def passes(layers: tuple[Layer, ...]) -> tuple[LayerSeconds, ...]:
    """Times of the layers with weights: batch-norms take ten times as long as convolutions."""
    seconds = [0.01 if "conv" in layer.name else 0.1 for layer in layers if layer.weights]
    weights = [sum(layer.weights) for layer in layers if layer.weights]
    return tuple(
        LayerSeconds(weights=count, forward=each, backward=2 * each)
        for count, each in zip(weights, seconds, strict=True)
    )


def test_a_step_in_time_follows_from_the_measured_times_of_layers(measured: Measurement, tmp_path: Path) -> None:
    """Images/s stay those measured; the gradients are ready when the layers' times say so, on several hosts too."""
    env, machine = {"CPUTRAIN_CACHE": str(tmp_path)}, find_machine(MACHINE)
    table = layers_of(RECIPE.model, RECIPE.data)
    save_measurement(training_record(machine, replace(measured, layers=passes(table)), command=COMMAND), env)
    found = find_measured_rate(read_records(machine, env), *WANTED)
    assert found is not None and found.rate.layers == passes(table)
    cores = ("plan.comm_cores=1", "plan.loader_cores=1")  # nearly the threads of the measurement
    recipe = load_recipe("resnet50-skx-256node", ("data.path=synthetic", *cores))
    scenario = Scenario(
        recipe=recipe, machine=machine, link=link_of("opa"), reference=reference_of(machine, recipe, measured=found)
    )
    plain = replace(scenario, reference=reference_of(machine, recipe, measured=replace(found, rate=measured)))
    steps = [model_of(each).step(scenario_setup(each, 4)) for each in (scenario, plain)]
    named = [layer.name for layer in reversed(table)]
    ratios = []
    for step in steps:
        ends = (step.forward_end_s, *step.layer_ends_s)
        times = dict(zip(named, (after - before for before, after in pairwise(ends)), strict=True))
        ratios.append(times["layer4.2.bn2"] / times["layer4.2.conv2"])
    assert ratios[0] == pytest.approx(10, rel=0.1) and ratios[1] < 1
    assert steps[0].step_s == pytest.approx(steps[1].step_s, rel=0.05)
    assert steps[0].buckets[0].ready_s != steps[1].buckets[0].ready_s
    other = replace(scenario, recipe=load_recipe("resnet50-skx-256node", ("model.name=resnet18",)))
    assert all(layer.slowness == (1.0, 1.0) for layer in scenario_setup(other, 1).layers)  # those of another network
    assert model_of(scenario, CONSTANTS).images_per_s(scenario.reference.setup) == pytest.approx(100.0, rel=1e-4)
