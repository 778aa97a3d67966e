"""Plans of other machines are refused where they would be applied; what a container or the kernel hides is not."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from cputrain.affinity.binding import check_layout, layout_difference
from cputrain.affinity.errors import PlanOfAnotherMachineError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import plan_machine
from cputrain.affinity.planner.plan_file import plan_from_dict, plan_to_dict
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import Machine, narrow_machine
from cputrain.affinity.topology.sysfs import this_machine
from tests.affinity.test_plan import machines_and_requests
from tests.support.commands import here
from tests.support.machines import build_machine, planned

HOST = build_machine(2, 2, 6, 2)


def without(machine: Machine, pus: set[int]) -> Machine:
    """The machine as seen where these PUs are offline or hidden."""
    left = tuple(tuple(pu for pu in core.pus if pu not in pus) for core in machine.cores)
    return replace(
        machine,
        cores=tuple(replace(core, pus=pus) for core, pus in zip(machine.cores, left, strict=True) if pus),
        numa_nodes=tuple(replace(n, pus=tuple(pu for pu in n.pus if pu not in pus)) for n in machine.numa_nodes),
        allowed_pus=tuple(pu for pu in machine.allowed_pus if pu not in pus),
    )


def with_memory(machine: Machine, factor: float) -> Machine:
    return replace(
        machine,
        numa_nodes=tuple(replace(node, memory_bytes=int(node.memory_bytes * factor)) for node in machine.numa_nodes),
    )


@pytest.mark.slow
@given(machines_and_requests())
@settings(max_examples=30)
def test_a_plan_of_this_machine_is_of_this_machine(drawn) -> None:
    machine, request = drawn
    plan = plan_from_dict(json.loads(json.dumps(plan_to_dict(plan_machine(machine, request, Runtime())))))
    assert layout_difference(plan, machine) is None
    assert layout_difference(plan, narrow_machine(machine, frozenset(machine.pus[:1]), frozenset())) is None


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (build_machine(2, 2, 6, 2, "interleaved"), "CPU 1 is on NUMA node 0 in the plan, on node 2 here"),
        (build_machine(2, 1, 12, 2), "CPU 6 is on NUMA node 1 in the plan, on node 0 here"),
        (build_machine(2, 2, 12, 1), "CPU 6 is on NUMA node 1 in the plan, on node 0 here"),
        (build_machine(4, 1, 6, 2), "CPU 0 shares a package with CPUs 1-11,24-35 in the plan, with 1-5,24-29 here"),
        (with_memory(HOST, 0.5), "NUMA node 0 has 64.0 GiB in the plan, 32.0 GiB here"),
        (
            replace(
                HOST,
                cores=tuple(
                    replace(core, pus=tuple(pu ^ 1 for pu in core.pus[:1]) + core.pus[1:]) for core in HOST.cores
                ),
            ),
            "CPU 0 shares a core with CPUs 24 in the plan, with 25 here",
        ),
    ],
)
def test_the_first_difference_of_another_machine_is_named(other: Machine, difference: str) -> None:
    assert {*other.pus} == {*HOST.pus}
    assert layout_difference(planned(HOST, ppn=4), other) == difference


def test_caches_are_compared_where_both_sides_know_them() -> None:
    eight = find_machine("pack:2 l3:2 core:4")
    assert layout_difference(planned(eight), find_machine("pack:2 l3:4 core:2")) == (
        "CPU 0 shares an L3 cache with CPUs 1-3 in the plan, with 1 here"
    )
    assert layout_difference(planned(eight), find_machine("pack:2 core:8")) is None


def test_kinds_of_memory_and_missing_nodes_are_differences() -> None:
    flat, cache = find_machine("knl-7250-quad-flat"), find_machine("knl-7250-quad-cache")
    assert layout_difference(planned(flat), cache) == "it uses NUMA node 1, this host has nodes 0"
    assert layout_difference(planned(cache), flat) is None
    nodes = tuple(replace(node, kind="slow") if not node.pus else node for node in flat.numa_nodes)
    found = layout_difference(planned(flat), replace(flat, numa_nodes=nodes))
    assert found == "NUMA node 1 is hbm in the plan, slow here"


def test_memory_of_the_other_socket_is_another_layout() -> None:
    """Firmware may pair memory and sockets crosswise: the same numbers, the other socket's HBM."""
    flat = find_machine("max-9480-2s-quad-flat")
    crossed = {2: (1,), 3: (0,)}
    nodes = tuple(replace(node, near=crossed.get(node.id, node.near)) for node in flat.numa_nodes)
    found = layout_difference(planned(flat), replace(flat, numa_nodes=nodes))
    assert found == "NUMA node 2 is next to node 0 in the plan, to node 1 here"


