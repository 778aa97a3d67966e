"""Plans as text and as SVG."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.request import Request
from cputrain.affinity.planner.workload import RESNET50, USUAL_BATCH
from cputrain.affinity.topology.catalog import find_machine
from cputrain.affinity.topology.machine import NumaNode
from cputrain.affinity.views import WIDTH, Picture, plan_to_svg, plan_to_text
from cputrain.affinity.wording import memory_text
from tests.support.machines import build_machine, planned

DRAWN = ("skx-8160-2s", "knl-7250-snc4-flat", "max-9480-2s-snc4-flat")
SVG = "{http://www.w3.org/2000/svg}"


def plan_of(name: str) -> Plan:
    return planned(find_machine(name), nodes=16)


def cells(text: str) -> list[str]:
    map_ = text.partition("one character per CPU")[0]
    return [line for line in map_.splitlines() if re.match(r"  [A-Za-z~*. ]+$", line)]


def test_the_picture_of_a_small_machine_in_the_docs(golden) -> None:
    """The two-core machine that the README's figures are from, as a process there reads it."""
    machine = replace(build_machine(1, 1, 2, 1, memory_bytes=10 << 30), name="two-cores", model="AMD EPYC, 2 cores")
    golden("../../docs/pictures/two-cores.svg", plan_to_svg(plan_machine(machine, Request(), Runtime())))


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_in_the_docs_are_what_is_drawn(name: str, golden) -> None:
    """As `cputrain plan --machine NAME --nodes 16 --format svg` prints it."""
    request = Request(nodes=16, local_batch=USUAL_BATCH, workload=RESNET50)
    golden(f"../../docs/pictures/{name}.svg", plan_to_svg(plan_machine(find_machine(name), request, Runtime())))


@pytest.mark.parametrize("name", [*DRAWN, "srf-6780e-2s", "skx-8180-8s"])
def test_text_shows_every_pu_once_within_the_width(name: str) -> None:
    plan = plan_of(name)
    drawn = cells(plan_to_text(plan))
    assert sum(len(line.replace(" ", "")) for line in drawn) == len(plan.machine.pus)
    assert max(map(len, drawn)) <= WIDTH
    signs = "".join(drawn)
    assert signs.count("~") == sum(len(w.comm_pus) for w in plan.workers)
    assert signs.count("*") == sum(len(w.loader_pus) for w in plan.workers)
    assert signs.count(".") == sum(len(item.pus) for item in plan.unused)


def test_color_adds_nothing_but_color() -> None:
    plan = plan_of("skx-8160-2s")
    colored = plan_to_text(plan, colored=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plan_to_text(plan)


def test_pus_that_are_not_available_are_blank() -> None:
    machine = replace(build_machine(1, 1, 6, 1), allowed_pus=(2, 3))
    assert "  " + "    A B" in plan_to_text(plan_machine(machine, Request(), Runtime()))


@pytest.mark.parametrize("name", DRAWN)
def test_svg_is_xml_with_a_stripe_for_every_pu(name: str) -> None:
    plan = plan_of(name)
    root = ElementTree.fromstring(plan_to_svg(plan))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == len(plan.machine.pus)
    assert {int(t.split()[1].rstrip(":")) for t in titles} == set(plan.machine.pus)
    assert Picture(plan)._repr_svg_() == plan_to_svg(plan)


@pytest.mark.parametrize(("mib", "shown"), [(231, "231 MiB"), (511, "511 MiB"), (2970, "2.9 GiB"), (4096, "4 GiB")])
def test_small_nodes_are_not_shown_without_memory(mib: int, shown: str) -> None:
    machine = build_machine(1, 1, 4, 1, memory_bytes=mib << 20)
    extra = NumaNode(id=1, pus=(), memory_bytes=(mib // 2) << 20, kind="hbm", near=(0,))
    plan = plan_machine(replace(machine, numa_nodes=(*machine.numa_nodes, extra), allowed_nodes=(0, 1)))
    for drawn in (plan_to_text(plan), plan_to_svg(plan)):
        assert f"NUMA node 0, {shown}" in drawn and " 0 GiB" not in drawn
        assert f"{memory_text((mib // 2) << 20)} of hbm memory" in drawn


def test_names_are_escaped_in_svg() -> None:
    machine = replace(build_machine(1, 1, 2, 1), name="<script>&", model='"quoted"')
    root = ElementTree.fromstring(plan_to_svg(plan_machine(machine, Request(), Runtime())))
    assert any(text.text and "<script>&" in text.text for text in root.iter(f"{SVG}text"))


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cputrain.affinity", *arguments], capture_output=True, text=True)


def test_the_package_stands_on_its_own(tmp_path) -> None:
    machine = json.loads(alone("read", "--machine", "skx-8160-2s").stdout)
    assert len(machine["cores"]) == 48
    plan = alone("plan", "--format", "json")
    assert json.loads(plan.stdout)["workers"]
    assert "workers per host" in alone("plan", "--machine", "pack:1 core:4", "--ppn", "2").stdout
    assert alone("plan", "--machine", "skx-8160-2s", "--format", "svg").stdout.startswith("<svg")
    (tmp_path / "plan.json").write_text(plan.stdout)
    bound = alone("bind", "--plan", str(tmp_path / "plan.json"), "--local-rank", "0", "--", "nproc")
    assert int(bound.stdout) == len(json.loads(plan.stdout)["workers"][0]["compute_pus"])
    refused = alone("plan", "--ppn", str(os.cpu_count() * 100))
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    code = "import sys, cputrain.affinity.__main__ as m; m.main(['plan'], {}); print({'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("set()\n")
