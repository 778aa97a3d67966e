"""lstopo XML: written here, written by the real lstopo, and that of real hosts in tests/machines."""

import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.catalog import find_machine, tree_root
from cputrain.affinity.topology.hwloc import read_lstopo
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.topology.sysfs import this_machine
from tests.support.commands import need, unpack

pytestmark = pytest.mark.slow

MACHINES = Path(__file__).parents[1] / "machines"
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
@pytest.mark.parametrize(
    ("subtype", "kind"),
    [
        *(('subtype="MCDRAM"', "hbm"), ('subtype="HBM"', "hbm"), ('subtype="DRAM"', "dram")),
        *(('subtype="GPUMemory"', "slow"), ("", "unknown")),
    ],
)
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


@pytest.mark.parametrize(
    ("cache", "kind"), [("", "hbm"), ('<object type="MemCache" cache_size="68719476736">', "dram")]
)
def test_dram_of_a_xeon_max_that_hbm_caches_is_not_called_hbm(tmp_path: Path, cache: str, kind: str) -> None:
    node = f'<object type="NUMANode" os_index="0" cpuset="0x0000000f" local_memory="{64 << 30}"/>'
    text = FLAT.format(version="2.0", subtype="").replace('value="made"', 'value="Intel(R) Xeon(R) CPU Max 9480"')
    lines = [line for line in text.splitlines() if "NUMANode" not in line]
    lines.insert(5, f"{cache}{node}{'</object>' if cache else ''}")
    (tmp_path / "max.xml").write_text("\n".join(lines))
    machine = read_lstopo(tmp_path / "max.xml")
    assert [node.kind for node in machine.numa_nodes] == [kind]
    assert any("the firmware does not tell" in warning for warning in machine.warnings) == (kind == "hbm")


@pytest.mark.parametrize(
    ("subtype", "kind"), [("GPUMemory", "slow"), ("DRAM", "hbm"), ("MCDRAM", "hbm"), ("SPM", "hbm")]
)
def test_memory_that_is_named_slow_is_slow_whatever_its_bandwidth(tmp_path: Path, subtype: str, kind: str) -> None:
    figures = "".join(
        f'<memattr_value target_obj_gp_index="{node + 7}" value="{value}"/>' for node, value in enumerate((100, 400))
    )
    text = FLAT.format(version="2.0", subtype=f'subtype="{subtype}"')
    for node in (0, 1):
        text = text.replace(f'"NUMANode" os_index="{node}"', f'"NUMANode" os_index="{node}" gp_index="{node + 7}"')
    text = text.replace("</topology>", f'<memattr name="Bandwidth">{figures}</memattr></topology>')
    (tmp_path / "x.xml").write_text(text)
    assert [node.kind for node in read_lstopo(tmp_path / "x.xml").numa_nodes] == ["dram", kind]


def with_core_types(path: Path, *kinds: str) -> Machine:
    """Two cores: PUs 0 and 2, PUs 1 and 3; a kind is the attributes and the information of one of them."""
    elements = (
        f'<cpukind cpuset="{cpus}" {kind.partition("|")[0]}>'
        + "".join('<info name="{}" value="{}"/>'.format(*pair.split("=")) for pair in kind.partition("|")[2].split())
        + "</cpukind>"
        for cpus, kind in zip(("0x5", "0xa"), kinds, strict=True)
    )
    text = FLAT.format(version="2.0", subtype="").replace("</topology>", f"{''.join(elements)}</topology>")
    path.write_text(text, encoding="utf-8")
    return read_lstopo(path)


@pytest.mark.parametrize(
    ("kinds", "speeds"),
    [
        (("|FrequencyMaxMHz=5000", "|FrequencyMaxMHz=4000"), [1.0, 0.8]),
        (("|FrequencyMaxMHz=5000", "|FrequencyMaxMHz=4800"), [1.0, 1.0]),  # favored cores
        (("|FrequencyMaxMHz=5000 FrequencyBaseMHz=2000", "|FrequencyMaxMHz=4000 FrequencyBaseMHz=2000"), [1.0, 1.0]),
        (("|LinuxCapacity=718", "|LinuxCapacity=997 FrequencyMaxMHz=1"), [718 / 997, 1.0]),
        (("|LinuxCapacity=1017", "|LinuxCapacity=1024"), [1.0, 1.0]),
        (('forced_efficiency="1"|CoreType=IntelCore', 'forced_efficiency="0"|CoreType=IntelAtom'), [1.0, 0.61]),
        (
            ("|CoreType=IntelCore FrequencyMaxMHz=5000", "|CoreType=IntelAtom FrequencyMaxMHz=4000"),
            [1.0, 0.787 * 0.8],
        ),
        (("|CoreType=IntelAtom FrequencyMaxMHz=3600", "|CoreType=IntelAtom FrequencyMaxMHz=2100"), [1.0, 2100 / 3600]),
        (('forced_efficiency="0"|', 'forced_efficiency="1"|'), [0.61, 1.0]),
        (('efficiency="0"|', 'efficiency="0"|'), [1.0, 1.0]),
    ],
)
def test_kinds_of_cores_have_their_speed(tmp_path: Path, kinds: tuple[str, str], speeds: list[float]) -> None:
    machine = with_core_types(tmp_path / "n1.xml", *kinds)
    assert [core.speed for core in machine.cores] == pytest.approx(speeds)
    ranked = all(kind[-1] == "|" for kind in kinds) and len(set(kinds)) > 1
    assert any("without their speeds" in warning for warning in machine.warnings) == ranked


