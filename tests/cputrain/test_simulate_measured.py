"""Measured rates: kept, found, and used by predictions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from affinity.topology.catalog import find_machine
from cputrain.cli import main
from cputrain.recipe.loading import load_recipe
from cputrain.simulate.measured import Measurement, find, keep, versions

MACHINE = "pack:2 core:16 pu:2"
RECIPE = load_recipe("resnet50-skx-256node")


@pytest.fixture
def measured() -> Measurement:
    machine = find_machine(MACHINE)
    return Measurement(
        model=machine.model,
        cores=32,
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
        date="2026-01-02",
        versions=versions(),
    )


def test_a_measurement_is_found_for_its_machine_and_precision(measured: Measurement, tmp_path: Path) -> None:
    env, machine = {"CPUTRAIN_CACHE": str(tmp_path)}, find_machine(MACHINE)
    assert find(machine, RECIPE, env) == (None, "")
    other = replace(measured, network="resnet18", date="2026-02-02")
    assert keep(measured, env) != keep(other, env)
    assert find(machine, RECIPE, env) == (measured, "")  # its own network before a newer one
    assert find(find_machine("pack:2 core:8 pu:2"), RECIPE, env) == (None, "")
    assert find(machine, load_recipe("resnet50-skx-256node", ("precision=bf16",)), env) == (None, "")


def test_a_measurement_with_other_versions_is_named_and_not_used(measured: Measurement, tmp_path: Path) -> None:
    env = {"CPUTRAIN_CACHE": str(tmp_path)}
    was = tuple("torch 1.0" if text.startswith("torch") else text for text in measured.versions)
    keep(replace(measured, versions=was), env)
    found, note = find(find_machine(MACHINE), RECIPE, env)
    assert found is None
    assert note.startswith("the rate measured on 2026-01-02 is not used (torch 1.0, now torch ")


def test_the_clock_governor_is_one_of_the_versions(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    folder.mkdir(parents=True)
    (folder / "scaling_governor").write_text("powersave\n")
    assert versions(tmp_path)[-1] == "clock governor powersave"


def test_predictions_start_from_the_measured_rate(
    measured: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CPUTRAIN_CACHE", str(tmp_path))
    command = ["simulate", "resnet50-skx-256node", "--machine", MACHINE, "--nodes", "1", "data.path=synthetic"]
    assert main(command) == 2
    assert "run `cputrain bench model` there" in capsys.readouterr().err
    keep(measured, {"CPUTRAIN_CACHE": str(tmp_path)})
    settings = ("comm.backend=gloo", "plan.threads=15", "plan.loader_cores=1", "--workers", "2", "--format", "json")
    assert main([*command, *settings]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"][0]["images_per_s"] == pytest.approx(100, rel=1e-3)
    assert "measured on 2026-01-02" in answer["assumptions"][0]["source"]


@pytest.mark.processes
def test_bench_model_trains_here_and_keeps_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CPUTRAIN_CACHE", str(tmp_path))
    small = (
        "model.name=lenet",
        "model.zero_gamma=none",
        "data.crop=28",
        "batch.local=4",
        "comm.backend=gloo",
        "plan.ppn=1",
    )
    assert main(["bench", "model", "imagefolder", *small, "--steps", "2"]) == 0
    assert "lenet at 28 x 28, float32: " in capsys.readouterr().out
    (path,) = (tmp_path / "rates").glob("*.json")
    kept = json.loads(path.read_text())
    assert kept["low"] <= kept["images_per_s"] <= kept["high"] and kept["workers"] == 1
    assert main(["bench", "model", "imagefolder", *small, "optim.name=nothing"]) == 2
