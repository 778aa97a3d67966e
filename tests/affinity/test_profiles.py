"""Published practice, to the letter."""

from dataclasses import replace

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.views import plan_to_text
from tests.support.machines import build_machine

IOMP = Runtime(openmp="libiomp5", allocator="tcmalloc", preload=("/a/libiomp5.so",))


def plan(name: str, profile: str, **fields: object) -> Plan:
    return plan_machine(find_machine(name), Request(profile=profile, nodes=256, **fields), IOMP)


def test_the_256_node_hosts() -> None:
    """2 x 24 cores: 2 workers, intra-op 22, inter-op 2, KMP_BLOCKTIME=1, KMP_AFFINITY as published."""
    made = plan("skx-8160-2s", "bkm-2018")
    assert [(worker.intra_op, worker.inter_op) for worker in made.workers] == [(22, 2)] * 2
    env = dict(made.workers[1].env)
    assert env["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    assert (env["KMP_BLOCKTIME"], env["OMP_NUM_THREADS"]) == ("1", "22")
    assert (env["CCL_WORKER_COUNT"], env["CCL_WORKER_AFFINITY"]) == ("2", "22,23,46,47")
    assert made.workers[1].compute_pus == tuple(range(24, 46))
    assert any("profile bkm-2018" in reason.why for reason in made.reasons)


def test_the_256_node_hosts_are_planned_for_libiomp5_unless_another_runtime_is_requested(golden) -> None:
    """The profile decides the runtime of another machine; on this host it is the one that is loaded."""
    machine = find_machine("skx-8160-2s")
    request = Request(profile="bkm-2018", nodes=256)
    elsewhere = plan_machine(machine, request, Runtime())
    env = dict(elsewhere.workers[0].env)
    assert (env["KMP_AFFINITY"], env["KMP_BLOCKTIME"]) == ("granularity=fine,compact,1,0", "1")
    why = next(reason.why for reason in elsewhere.reasons if reason.what == "OpenMP runtime")
    assert why.startswith("profile bkm-2018: ") and "pip install intel-openmp" in why
    golden("skx-8160-2s-bkm-2018.txt", plan_to_text(elsewhere))
    requested = plan_machine(machine, replace(request, openmp="libgomp"), Runtime())
    here = plan_machine(machine, request, Runtime(origin="/torch/lib/libgomp.so.1, loaded by torch"))
    for plan in (requested, here):
        assert "OMP_PLACES" in dict(plan.workers[0].env) and "KMP_BLOCKTIME" not in dict(plan.workers[0].env)
    assert not requested.warnings and "planned for libgomp, not libiomp5 (profile bkm-2018" in here.warnings[0]


def test_mlperf_on_2_x_28_cores() -> None:
    made = plan("skx-8180-2s", "bkm-2018")
    assert [worker.intra_op for worker in made.workers] == [12] * 4


@pytest.mark.parametrize("mode", ["quad-cache", "quad-flat", "snc4-flat", "snc4-cache"])
def test_xeon_phi_has_a_worker_a_quadrant_and_four_comm_threads(mode: str) -> None:
    made = plan(f"knl-7250-{mode}", "bkm-2018")
    assert len(made.workers) == 4
    env = dict(made.workers[0].env)
    assert env["CCL_WORKER_COUNT"] == "4"
    assert len(env["CCL_WORKER_AFFINITY"].split(",")) == 16


def test_mlperf_on_sapphire_rapids() -> None:
    """One worker a package, one loader core, the others compute, eight oneCCL threads on their second threads."""
    made = plan("spr-8480plus-2s", "mlperf-spr")
    assert [(worker.intra_op, worker.loader_pus) for worker in made.workers] == [(55, (0, 112)), (55, (56, 168))]
    core_of = made.machine.core_of
    for worker in made.workers:
        assert len(worker.comm_pus) == 8
        assert {core_of[pu].pus[1] for pu in worker.compute_pus} >= set(worker.comm_pus)
    assert dict(made.workers[0].env)["CCL_WORKER_AFFINITY"].count(",") == 15


def test_requested_values_win_over_the_profile() -> None:
    made = plan("skx-8160-2s", "bkm-2018", ppn=4, comm_cores=1)
    assert [worker.intra_op for worker in made.workers] == [11] * 4


@pytest.mark.parametrize("profile", ["bkm-2018", "mlperf-spr"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 3, 2), (2, 2, 5, 2), (1, 2, 9, 4)])
def test_profiles_fit_small_hosts_too(profile: str, shape: tuple[int, int, int, int]) -> None:
    machine = build_machine(*shape)
    for ppn in (None, 1, len(machine.cores)):
        made = plan_machine(machine, Request(profile=profile, ppn=ppn), Runtime())
        assert ppn is None or len(made.workers) == ppn


def test_unknown_names_and_contradictions_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean bkm-2018"):
        plan("skx-8160-2s", "bkm2018")
    with pytest.raises(InputError, match="leave smt off"):
        plan("spr-8480plus-2s", "mlperf-spr", smt=True)
