"""Every machine of the catalog, and the plans that the rules make of it."""

import re

import pytest
import yaml

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.request import PROFILES, Request
from cputrain.affinity.planner.workload import RESNET50
from cputrain.affinity.topology.catalog import MACHINES, catalog_machines, find_machine, machine_names, processor_facts
from cputrain.affinity.topology.machine import format_list
from cputrain.affinity.topology.sysfs import ISA_FLAGS

# name: (packages, cores, PUs, NUMA nodes), from the processors' data sheets
SHAPES = {
    "bdw-e5-2699v4-2s": (2, 44, 88, 2),
    "skx-6140-2s": (2, 36, 72, 2),
    "skx-8160-2s": (2, 48, 96, 2),
    "skx-8180-8s": (8, 224, 448, 8),
    "clx-8280-2s-snc2": (2, 56, 112, 4),
    "clx-9242-2s": (2, 96, 192, 4),
    "icx-8380-2s": (2, 80, 160, 2),
    "spr-8480plus-2s": (2, 112, 224, 2),
    "emr-8592plus-2s": (2, 128, 256, 2),
    "max-9480-2s-snc4-flat": (2, 112, 224, 16),
    "gnr-6980p-2s-snc3": (2, 256, 512, 6),
    "gnr-6972p-2s-snc3": (2, 192, 384, 6),
    "srf-6780e-2s": (2, 288, 288, 2),
    "grace-superchip-2s": (2, 144, 144, 2),
    "graviton4-2s": (2, 192, 192, 2),
    "turin-9755-2s-nps4": (2, 256, 512, 8),
    "turin-9965-1s-nps1": (1, 192, 384, 1),
    "knl-7210-quad-cache": (1, 64, 256, 1),
    "knl-7250-snc4-flat": (1, 68, 272, 8),
    "milan-7763-2s-nps4": (2, 128, 256, 8),
    "genoa-9654-2s-nps1": (2, 192, 384, 2),
}


def line(plan: Plan) -> str:
    """A plan in one line per worker, without what every worker shares."""
    return "\n".join(
        f"  {w.local_rank}: compute {format_list(w.compute_pus)} comm {format_list(w.comm_pus)} "
        f"loader {format_list(w.loader_pus)} threads {w.intra_op}+{w.inter_op} "
        f"batch {w.local_batch} memory {w.memory_policy} {format_list(w.memory_nodes)}".rstrip()
        for w in plan.workers
    )


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_data_sheets(name: str) -> None:
    machine = find_machine(name)
    assert (len(machine.packages), len(machine.cores), len(machine.pus), len(machine.numa_nodes)) == SHAPES[name]


def test_flags_are_those_that_machines_are_read_by() -> None:
    flags = {flag for path in MACHINES.glob("*.yaml") for flag in yaml.safe_load(path.read_text())["isa"]}
    assert flags <= set(ISA_FLAGS)
    assert {"amx_bf16", "avx512_bf16", "sve2"} <= flags


def test_every_entry_names_its_source() -> None:
    assert all(yaml.safe_load(path.read_text())["source"] for path in MACHINES.glob("*.yaml"))


@pytest.mark.parametrize("name", machine_names())
def test_plans_of_catalog_machines(name: str, golden) -> None:
    machine = find_machine(name)
    texts = []
    for profile in PROFILES:
        for ppn in (None, 1, 2, 4):
            request = Request(ppn=ppn, nodes=16, profile=profile, workload=RESNET50, local_batch=32, balance="batch")
            plan = plan_machine(machine, request, Runtime())
            texts.append(f"{name} on 16 hosts, profile {profile}, ppn {ppn or 'auto'}\n{line(plan)}")
            texts += [f"  warning: {text}" for text in plan.warnings]
    golden(f"catalog/{name}.txt", "\n".join(texts))


def test_a_real_7250_is_the_catalog_s() -> None:
    """18, 18, 16 and 16 cores, each quadrant with its MCDRAM: every worker prefers its own."""
    plan = plan_machine(find_machine("knl-7250-snc4-flat"), Request(), Runtime())
    assert [len(w.compute_pus) + len(w.loader_pus) // 4 for w in plan.workers] == [18, 18, 16, 16]
    assert [(w.memory_policy, w.memory_nodes) for w in plan.workers] == [("preferred", (4 + i,)) for i in range(4)]
    assert plan.warnings[0].startswith("domains of 16-18 cores: the smallest sets the pace of each step")


def test_hbm_alone_is_bound_like_any_memory() -> None:
    plan = plan_machine(find_machine("max-9480-2s-quad-hbm"), Request(ppn=2), Runtime())
    assert [(w.memory_policy, w.memory_nodes) for w in plan.workers] == [("bind", (0,)), ("bind", (1,))]


def test_an_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(InputError, match="skx-8160-2s"):
        find_machine("skx-8160")


def test_a_memory_speed_is_that_of_the_channels_it_names() -> None:
    found = {}
    for path in MACHINES.glob("*.yaml"):
        named = re.search(r"memory_gb_s: ([\d.]+) .*?(\d+) x (?:DDR\d|MRDIMM)-(\d+)", path.read_text())
        if named:
            found[path.stem] = float(named[1]), int(named[2]) * int(named[3]) * 8 / 1000
            rate = re.search(r"(\d{4,5}) MT/s", path.read_text().partition("\n")[0])
            assert rate is None or rate[1] == named[3], path
    assert len(found) > 15
    assert {name: pair for name, pair in found.items() if abs(pair[0] - pair[1]) > 0.1} == {}


def test_every_processor_has_a_memory_speed_and_plausible_clocks() -> None:
    for machine in catalog_machines():
        facts = processor_facts(machine.model)
        assert facts.memory_bytes_per_s is not None and 50e9 < facts.memory_bytes_per_s < 1e12
        assert facts.clock_range is None or 0.05 < facts.clock_range < 0.7
    known = processor_facts("Intel(R) Xeon(R) Platinum 8160 CPU @ 2.10GHz")
    assert known.memory_bytes_per_s == pytest.approx(102.4e9) and known.clock_range == pytest.approx(1 / 3)
    assert processor_facts("another").memory_bytes_per_s is None and processor_facts("another").clock_range is None