V1 = """<?xml version="1.0"?><topology>
<object type="Machine" os_index="0" cpuset="0x0000000f" online_cpuset="0x00000007" allowed_cpuset="0x00000007"
 nodeset="0x3" allowed_nodeset="0x3"><info name="HostName" value="n1"/>
 <object type="Socket" os_index="1" cpuset="0xf"><info name="CPUModel" value="made"/>
  <object type="Group" cpuset="0xf" depth="0"><object type="NUMANode" os_index="0" cpuset="0xf" local_memory="4096">
   <object type="Cache" cpuset="0xf" depth="3" cache_type="0">
   <object type="Cache" cpuset="0x5" depth="2" cache_type="0">
    <object type="Cache" cpuset="0x5" depth="1" cache_type="2">
     <object type="Core" os_index="0"><object type="PU" os_index="0"/><object type="PU" os_index="2"/></object></object>
    </object><object type="Cache" cpuset="0xa" depth="2" cache_type="0">
     <object type="Core" os_index="1"><object type="PU" os_index="1"/><object type="PU" os_index="3"/></object></object>
   </object></object>
   <object type="NUMANode" os_index="1" cpuset="0x0" local_memory="1024"><info name="Type" value="MCDRAM"/></object>
  </object></object></object></topology>"""


def test_version_1_is_read_with_its_caches_and_memories(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(V1)
    machine = read_lstopo(tmp_path / "x.xml")
    assert [(core.pus, core.package, core.l3, core.l2) for core in machine.cores] == [
        ((0, 2), 1, 0, 0),
        ((1,), 1, 0, 1),
    ]
    assert [(node.pus, node.kind, node.near, node.memory_bytes) for node in machine.numa_nodes] == [
        ((0, 1, 2), "dram", (0,), 4096),
        ((), "hbm", (0,), 1024),
    ]
    assert (machine.allowed_pus, machine.allowed_nodes) == ((0, 1, 2), (0, 1))


def test_version_1_that_has_lost_nodes_is_refused(tmp_path: Path) -> None:
    """As lstopo writes it where a pool of memory is next to several packages: of three nodes, the pool alone."""
    lost = V1.replace(' nodeset="0x3"', ' nodeset="0x0000000f"')
    (tmp_path / "x.xml").write_text(lost)
    with pytest.raises(InputError, match="NUMA nodes 2-3 without describing them, which hwloc 1's format cannot"):
        read_lstopo(tmp_path / "x.xml")
    (tmp_path / "x.xml").write_text(lost.replace("0x0000000f", "0xf...f"))
    assert len(read_lstopo(tmp_path / "x.xml").numa_nodes) == 2


def test_version_1_of_a_host_without_numa_has_its_memory_at_the_machine(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(
        """<topology><object type="Machine" os_index="0" cpuset="0x3" local_memory="1073741824">
 <object type="Socket" os_index="0" cpuset="0x3">
 <object type="Core" os_index="0"><object type="PU" os_index="0"/></object>
 <object type="Core" os_index="1"><object type="PU" os_index="1"/></object></object></object></topology>"""
    )
    machine = read_lstopo(tmp_path / "x.xml")
    assert [(n.id, n.pus, n.kind, n.memory_bytes) for n in machine.numa_nodes] == [(0, (0, 1), "dram", 1 << 30)]
    assert machine.allowed_nodes == (0,) and machine.warnings == ()


DAMAGED = {
    "<?xml version='1.0' encoding='zz'?><topology/>": "unknown encoding",
    FLAT.format(version="2.0", subtype="").replace('"PU" os_index="1"', '"PU" os_index="0"'): "CPU 0 is in two cores",
    FLAT.format(version="2.0", subtype="").replace('type="PU"', 'type="Misc"'): "core 0 has no CPUs",
    FLAT.format(version="2.0", subtype="").replace('"PU" os_index="1"', '"PU" os_index="-1"'): "not a number",
    FLAT.format(version="2.0", subtype="").replace(
        '"PU" os_index="1"', '"PU" os_index="4294967295"'
    ): "a PU has the number",
    FLAT.format(version="2.0", subtype="").replace('"PU" os_index="1"', '"PU"'): "a PU has no number",
    FLAT.format(version="2.0", subtype="").replace(
        "</topology>", '<memattr name="Bandwidth"><memattr_value value="1e3"/></memattr></topology>'
    ): "'1e3' is not a number",
    FLAT.format(version="2.0", subtype="").replace(
        "</topology>",
        "".join(
            f'<cpukind cpuset="{mask}"><info name="FrequencyMaxMHz" value="nan"/></cpukind>' for mask in ("0x5", "0xa")
        )
        + "</topology>",
    ): "'nan' is not a number",
    FLAT.format(version="2.0", subtype="").replace('"4096"', '"4 GiB"'): "not a number",
    FLAT.format(version="2.0", subtype="").replace('cpuset="0x0000000f"', 'cpuset="all"'): "bad CPU mask",
    FLAT.format(version="2.0", subtype="").replace(
        '"NUMANode" os_index="1"', '"NUMANode" os_index="0"'
    ): "is listed twice",
    FLAT.format(version="2.0", subtype="").replace('"0x0000000f" local', '"0x00000003" local'): (
        "NUMA node 0 lists CPUs 0-1, but its enclosing object has 0-3"
    ),
    FLAT.format(version="2.0", subtype="").replace('"1024"', '"4000"'): "NUMA nodes 0 and 1 list the same CPUs 0-3",
    '<topology><object type="Machine">'
    + '<object type="Group">' * 5000
    + "</object>" * 5001
    + "</topology>": "levels deep",
}


@pytest.mark.parametrize("text", DAMAGED, ids=DAMAGED.values())
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.xml").write_text(text)
    with pytest.raises(InputError, match=DAMAGED[text]) as caught:
        read_lstopo(tmp_path / "x.xml")
    assert str(caught.value).startswith(f"cannot read {tmp_path}/x.xml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "<topology>", "<html></html>", "<topology version='2.0'><object type='Machine'/></topology>"]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.xml").write_text(text)
    with pytest.raises(InputError, match=r"x\.xml"):
        read_lstopo(tmp_path / "x.xml")
    with pytest.raises(InputError, match="absent"):
        read_lstopo(tmp_path / "absent.xml")


@pytest.mark.parametrize("tarball", ["gen-epyc-corona", pytest.param("gen-knl-snc4-flat", marks=pytest.mark.long)])
def test_nodes_without_the_groups_that_tell_their_cpus_are_refused(scratch: Path, tarball: str) -> None:
    need("hwloc-nox", "lstopo-no-graphics")
    unpack(MACHINES / f"{tarball}.tar.xz", scratch)
    env = {"PATH": "/usr/bin:/bin", "HWLOC_FSROOT": str(tree_root(scratch)), "HWLOC_COMPONENTS": "linux,stop"}
    for options, refused in (((), False), (("--filter", "group:none"), True)):
        argv = ["lstopo-no-graphics", *options, "-f", str(scratch / "x.xml")]
        subprocess.run(argv, check=True, env=env, capture_output=True)
        with pytest.raises(InputError, match="list the same CPUs") if refused else nullcontext():
            assert len(read_lstopo(scratch / "x.xml").numa_nodes) == 8


def comparable(machine: Machine) -> Machine:
    """Without what only one of the two forms tells: name, model, ISA, limits of time and memory, sizes, tiers."""
    nodes = tuple(replace(node, memory_bytes=0, tier=None) for node in machine.numa_nodes)
    return replace(machine, name="", model="", isa=(), cpu_quota=None, memory_limit_bytes=None, numa_nodes=nodes)


def test_this_machine_is_the_same_through_the_real_lstopo(tmp_path: Path) -> None:
    need("hwloc-nox", "lstopo-no-graphics")
    path = tmp_path / "here.xml"
    subprocess.run(["lstopo-no-graphics", "--of", "xml", "--disallowed", str(path)], check=True)
    assert comparable(read_lstopo(path)) == comparable(this_machine())


@pytest.mark.parametrize(
    "name",
    [
        *("cts1-pascal", "epyc-corona"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("g4dnmetal", "knl-quad-cache", "knl-snc4-flat")),
    ],
)
def test_real_hosts_are_the_same_from_xml_and_from_sys(name: str) -> None:
    read = [read_lstopo(MACHINES / f"{name}.v2.xml"), find_machine(str(MACHINES / f"gen-{name}.tar.xz"))]
    assert comparable(read[0]) == comparable(read[1])


def test_version_3_of_real_processors() -> None:
    shapes = {
        "Intel-KnightsLanding-XeonPhi-7210": (1, 64, 256),
        "Intel-SapphireRapids-2xXeonMax9460": (2, 80, 160),
        "Intel-Skylake-2xXeon6140": (2, 36, 72),
    }
    for name, shape in shapes.items():
        machine = read_lstopo(MACHINES / f"{name}.xml")
        assert (len(machine.packages), len(machine.cores), len(machine.pus)) == shape


def test_version_1_of_real_hosts_is_the_same_as_version_2() -> None:
    for name in ("epyc-corona", "knl-snc4-flat"):
        old, new = (comparable(read_lstopo(MACHINES / f"{name}{form}.xml")) for form in ("-hwloc1", ".v2"))
        assert old == new, name


def test_names_that_a_terminal_would_obey_are_shown_as_codes(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(V1.replace('value="n1"', 'value="n1&#155;2J&#10;"'))
    assert read_lstopo(tmp_path / "x.xml").name == "n1\\x9b2J\\n"
