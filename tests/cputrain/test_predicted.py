"""Plans against the predicted step time."""

import json
import random
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cputrain.affinity.errors import InputError, as_field, as_option
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.plan_file import plan_from_dict, plan_to_json
from cputrain.affinity.planner.request import Measured, Rate, Request, Tuned, training_name
from cputrain.affinity.planner.rules import core_rates
from cputrain.affinity.planner.workload import RESNET50
from cputrain.affinity.topology.catalog import find_machine, named_machine
from cputrain.predict.assumptions import CONSTANTS, published_runs
from cputrain.predict.host import host_model, published_core_flops, setup_of_plan
from cputrain.predict.layers import layers_of_workload
from cputrain.predict.next_best import LOSES, compare_plan, compared_plan
from cputrain.studies.simulate.predict import core_flops_of, published_reference

MACHINES = Path(__file__).parents[1] / "machines"
checked_plan = partial(plan_machine, compare=compare_plan)


def asked(nodes: int = 1, gbit: float = 100.0, **fields: object) -> Request:
    return replace(Request(nodes=nodes, link_gbit=gbit, local_batch=32, workload=RESNET50), **fields)


def images_per_s(plan: Plan, like: Plan | None = None) -> float:
    model = host_model(like or plan)
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
        other = plan_machine(machine, asked(16, **{fields[each.what]: each.other}))
        slower = 100 * (1 - images_per_s(other, plan) / images_per_s(plan))
        assert slower == pytest.approx(each.slower_percent, abs=0.06)
        (reason,) = (reason for reason in plan.reasons if reason.what == "next best")
        assert f"{abs(each.slower_percent):g} % {'slower' if each.slower_percent >= 0 else 'faster'}" in reason.value


KNOWN = replace(RESNET50, name="resnet50 at 224 x 224", assumed=False)
NUMA_8 = "numa:1(memory=68719476736) core:8 pu:1"


def test_the_faster_number_replaces_that_of_a_rule_that_loses() -> None:
    machine = find_machine(NUMA_8)
    rules, plan = (make(machine, asked(workload=KNOWN)) for make in (plan_machine, checked_plan))
    assert [len(each.workers[0].loader_pus) for each in (rules, plan)] == [1, 0]
    (reason,) = (reason for reason in plan.reasons if reason.what == "loader cores per worker")
    assert (reason.value, "the rule's 1 is predicted to be" in reason.why) == ("0", True)
    (loader,) = (each for each in plan.next_best if each.what == "loader cores per worker")
    assert (loader.value, loader.other) == (0, 1) and loader.slower_percent > 100 * LOSES
    assert images_per_s(plan, rules) > (1 + LOSES) * images_per_s(rules, rules)
    assert plan_from_dict(json.loads(plan_to_json(plan))) == plan


@pytest.mark.parametrize(
    "fields",
    [
        {},  # an assumed network
        {"workload": KNOWN, "loader_cores": 1},
        {"workload": KNOWN, "profile": "bkm-2018"},
    ],
)
def test_what_is_set_and_what_is_planned_for_an_assumed_network_stays(fields: dict[str, object]) -> None:
    machine = find_machine(NUMA_8)
    rules, plan = (make(machine, asked(**fields)) for make in (plan_machine, checked_plan))
    assert plan.workers == rules.workers
    choices = {choice.what: choice for choice in compared_plan(rules)[1]}
    if "profile" not in fields:
        loader = choices["loader cores per worker"]
        assert loader.loss > LOSES and loader.kept.startswith("not taken: ")
        (reason,) = (reason for reason in plan.reasons if reason.what == "next best")
        assert f"faster ({loader.kept})" in reason.value