def with_kinds(machine: Machine, kind: str, *, cpus: bool) -> Machine:
    """The machine with another kind of the nodes that have CPUs, or of those that have none."""
    nodes = (replace(node, kind=kind) if bool(node.pus) == cpus else node for node in machine.numa_nodes)
    return replace(machine, numa_nodes=tuple(nodes))


def test_kinds_of_memory_that_one_side_does_not_know_are_no_difference() -> None:
    """Kernels call all memory next to CPUs DRAM, and know of no HBM whose figures the firmware lacks."""
    hbm, flat = find_machine("max-9480-2s-quad-hbm"), find_machine("max-9480-2s-quad-flat")
    unknown = with_kinds(flat, "unknown", cpus=False)
    for described, kernel in ((hbm, with_kinds(hbm, "dram", cpus=True)), (flat, unknown), (unknown, flat)):
        assert layout_difference(planned(described), kernel) is None
    unused = planned(with_kinds(flat, "slow", cpus=False))
    assert layout_difference(unused, flat) is None


def test_what_a_container_or_an_offline_cpu_hides_is_no_difference() -> None:
    hidden = without(HOST, {5, 24, 30})
    assert layout_difference(planned(HOST), hidden) is None
    assert layout_difference(planned(hidden), HOST) is None


def test_memory_may_be_more_or_a_little_less_than_planned() -> None:
    plan = planned(HOST)
    assert layout_difference(plan, with_memory(HOST, 2)) is None
    assert layout_difference(plan, with_memory(HOST, 0.95)) is None


@pytest.mark.parametrize("described", ["pack:2 core:24 pu:2(indexes=2*48:48*1)", "skx-8160-2s"])
def test_memory_that_a_description_only_assumes_is_no_difference(described: str) -> None:
    small = with_memory(find_machine("skx-8160-2s"), 0.25)
    assert layout_difference(planned(find_machine(described)), small) is None


def test_memory_that_a_description_states_is_compared() -> None:
    stated = find_machine("numa:1(memory=64GiB) core:8")
    assert layout_difference(planned(stated), with_memory(stated, 0.5)) == (
        "NUMA node 0 has 64.0 GiB in the plan, 32.0 GiB here"
    )
    hbm = find_machine("max-9480-2s-quad-hbm")
    assert "GiB in the plan" in (layout_difference(planned(hbm), with_memory(hbm, 0.5)) or "")


def test_a_machine_with_other_cpus_alone_is_another() -> None:
    far = replace(without(HOST, set(range(24))))
    assert layout_difference(planned(without(HOST, set(range(24, 48)))), far) == (
        "it has CPUs 0-23, this host has CPUs 24-47"
    )


def test_the_error_says_what_to_do() -> None:
    with pytest.raises(PlanOfAnotherMachineError, match="plan again on this host, or continue with allow_other_layout"):
        check_layout(planned(HOST), with_memory(HOST, 0.5))


def bind(plan: dict, place: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    (place / "plan.json").write_text(json.dumps(plan))
    argv = [
        *(sys.executable, "-m", "cputrain.affinity.bind", "--plan", "plan.json", "--local-rank", "0"),
        *options,
        *("--", "true"),
    ]
    return subprocess.run(argv, capture_output=True, text=True, cwd=place, env={**os.environ, **env})


def foreign_plan() -> dict:
    """A plan of a machine with this host's CPUs and four times its memory."""
    return plan_to_dict(planned(with_memory(this_machine(), 4), ppn=1))


def test_bind_refuses_a_plan_of_another_machine(tmp_path: Path) -> None:
    refused = bind(foreign_plan(), tmp_path)
    assert refused.returncode == 2
    start = f"cputrain.affinity.bind: the plan is for another machine ({this_machine().name}, "
    assert refused.stderr.startswith(start)
    assert refused.stderr.endswith("plan again on this host, or continue with --allow-other-layout\n")
    assert len(refused.stderr.splitlines()) == 1


def test_bind_takes_a_plan_of_another_machine_where_that_is_allowed(tmp_path: Path) -> None:
    assert bind(foreign_plan(), tmp_path, "--allow-other-layout").returncode == 0
    assert bind(foreign_plan(), tmp_path, "--no-verify").returncode == 0
    assert bind(foreign_plan(), tmp_path, AFFINITY_ALLOW_OTHER_LAYOUT="1").returncode == 0
    assert bind(foreign_plan(), tmp_path, AFFINITY_ALLOW_OTHER_LAYOUT="0").returncode == 2


def test_launch_hands_the_permission_to_its_ranks(tmp_path: Path) -> None:
    launch = ("launch", "--dry-run", "--output", "out", "--ppn", "1", "--allow-other-layout", "--", "true")
    shown = here(*launch, cwd=tmp_path)
    assert "--allow-other-layout" in shown.stdout, shown.stderr
