"""lstopo XML: written here, written by the real lstopo, and that of real hosts where it lies beside the checkout."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from affinity.errors import InputError
from affinity.topology.catalog import find_machine
from affinity.topology.lstopo import read_lstopo
from affinity.topology.machine import Machine
from affinity.topology.sysfs import this_machine
from tests.support.commands import need

pytestmark = pytest.mark.slow

XML = Path(__file__).parents[3] / "shared" / "hwloc" / "xml"
FLAT = """<?xml version="1.0"?><!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="{version}">
<object type="Machine" os_index="0" allowed_cpuset="0x0000000e" allowed_nodeset="0x00000003">
 <info name="HostName" value="n1"/>
 <object type="Package" os_index="0"><info name="CPUModel" value="made"/>
  <object type="NUMANode" os_index="0" cpuset="0x0000000f" local_memory="4096"/>
  <object type="NUMANode" os_index="1" cpuset="0x0000000f" local_memory="1024" {subtype}/>
  <object type="L3Cache"><object type="Core" os_index="0">
    <object type="PU" os_index="0"/><object type="PU" os_index="2"/></object>
  <object type="Core" os_index="0"><object type="PU" os_index="1"/><object type="PU" os_index="3"/></object></object>
 </object></object></topology>"""


@pytest.mark.parametrize("version", ["2.0", "3.0"])
@pytest.mark.parametrize(("subtype", "kind"), [('subtype="MCDRAM"', "hbm"), ('subtype="HBM"', "hbm"), ("", "slow")])
def test_both_versions_are_read(tmp_path: Path, version: str, subtype: str, kind: str) -> None:
    (tmp_path / "n1.xml").write_text(FLAT.format(version=version, subtype=subtype))
    machine = find_machine(str(tmp_path / "n1.xml"))
    assert (machine.name, machine.model) == ("n1", "made")
    assert [core.pus for core in machine.cores] == [(0, 2), (1, 3)]
    assert (machine.allowed_pus, machine.allowed_nodes) == ((1, 2, 3), (0, 1))
    assert [(node.pus, node.kind, node.near) for node in machine.numa_nodes] == [
        ((0, 1, 2, 3), "dram", (0,)),
        ((), kind, (0,)),
    ]


def test_kinds_of_cores_have_their_speed(tmp_path: Path) -> None:
    kinds = "".join(
        f'<cpukind cpuset="{cpus}" efficiency="{rank}"><info name="FrequencyMaxMHz" value="{clock}"/></cpukind>'
        for cpus, rank, clock in (("0x5", 1, 5000), ("0xa", 0, 4000))
    )
    path = tmp_path / "n1.xml"
    path.write_text(FLAT.format(version="2.0", subtype="").replace("</topology>", f"{kinds}</topology>"))
    assert [core.speed for core in read_lstopo(path).cores] == [1.0, 0.8]
    path.write_text(path.read_text().replace('efficiency="1"', 'efficiency="0"'))
    assert [core.speed for core in read_lstopo(path).cores] == [1.0, 1.0]


@pytest.mark.parametrize(
    "text", ["", "<topology>", "<html></html>", "<topology version='2.0'><object type='Machine'/></topology>"]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.xml").write_text(text)
    with pytest.raises(InputError, match=r"x\.xml"):
        read_lstopo(tmp_path / "x.xml")
    with pytest.raises(InputError, match="absent"):
        read_lstopo(tmp_path / "absent.xml")


def comparable(machine: Machine) -> Machine:
    """Without what only one of the two forms tells: name, model, ISA, limits of time and memory, sizes."""
    nodes = tuple(replace(node, memory_bytes=0) for node in machine.numa_nodes)
    return replace(machine, name="", model="", isa=(), cpu_quota=None, memory_limit_bytes=None, numa_nodes=nodes)


def test_this_machine_is_the_same_through_the_real_lstopo(tmp_path: Path) -> None:
    need("hwloc-nox", "lstopo-no-graphics")
    path = tmp_path / "here.xml"
    subprocess.run(["lstopo-no-graphics", "--of", "xml", "--disallowed", str(path)], check=True)
    assert comparable(read_lstopo(path)) == comparable(this_machine())


def test_real_hosts_are_the_same_from_xml_and_from_sys() -> None:
    for xml in sorted(XML.glob("*.v2.xml")):
        tree = XML.parent / f"gen-{xml.name.removesuffix('.v2.xml')}.tar.bz2"
        assert comparable(read_lstopo(xml)) == comparable(find_machine(str(tree))), xml.name


def test_version_3_of_real_processors() -> None:
    shapes = {
        "Intel-KnightsLanding-XeonPhi-7210": (1, 64, 256),
        "Intel-SapphireRapids-2xXeonMax9460": (2, 80, 160),
        "Intel-Skylake-2xXeon6140": (2, 36, 72),
    }
    for name, shape in shapes.items():
        if (XML / f"{name}.xml").is_file():
            machine = read_lstopo(XML / f"{name}.xml")
            assert (len(machine.packages), len(machine.cores), len(machine.pus)) == shape