def test_other_workers_are_taken_only_where_the_global_batch_stays() -> None:
    """More workers with as many images each would be another training."""
    machine = find_machine(str(MACHINES / "gen-g4dnmetal.tar.xz"))
    local = checked_plan(machine, asked(16, 200.0, workload=KNOWN))
    whole = checked_plan(machine, asked(16, 200.0, workload=KNOWN, global_batch=16 * 192))
    assert (len(local.workers), len(whole.workers)) == (2, 4)
    assert whole.request.global_batch == 16 * 192 and all(worker.comm_pus for worker in whole.workers)
    rules = plan_machine(machine, whole.request)
    assert images_per_s(whole, rules) > (1 + LOSES) * images_per_s(rules, rules)


@pytest.mark.parametrize("images", [6, 7, 14, 64, 112])
def test_workers_that_do_not_divide_the_images_gain_nothing_by_it(images: int) -> None:
    """Images are those of the step, not those of its largest share times the workers."""
    machine = named_machine("skx-8160-2s")
    request = asked(16, workload=KNOWN, global_batch=16 * images)
    rules, plan = plan_machine(machine, request), checked_plan(machine, request)
    model = host_model(rules)
    assert model.images == images
    if images % len(rules.workers) == 0:
        assert images % len(plan.workers) == 0


def test_backward_passes_of_other_workers_are_those_of_their_plans() -> None:
    machine = named_machine("spr-8480plus-2s")
    rules = plan_machine(machine, asked(4, workload=KNOWN, global_batch=256, local_batch=16))
    other = plan_machine(machine, asked(4, workload=KNOWN, global_batch=256, local_batch=16, ppn=2))
    setup = host_model(rules).of(other)
    assert (setup.local_batch, setup.accumulation) == (other.workers[0].local_batch, 2) == (16, 2)


@pytest.mark.parametrize("name", ["genoa-9654-2s-nps4", "graviton4-2s", "clx-8280-2s"])
@pytest.mark.parametrize("images", [1, 8, 64])
def test_no_core_is_faster_than_twice_its_cited_rate(name: str, images: int) -> None:
    """Small batches, and more bytes than the memory moves, are no reason for a faster core."""
    machine = named_machine(name)
    model = host_model(plan_machine(machine, asked(16, workload=KNOWN, local_batch=images)))
    assert model.speed.core_flops <= 2e9 * core_rates(machine, KNOWN, Measured()).gflops


def test_a_tuned_number_of_workers_stays_where_comm_cores_are_compared() -> None:
    tuned = Tuned(ppn=1, comm_cores=0, loader_cores=0, allocator="auto", date="2026-11-27", why="measured")
    plan = checked_plan(named_machine("skx-8160-2s"), asked(2, workload=KNOWN), measured=Measured(tuned=tuned))
    assert len(plan.workers) == 1
    assert next(each for each in plan.next_best if each.what == "workers per host").value == 1


def test_comm_cores_are_never_given_up() -> None:
    machine = find_machine("pack:2 numa:1(memory=68719476736) core:18 pu:2")
    plan = checked_plan(machine, asked(16, 200.0, workload=KNOWN))
    assert all(worker.comm_pus for worker in plan.workers)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("backend", ["ccl", "gloo"])
def test_what_a_recipe_says_of_a_step_is_in_the_setup(accumulation: int, backend: str) -> None:
    workload = replace(KNOWN, backend=backend, compression="bf16", bucket_mib=8.0, norms=True)
    setup = setup_of_plan(
        plan_machine(named_machine("skx-8160-2s"), asked(16, workload=workload, accumulation=accumulation))
    )
    assert (setup.local_batch, setup.accumulation) == (32, accumulation)
    assert (setup.backend, setup.compression, setup.bucket_mib) == (backend, "bf16", 8.0)
    assert setup.algorithm == ("rabenseifner" if backend == "ccl" else "ring")
    assert setup.optimizer_passes == 7


