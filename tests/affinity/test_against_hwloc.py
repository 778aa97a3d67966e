"""Every machine in tests/machines as we read it and as hwloc's lstopo does: cores, packages, caches, memory, limits.

Each tree is read in four forms: as a tarball, and as lstopo writes it: XML of hwloc 2, XML of hwloc 1, synthetic text.
"""

import gzip
import io
import lzma
import subprocess
import tarfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.catalog import find_machine, tree_root
from cputrain.affinity.topology.hwloc import read_lstopo
from cputrain.affinity.topology.machine import Machine, parse_mask
from cputrain.affinity.topology.tarball import save_machine
from tests.support.commands import need, unpack

pytestmark = [pytest.mark.slow, pytest.mark.processes]

MACHINES = sorted((Path(__file__).parents[1] / "machines").glob("*.tar.xz"))
# Most cores and files: they take as much time as all others, which have what they have (Knights Landing, Arm, several
# packages, accelerators).
LARGE = (
    *("128arm-2pa2n8cluster4co", "40intel64-2g2n4c+pcilocality", "64amd64-4p2n4ca2co", "64intel64-fakeKNL-A2A-cache"),
    *("fakecpuid1f-64intel64-2p4d2n2c2t", "gen-cts1-pascal", "gen-g4dnmetal", "gen-knl-quad-cache"),
    "gen-knl-snc4-flat",
)
SMALL = 10_000  # bytes of a tarball; the folders of a larger one take seconds to remove
XML_FILES = sorted(MACHINES[0].parent.glob("*.xml"))
# Where we read otherwise than hwloc 2.9.0, and why.
CAPACITY = "hwloc 2.9 makes a kind of every capacity; later releases merge nearly equal ones, as we do"
DIFFERENCES: dict[tuple[str, str], str] = {
    ("28em64t-2s2n7c-buggycoresiblings", "packages"): "the kernel's core_siblings stop at the NUMA node; "
    "physical_package_id, which is right, says two packages",
    ("nvidia-dgx-gb10", "core types"): CAPACITY,
}

# Version 1 has one node around a set of PUs, so that hwloc's own export drops others beside it: such a file is refused.
LOST_IN_VERSION_1 = {"fakememinitiators-1np2c+1npp+gi": "it names NUMA nodes 0-3,5-6,8-9 without describing them"}

Sets = frozenset[frozenset[int]]


def ours(machine: Machine) -> dict[str, object]:
    near = {node.id: node.near for node in machine.numa_nodes}
    own = {node.id: frozenset(node.pus) for node in machine.numa_nodes}

    def groups(key) -> Sets:
        found = defaultdict(set)
        for core in machine.cores:
            if key(core) is not None:
                found[key(core)].update(core.pus)
        return frozenset(map(frozenset, found.values()))

    types = groups(lambda core: core.speed)
    return {
        "cores": frozenset(frozenset(core.pus) for core in machine.cores),
        "packages": groups(lambda core: core.package),
        "level-3 caches": groups(lambda core: core.l3),
        "level-2 caches": groups(lambda core: core.l2),
        "memory": {node.id: node.memory_bytes for node in machine.numa_nodes},
        "PUs next to memory": {i: frozenset().union(*(own[n] for n in near[i])) for i in near},
        "core types": types if len(types) > 1 else frozenset(),
        "allowed PUs": machine.allowed_pus,
        "allowed nodes": machine.allowed_nodes,
    }


def of_hwloc(xml: Path) -> dict[str, object]:
    """The same from lstopo's XML, read here without our reader."""
    root = ElementTree.parse(xml).getroot()
    top = root.find("object")
    found = defaultdict(list)
    for element in root.iter("object"):
        found[element.get("type")].append(element)
    pus = {*parse_mask(top.get("cpuset"))}

    def sets(kind: str) -> Sets:
        return frozenset(frozenset(parse_mask(element.get("cpuset"))) & pus for element in found[kind])

    kinds = frozenset(frozenset(parse_mask(kind.get("cpuset"))) & pus for kind in root.findall("cpukind"))
    nodes = {int(element.get("os_index")): element for element in found["NUMANode"]}
    allowed_nodes = parse_mask(top.get("allowed_nodeset"))
    return {
        "cores": sets("Core"),
        "packages": sets("Package"),
        "level-3 caches": sets("L3Cache"),
        "level-2 caches": sets("L2Cache"),
        "memory": {i: int(element.get("local_memory", 0)) for i, element in nodes.items()},
        "PUs next to memory": {i: frozenset(parse_mask(e.get("cpuset"))) & pus for i, e in nodes.items()},
        "core types": kinds if len(kinds) > 1 else frozenset(),
        "allowed PUs": tuple(pu for pu in sorted(pus) if pu in parse_mask(top.get("allowed_cpuset"))),
        "allowed nodes": tuple(i for i in sorted(nodes) if i in allowed_nodes),
    }


