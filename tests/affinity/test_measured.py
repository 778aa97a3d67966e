"""What was measured on a machine: read, checked, and used by its plans, with the reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.plan_file import plan_from_dict, plan_to_json
from cputrain.affinity.planner.records import (
    RATE,
    TUNED,
    Record,
    current_versions,
    machine_name,
    read_measured,
    read_records,
    record_path,
)
from cputrain.affinity.planner.request import Measured, Rate, Request, Tuned, tuning_name
from cputrain.affinity.planner.rules import core_rates
from cputrain.affinity.planner.workload import RESNET50, Workload
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.views import plan_to_text
from tests.support.machines import build_machine
from tests.support.plan_facts import reason_of

MACHINE = build_machine(2, 1, 24, 2)
WORKLOAD = replace(RESNET50, name="resnet50 at 224 x 224", assumed=False)
REQUEST = Request(workload=WORKLOAD, local_batch=32)
TUNING = Tuned(
    ppn=4,
    comm_cores=0,
    loader_cores=1,
    allocator="glibc",
    date="2026-01-02",
    why="measured: 4 x 11 is 1.31 times 2 x 23",
)


def rate(name: str, value: float) -> Rate:
    return Rate(name=name, value=value, low=0.9 * value, high=1.1 * value, date="2026-01-02", command="cputrain bench")


def record(kind: str, name: str, **values: Any) -> Record:
    return Record(
        kind=kind,
        name=name,
        machine=machine_name(MACHINE),
        versions=current_versions(),
        date="2026-01-02",
        command="cputrain bench comm",
        values=values,
    )


def keep(made: Record, env: dict[str, str], **fields: Any) -> Path:
    path = record_path(made, env)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {name: getattr(made, name) for name in Record.__slots__}
    path.write_text(json.dumps({"format": 1, **data, **fields}))
    return path


def test_measured_rates_decide_the_cores_and_the_reasons_say_so() -> None:
    job = replace(REQUEST, nodes=16)
    assumed = plan_machine(MACHINE, job)
    slow = Measured(rates=(rate("all-reduce ccl", 2.2e9), rate("decoding libjpeg-turbo", 1400.0)))
    measured = plan_machine(MACHINE, job, measured=slow)
    assert len(assumed.workers[0].comm_pus) < len(measured.workers[0].comm_pus)
    comm, loader = (reason_of(measured, f"{role} cores per worker") for role in ("comm", "loader"))
    assert comm.numbers["core_bytes_per_s"] == 2.2e9
    assert loader.numbers["decoded_per_s"] == pytest.approx(1e9 / (1400 * 204_000))
    assert all(reason.why.endswith("(measured on 2026-01-02)") for reason in (comm, loader))
    assert "measured" not in reason_of(assumed, "comm cores per worker").why
    assert plan_from_dict(json.loads(plan_to_json(measured))) == measured


@pytest.mark.parametrize(
    ("decoder", "pixels", "per_core", "loaders"),
    [
        *(("libjpeg-turbo", 204_000, 700, 1), ("libjpeg-turbo", 60_000, 2381, 1)),
        *(("Pillow", 204_000, 272, 1), ("Pillow", 2_000_000, 28, 2)),
    ],
)
def test_loader_cores_are_as_many_as_the_decoder_and_the_images_need(
    decoder: str, pixels: int, per_core: int, loaders: int
) -> None:
    """24 cores train 49 images/s."""
    workload = replace(WORKLOAD, decoder=decoder, image_pixels=pixels)
    plan = plan_machine(MACHINE, replace(REQUEST, ppn=2, workload=workload))
    reason = reason_of(plan, "loader cores per worker")
    assert round(reason.numbers["decoded_per_s"]) == per_core and reason.why.endswith(f" by {decoder}")
    core_of = MACHINE.core_of
    assert [len({core_of[pu] for pu in worker.loader_pus}) for worker in plan.workers] == [loaders] * 2


def test_a_training_rate_counts_for_its_network_and_precision_and_resnet_50_s_for_others() -> None:
    measured = Measured(rates=(rate("training resnet50 at 224 x 224, bf16", 200.0), rate("training lenet, bf16", 3.0)))

    def gflops(workload: Workload) -> float:
        return core_rates(MACHINE, workload, measured).gflops

    bf16 = replace(WORKLOAD, precision="bf16")
    assert (gflops(bf16), gflops(replace(bf16, name="lenet")), gflops(replace(bf16, name="vgg"))) == (200, 3, 200)
    assert gflops(WORKLOAD) == gflops(RESNET50) != 200


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        *(("spr-8480plus-2s", "float32", 90), ("spr-8480plus-2s", "bf16", 150), ("cpx-8376h-8s", "bf16", 150)),
        *(("skx-8160-2s", "bf16", 90), ("bdw-e5-2699v4-2s", "bf16", 50)),
    ],
)
def test_training_is_faster_in_bf16_where_there_are_instructions_for_it(name: str, precision: str, expected) -> None:
    machine, workload = find_machine(name), replace(WORKLOAD, precision=precision)
    rates = core_rates(machine, workload, Measured())
    assert rates.gflops == expected
    plan = plan_machine(machine, replace(REQUEST, workload=workload))
    reason, cores = reason_of(plan, "loader cores per worker"), len(machine.cores) / len(plan.workers)
    assert reason.numbers["trained_per_s"] == pytest.approx(cores * expected / workload.gflop)
    assert ("in bf16" in reason.why) == (precision == "bf16")


def test_a_rate_measured_on_arm_replaces_the_assumed_one() -> None:
    machine, measured = (
        find_machine("graviton4-1s"),
        Measured(rates=(rate("training resnet50 at 224 x 224, float32", 33.0),)),
    )
    for found, gflops, assumed in ((Measured(), 50, True), (measured, 33, False)):
        assert core_rates(machine, WORKLOAD, found).gflops == gflops
        plan = plan_machine(machine, Request(), measured=found)
        why = reason_of(plan, "loader cores per worker").why
        assert ("assumed" in why, "measured on 2026-01-02" in why) == (assumed, not assumed)


def test_the_explanation_shows_what_was_measured_beside_what_is_cited() -> None:
    plan = plan_machine(MACHINE, REQUEST, measured=Measured(rates=(rate("all-reduce ccl", 2.5e9),)))
    text = " ".join(plan_to_text(plan, explained=True).split())
    assert "GB/s per comm core 2.5 (2.25-2.75): measured here on 2026-01-02 by `cputrain bench`" in text
    assert "training, GFLOP/s per core avx2 50" in text


def test_a_tuned_plan_fills_what_the_request_leaves_open() -> None:
    measured = Measured(tuned=TUNING)
    plan = plan_machine(MACHINE, REQUEST, measured=measured)
    assert [len(plan.workers), len(plan.workers[0].loader_pus)] == [4, 2]
    assert reason_of(plan, "workers per host").why == TUNING.why
    assert len(plan_machine(MACHINE, replace(REQUEST, loader_cores=1), measured=measured).workers) == 4
    many = plan_machine(MACHINE, replace(REQUEST, nodes=8), measured=measured)
    assert len(many.workers) == 4 and reason_of(many, "comm cores per worker").numbers["link_gbit"] == 100


@pytest.mark.parametrize(
    "request_",
    [
        replace(REQUEST, ppn=2),
        replace(REQUEST, threads=4),
        replace(REQUEST, comm_cores=1),
        replace(REQUEST, smt=True),
        replace(REQUEST, balance="batch"),
        replace(REQUEST, profile="bkm-2018"),
        replace(REQUEST, occupied=(0,)),
        replace(REQUEST, most_workers=2),
    ],
)
def test_a_tuned_plan_is_left_out_where_the_request_is_for_another_one(request_: Request) -> None:
    assert (
        plan_machine(MACHINE, request_, measured=Measured(tuned=TUNING)).workers
        == plan_machine(MACHINE, request_).workers
    )


def test_records_of_this_machine_and_these_versions_are_read(tmp_path: Path) -> None:
    env = {"CPUTRAIN_CACHE": str(tmp_path)}
    assert read_measured(MACHINE, REQUEST, env) == read_measured(MACHINE, REQUEST, {"HOME": "/nowhere"}) == Measured()
    name = tuning_name(REQUEST)
    assert name is not None and tuning_name(replace(REQUEST, workload=RESNET50)) is None
    keep(record(RATE, "all-reduce ccl", value=2e9, low=1e9, high=3e9), env)
    keep(record(TUNED, name, ppn=4, comm_cores=0, loader_cores=1, allocator="glibc", why="measured: x"), env)
    found = read_measured(MACHINE, REQUEST, env)
    assert found.tuned is not None and found.tuned.ppn == 4 and found.notes == ()
    known = found.rate("all-reduce ccl")
    assert known is not None and (known.value, known.command) == (2e9, "cputrain bench comm")
    other = read_measured(MACHINE, replace(REQUEST, local_batch=16), env)
    (note,) = other.notes
    assert other.tuned is None and "batch of 16 a worker: run it again with these settings" in note, note
    assert read_measured(build_machine(2, 1, 12, 2), REQUEST, env) == Measured()


def test_a_stale_record_is_told_and_not_used(tmp_path: Path) -> None:
    env = {"CPUTRAIN_CACHE": str(tmp_path)}
    was = ["clock governor powersave" if text.startswith("clock") else text for text in current_versions()]
    keep(record(RATE, "all-reduce ccl", value=2e9, low=1e9, high=3e9), env, versions=was)
    found = read_measured(MACHINE, REQUEST, env)
    assert found.rates == ()
    (note,) = found.notes
    assert note == (
        "measurements of `cputrain bench comm` on 2026-01-02 are stale (clock governor powersave, now "
        f"{current_versions()[-1]}): run it again"
    )
    assert note in plan_machine(MACHINE, REQUEST, measured=found).warnings
    other = record(RATE, "decoding turbo", value=2.0, low=1.0, high=3.0)
    keep(other, env, versions=was, command="cputrain bench data")
    (note,) = read_measured(MACHINE, REQUEST, env).notes
    assert note.startswith("measurements of `cputrain bench comm`, `cputrain bench data` on 2026-01-02 are stale (")
    assert note.endswith("): run them again")


@pytest.mark.parametrize(
    "fields",
    [
        {"format": 2},
        {"versions": "torch"},
        {"values": {"value": -1.0, "low": -1.0, "high": 1.0}},
        {"values": {"value": 5.0, "low": 1.0, "high": 2.0}},
        {"values": {"value": "2", "low": 1, "high": 3}},
        {"kind": TUNED},
    ],
)
def test_a_damaged_record_is_named_and_not_used(fields: dict[str, Any], tmp_path: Path) -> None:
    env = {"CPUTRAIN_CACHE": str(tmp_path)}
    path = keep(record(RATE, "all-reduce ccl", value=2e9, low=1e9, high=3e9), env, **fields)
    records = read_records(MACHINE, env)
    assert records.usable == () and str(path) in records.notes[0] and "measure again, or delete it" in records.notes[0]


def test_the_clock_governor_is_one_of_the_versions(tmp_path: Path) -> None:
    folder = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    folder.mkdir(parents=True)
    (folder / "scaling_governor").write_text("powersave\n")
    assert current_versions(tmp_path)[-1] == "clock governor powersave"


def test_measurements_count_for_machines_with_the_same_parts_and_limits() -> None:
    name = machine_name(MACHINE)
    assert name == "made machine, 2 packages, 2 NUMA nodes, 48 of 48 cores, 96 CPUs, 128 GiB"
    less = tuple(replace(node, memory_bytes=node.memory_bytes - (1 << 30)) for node in MACHINE.numa_nodes)
    assert machine_name(replace(MACHINE, numa_nodes=less)) == name  # what the kernel keeps
    others = (
        replace(MACHINE, memory_limit_bytes=32 << 30),
        replace(MACHINE, cpu_quota=8.0),
        replace(MACHINE, allowed_pus=MACHINE.allowed_pus[:4]),
        build_machine(2, 1, 24, 2, memory_bytes=128 << 30),
    )
    assert len({name, *map(machine_name, others)}) == 5
