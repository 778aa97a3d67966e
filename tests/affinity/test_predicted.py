"""Plans against the predicted step time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.planner import (
    CONSTANTS,
    LOSES,
    RESNET50,
    Plan,
    Request,
    checked_plan,
    choices_of,
    host_model,
    layers_of_workload,
    plan_from_dict,
    plan_machine,
    plan_to_json,
    published_core_flops,
    published_runs,
)
from cputrain.affinity.topology import find_machine, named_machine
from cputrain.simulate import core_flops_of, published_reference

MACHINES = Path(__file__).parents[1] / "machines"


def asked(nodes: int = 1, gbit: float = 100.0, **fields: object) -> Request:
    return replace(Request(nodes=nodes, link_gbit=gbit, local_batch=32, workload=RESNET50), **fields)


def images_per_s(plan: Plan, like: Plan | None = None) -> float:
    model = host_model(like or plan)
    assert model is not None
    return model.images_per_s(model.of(plan))


@pytest.mark.parametrize("nodes", [16, 256])
def test_22_and_2_on_the_8160_come_out_of_the_model(nodes: int) -> None:
    plan = checked_plan(named_machine("skx-8160-2s"), asked(nodes))
    assert [(worker.intra_op, len(worker.comm_pus), len(worker.loader_pus)) for worker in plan.workers] == [
        (22, 2, 2)  # CPUs: two of the core that communicates, two of the one that loads
    ] * 2
    assert plan.next_best and all(each.slower_percent > 1 for each in plan.next_best)


def test_the_planner_and_simulate_derive_the_same_speed_from_a_published_run() -> None:
    run = next(run for run in published_runs() if run.name == "tf-8160-256")
    assert published_core_flops(run, CONSTANTS) == pytest.approx(
        core_flops_of(published_reference(run), CONSTANTS), rel=1e-3
    )


@pytest.mark.parametrize("nodes", [1, 16])
def test_a_faster_link_is_never_slower(nodes: int) -> None:
    machine = named_machine("skx-8160-2s")
    rates = [images_per_s(plan_machine(machine, asked(nodes, gbit, comm_cores=1))) for gbit in (1, 10, 100, 400)]
    assert rates == sorted(rates)
    assert (rates[-1] > rates[0]) == (nodes > 1)


def test_what_next_best_says_is_what_a_plan_with_that_value_is_predicted() -> None:
    machine = named_machine("skx-8160-2s")
    plan = checked_plan(machine, asked(16))
    fields = {
        "workers per host": "ppn",
        "comm cores per worker": "comm_cores",
        "loader cores per worker": "loader_cores",
    }
    assert [each.what for each in plan.next_best] == list(fields)
    for each in plan.next_best:
        # Another number of workers has comm and loader cores by the rules, or none of them if that is better.
        without = ({}, {"comm_cores": 0}, {"loader_cores": 0}) if each.what == "workers per host" else ({},)
        others = [plan_machine(machine, asked(16, **{fields[each.what]: each.other}, **one)) for one in without]
        slower = 100 * (1 - max(images_per_s(other, plan) for other in others) / images_per_s(plan))
        assert slower == pytest.approx(each.slower_percent, abs=0.06)
        (reason,) = (reason for reason in plan.reasons if reason.what == "next best")
        assert f"{abs(each.slower_percent):g} % {'slower' if each.slower_percent >= 0 else 'faster'}" in reason.value


def test_a_rule_that_loses_stays_and_the_faster_number_is_shown() -> None:
    machine = find_machine("numa:1(memory=68719476736) core:8 pu:1")
    rules, plan = (make(machine, asked()) for make in (plan_machine, checked_plan))
    assert [len(each.workers[0].loader_pus) for each in (rules, plan)] == [1, 1]
    (loader,) = (each for each in plan.next_best if each.what == "loader cores per worker")
    assert loader.other == 0 and loader.slower_percent < -100 * LOSES
    model = host_model(plan)
    assert model is not None
    (lost,) = (choice.loss for choice in choices_of(plan, model) if choice.what == loader.what)
    assert lost > LOSES


def test_unequal_domains_wait_for_the_slowest() -> None:
    """Equal workers of three cores are as fast as workers of three and five; proportional batches use all eight."""
    unequal = find_machine("numa:2(memory=68719476736) core:4 pu:1")
    plan = plan_machine(unequal, asked(ppn=2, cores=(0, 1, 2, 4, 5, 6, 7)))
    equal = plan_machine(unequal, asked(ppn=2, cores=(0, 1, 2, 4, 5, 6)))
    balanced = plan_machine(unequal, asked(ppn=2, cores=(0, 1, 2, 4, 5, 6, 7), balance="batch"))
    assert images_per_s(plan, plan) == pytest.approx(images_per_s(equal, plan), rel=0.01)
    assert images_per_s(balanced, balanced) > 1.1 * images_per_s(plan, plan)


def test_a_plan_with_and_one_without_next_best_are_read() -> None:
    plan = checked_plan(named_machine("skx-8160-2s"), asked(16))
    data = json.loads(plan_to_json(plan))
    assert plan_from_dict(data) == plan
    del data["next_best"], data["request"]["fabric"]
    assert plan_from_dict(data) == replace(plan, next_best=())


def test_small_hosts_keep_the_measured_worker_a_core() -> None:
    plan = checked_plan(find_machine("numa:1(memory=34359738368) core:2 pu:1"), asked())
    assert len(plan.workers) == 2
    assert plan.next_best == ()


def test_a_larger_worker_than_published_practice_has_is_shown_but_not_taken() -> None:
    machine = named_machine("knl-7210-quad-cache")
    plan = checked_plan(machine, asked())
    (workers,) = (each for each in plan.next_best if each.what == "workers per host")
    assert (len(plan.workers), workers.other) == (4, 1) and workers.slower_percent < -100 * LOSES
    (reason,) = (reason for reason in plan.reasons if reason.what == "next best")
    assert reason.value.startswith(f"1 worker {-workers.slower_percent:g} % faster")


def test_one_worker_of_a_gb10_computes_on_all_cores_at_the_pace_of_the_slow_ones() -> None:
    machine = find_machine(str(MACHINES / "nvidia-dgx-gb10.tar.xz"))
    plan = checked_plan(machine, asked(ppn=1))
    assert (plan.workers[0].intra_op, plan.workers[0].loader_pus) == (19, (0,))
    fast = plan_machine(machine, asked(ppn=1, e_cores="off", loader_cores=0))
    assert fast.workers[0].intra_op == 10
    assert images_per_s(plan, plan) / images_per_s(fast, plan) == pytest.approx(0.72 * 19 / 10, rel=0.1)


@pytest.mark.parametrize("name", ["torchvision:resnet50", "timm:resnet50.a1_in1k", "resnet50"])
def test_a_library_s_network_is_predicted_layer_by_layer(name: str) -> None:
    assert len(layers_of_workload(replace(RESNET50, name=f"{name} at 224 x 224"))) > 100