@pytest.mark.parametrize("name", ["skx-8160-2s", "knl-7210-quad-cache", "graviton4-2s", "spr-8480plus-2s"])
def test_the_model_gives_the_rate_that_was_measured(name: str) -> None:
    """Images/s of the whole host with generated images; a faster measurement never gives a slower host."""
    machine, what = named_machine(name), training_name(KNOWN.name, "float32")

    def predicted(gflops: float) -> tuple[float, int]:
        rate = Rate(name=what, value=gflops, low=gflops, high=gflops, date="2026-11-27", command="cputrain bench model")
        plan = plan_machine(machine, asked(workload=KNOWN), measured=Measured(rates=(rate,)))
        model = host_model(plan)
        generated = replace(model.setup, decoded_per_core_s=None)
        return model.images_per_s(generated), sum(worker.intra_op for worker in plan.workers)

    for gflops in (2.0, 10.0, 20.0):
        rate, cores = predicted(gflops)
        assert rate == pytest.approx(gflops * cores / KNOWN.gflop, rel=1e-3)
    rising = [predicted(gflops)[0] for gflops in (50.0, 200.0, 500.0, 1e3, 1e4, 1e5)]
    assert all(faster > 0.99 * slower for slower, faster in pairwise(rising))  # faster hosts have more loader cores


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
    plan = checked_plan(named_machine("skx-8180-1s"), asked(workload=KNOWN, global_batch=64))
    (workers,) = (each for each in plan.next_best if each.what == "workers per host")
    assert (len(plan.workers), workers.other) == (2, 1) and workers.slower_percent < -100 * LOSES
    (reason,) = (reason for reason in plan.reasons if reason.what == "next best")
    assert reason.value.startswith(f"1 worker {-workers.slower_percent:g} % faster (not taken: more threads")


def test_slower_cores_compute_unless_e_cores_leaves_them_out() -> None:
    machine = find_machine(str(MACHINES / "nvidia-dgx-gb10.tar.xz"))
    plan = checked_plan(machine, asked(workload=KNOWN, local_batch=1))
    assert len(plan.workers) == 2
    for wording, setting in ((as_option, "--e-cores off"), (as_field, "e_cores=off")):
        (shown,) = (reason.value for reason in plan.render(wording).reasons if reason.what == "next best")
        assert f"faster (not taken: {setting} takes it)" in shown


def test_all_types_of_cores_are_compared_with_the_fastest_alone() -> None:
    machine = find_machine(str(MACHINES / "nvidia-dgx-gb10.tar.xz"))
    (kinds,) = (
        each for each in checked_plan(machine, asked(ppn=1)).next_best if each.what == "computing cores per host"
    )
    assert kinds.value == 19 and kinds.other < kinds.value and kinds.slower_percent > 100 * LOSES


def test_one_worker_of_a_gb10_computes_on_all_cores_at_the_pace_of_the_slow_ones() -> None:
    machine = find_machine(str(MACHINES / "nvidia-dgx-gb10.tar.xz"))
    plan = checked_plan(machine, asked(ppn=1))
    assert (plan.workers[0].intra_op, plan.workers[0].loader_pus) == (19, (0,))
    fast = plan_machine(machine, asked(ppn=1, e_cores="off", loader_cores=0))
    assert fast.workers[0].intra_op == 10
    assert images_per_s(plan, plan) / images_per_s(fast, plan) == pytest.approx(0.72 * 19 / 10, rel=0.1)


@pytest.mark.parametrize("name", ["torchvision:resnet50", "timm:resnet50.a1_in1k", "resnet50"])
def test_a_library_s_network_is_predicted_layer_by_layer(name: str) -> None:
    assert len(layers_of_workload(replace(RESNET50, network=name))) > 100


@pytest.mark.parametrize(
    ("machine", "fields"),
    [
        ("spr-8480plus-2s", {"nodes": 16, "profile": "mlperf-spr", "threads": 55}),
        ("turin-9755-1s-nps4", {"nodes": 16, "profile": "mlperf-spr", "threads": 32, "e_cores": "off"}),
        ("knl-7250-quad-cache", {"nodes": 16, "profile": "mlperf-spr", "ppn": 16, "loader_cores": 4}),
        ("graviton4-1s", {"profile": "bkm-2018", "threads": 24, "comm_cores": 2}),
    ],
)
def test_settings_that_fit_a_profile_only_are_planned(machine: str, fields: dict[str, Any]) -> None:
    plan = checked_plan(named_machine(machine), asked(**fields))
    assert len(plan.workers) == len(plan_machine(named_machine(machine), asked(**fields)).workers)
    (without,) = (reason for reason in plan.reasons if reason.what == "without the profile")
    assert without.value == "no plan for these settings" and "worker" in without.why