def lstopo(tree: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": "/usr/bin:/bin",
        "HWLOC_FSROOT": str(tree),
        "HWLOC_COMPONENTS": "linux,stop",
        "HWLOC_HIDE_ERRORS": "1",
    }
    command = ["lstopo-no-graphics", "--disallowed", *options, str(output)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def machines() -> list[ParameterSet]:
    names = {path.name.removesuffix(".tar.xz"): path for path in MACHINES}
    return [pytest.param(names[one], id=one, marks=pytest.mark.long if one in LARGE else ()) for one in names]


@pytest.mark.parametrize("tarball", machines())
def test_machines_are_read_as_by_hwloc_in_every_form(tarball: Path, scratch: Path) -> None:
    need("hwloc-nox", "lstopo-no-graphics")
    name = tarball.name.removesuffix(".tar.xz")
    unpack(tarball, scratch)
    tree = tree_root(scratch)
    assert lstopo(tree, scratch / "2.xml").returncode == 0
    expected, read = of_hwloc(scratch / "2.xml"), ours(find_machine(str(tree)))
    differing = {what for what in expected if expected[what] != read[what]}
    assert differing == {what for machine, what in DIFFERENCES if machine == name}
    if tarball.stat().st_size < SMALL:
        assert ours(find_machine(str(tarball))) == read
    forms = {"2.xml": ours(read_lstopo(scratch / "2.xml"))}
    if lstopo(tree, scratch / "1.xml", "--export-xml-flags", "v1").returncode == 0:
        if name in LOST_IN_VERSION_1:
            with pytest.raises(InputError, match=LOST_IN_VERSION_1[name]):
                read_lstopo(scratch / "1.xml")
        else:
            forms["1.xml"] = ours(read_lstopo(scratch / "1.xml"))
    if lstopo(tree, scratch / "machine.txt", "--of", "synthetic").returncode == 0:
        written = (scratch / "machine.txt").read_text().splitlines()[-1]
        forms["synthetic"] = ours(find_machine(written))
    # The text has one size for all nodes, and neither limits nor types of cores; nor has version 1 such types.
    told = {"2.xml": set(expected), "1.xml": set(expected) - {"core types"}, "synthetic": {"cores", "packages"}}
    for form, found in forms.items():
        assert {what for what in told[form] if found[what] != expected[what]} <= differing, form


@pytest.mark.parametrize("source", ["this host", "20em64t-hybrid-1p6c2t+2ca4co1t", "fakeheteromemtiers"])
def test_a_saved_machine_is_the_same_to_lstopo(source: str, scratch: Path) -> None:
    need("hwloc-nox", "lstopo-no-graphics")
    root = Path("/")
    if source != "this host":
        unpack(MACHINES[0].parent / f"{source}.tar.xz", scratch / "source")
        root = tree_root(scratch / "source")
    save_machine(root, scratch / "saved.tar")
    unpack(scratch / "saved.tar", scratch / "unpacked")
    read = []
    for tree in (root, tree_root(scratch / "unpacked")):
        assert lstopo(tree, scratch / f"{len(read)}.xml").returncode == 0
        read.append(of_hwloc(scratch / f"{len(read)}.xml"))
    assert read[0]["cores"] and read[0]["memory"]
    assert read[1] == read[0]


@settings(max_examples=25)
@given(tarball=st.sampled_from(MACHINES), data=st.data())
def test_a_damaged_file_is_a_machine_or_one_line(tmp_path_factory: pytest.TempPathFactory, tarball, data) -> None:
    """A tarball cut short or with some bytes changed, and text files with some characters changed."""
    source = data.draw(st.sampled_from([tarball, *XML_FILES]))
    content = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path_factory.mktemp("damaged") / f"x{''.join(source.suffixes[-2:])}"
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        assert find_machine(str(damaged)).cores
    except InputError as error:
        assert "\n" not in str(error)
        assert str(damaged) in str(error)


def test_a_tarball_cut_in_half_is_refused(tmp_path: Path) -> None:
    content = MACHINES[0].read_bytes()
    (tmp_path / "cut.tar.xz").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"cannot unpack .*cut\.tar\.xz: "):
        find_machine(str(tmp_path / "cut.tar.xz"))


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
@pytest.mark.parametrize("damage", ["cut", "bit"])
def test_a_damaged_tarball_is_never_a_smaller_machine(tmp_path: Path, suffix: str, damage: str) -> None:
    """Cut short anywhere, or with a bit changed in a header (compressed: anywhere): refused or the same."""
    source = MACHINES[0].parent / "16amd64-8n2c-cpusets.tar.xz"
    content = lzma.decompress(source.read_bytes())
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        headers = [member.offset for member in tar]
    content = content if suffix == ".tar" else gzip.compress(content)
    whole = tmp_path / f"16amd64-8n2c-cpusets{suffix}"
    whole.write_bytes(content)
    expected, refused = find_machine(str(whole)), 0
    for part in range(1, 10):
        damaged = bytearray(content)
        if damage == "cut":
            del damaged[len(damaged) * part // 10 :]
        else:
            damaged[headers[len(headers) * part // 10] + 3 if suffix == ".tar" else len(damaged) * part // 10] ^= 1
        whole.write_bytes(damaged)
        try:
            assert find_machine(str(whole)) == expected
        except InputError:
            refused += 1
    assert refused >= 8