@pytest.mark.slow
def test_whatever_the_rules_plan_is_compared() -> None:
    """Random requests; comparisons with plans that do not fit are left out."""
    machines = [named_machine(name) for name in ("spr-8480plus-2s", "knl-7250-quad-flat", "skx-6140-4s")]
    rng, planned = random.Random(5), 0
    for _ in range(20):
        machine = rng.choice(machines)
        cores = len(machine.allowed_cores)
        choices: dict[str, tuple[Any, ...]] = {
            "ppn": (None, None, 1, 2, 4, 16),
            "threads": (None, None, 8, cores // 4, cores // 2 - 1, cores - 1),
            "comm_cores": (None, None, 0, 2, 8),
            "loader_cores": (None, None, 0, 1, 4),
            "profile": ("auto", "bkm-2018", "mlperf-spr"),
            "global_batch": (None, None, 256, 8192),
            "most_workers": (None, None, 16),
            "nodes": (1, 16),
            "workload": (RESNET50, KNOWN),
        }
        request = asked(**{name: rng.choice(values) for name, values in choices.items()})
        with suppress(InputError):
            plan_machine(machine, request)
            planned += 1
            try:
                checked_plan(machine, request)
            except InputError as error:
                raise AssertionError(f"{machine.name} {request}") from error
    assert planned > 8


@pytest.mark.parametrize("name", ["knl-7250-quad-cache", "knl-7250-snc4-flat", "knl-7210-quad-flat"])
def test_a_xeon_phi_host_has_the_comm_core_that_the_model_says_it_needs(name: str) -> None:
    machine = named_machine(name)
    plan = checked_plan(machine, asked(workload=KNOWN))
    assert {len(worker.comm_pus) for worker in plan.workers} == {len(machine.allowed_cores[0].pus)}
    assert images_per_s(plan, plan) > (1 + LOSES) * images_per_s(plan_machine(machine, asked(workload=KNOWN)), plan)
    assumed = checked_plan(machine, asked())
    (shown,) = (reason.value for reason in assumed.reasons if reason.what == "next best")
    assert "1 comm core" in shown and "% faster (not taken: the network is assumed)" in shown


@pytest.mark.parametrize("name", ["skx-8160-2s", "genoa-9654-2s-nps4", "spr-8480plus-2s"])
def test_a_comm_core_on_one_host_is_shown_but_not_taken_elsewhere(name: str) -> None:
    plan = checked_plan(named_machine(name), asked(workload=KNOWN))
    assert not any(worker.comm_pus for worker in plan.workers)
    (comm,) = (each for each in plan.next_best if each.what == "comm cores per worker")
    assert comm.other == 1 and comm.slower_percent < 0
    (shown,) = (reason.value for reason in plan.reasons if reason.what == "next best")
    doubt = "not taken: the model was not measured with comm cores on one host"
    assert (doubt in shown) == (comm.slower_percent < -100 * LOSES)


def test_one_worker_alone_communicates_with_nobody() -> None:
    plan = checked_plan(named_machine("skx-8160-1s"), asked(workload=KNOWN))
    assert len(plan.workers) == 1 and "comm cores per worker" not in [each.what for each in plan.next_best]


def test_the_rule_for_small_hosts_names_the_processors_that_were_measured() -> None:
    plan = plan_machine(find_machine("pack:1 core:2 pu:1"), Request())
    (why,) = (reason.why for reason in plan.reasons if reason.what == "workers per host")
    assert "(two cores of AMD Zen 3: 1.2-1.35x over one worker of two threads; of Zen 4: about equal)" in why
    assert "without AMX" in why and why.endswith("cputrain tune measures this host")
