"""Machines by name: configs/machines/PROCESSOR.yaml and one of its forms -> Machine; and what reads `--machine`."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from affinity.errors import InputError
from affinity.topology.archive import is_archive, tree_root, unpacked
from affinity.topology.hwloc import read_synthetic
from affinity.topology.lstopo import read_lstopo
from affinity.topology.machine import Core, Machine, NumaNode, ordered
from affinity.topology.sysfs import read_machine, this_machine
from affinity.units import GIB


def shipped(package: Path, kind: str) -> Path:
    """Folder of the YAML files that come with a package: inside it once installed, in configs/ in a checkout."""
    inside = package / kind
    return inside if inside.is_dir() else package.parent / "configs" / kind


MACHINES = shipped(Path(__file__).parents[1], "machines")


def find_machine(spec: str) -> Machine:
    """`this`, a folder or tarball with sys/ and proc/, lstopo XML, a synthetic description, or a catalog name."""
    if spec == "this":
        return this_machine()
    if Path(spec).is_dir():
        return read_machine(tree_root(Path(spec)))
    if is_archive(spec):
        with unpacked(Path(spec)) as folder:
            return read_machine(tree_root(folder))
    if spec.endswith(".xml"):
        return read_lstopo(Path(spec))
    if ":" in spec:
        # hwloc gives a synthetic NUMA node 1 GiB where nothing else is said.
        return read_synthetic(spec, name="synthetic", model="synthetic machine", isa=(), memory_bytes=GIB)
    return named_machine(spec)


def machine_names() -> list[str]:
    """Every machine of the catalog: PROCESSOR-FORM."""
    return sorted(f"{path.stem}-{form}" for path in MACHINES.glob("*.yaml") for form in _entry(path)["forms"])


def named_machine(name: str) -> Machine:
    """The catalog's machine of that name. Raises InputError with the nearest names."""
    for path in MACHINES.glob("*.yaml"):
        if name.startswith(f"{path.stem}-"):
            entry = _entry(path)
            form = entry["forms"].get(name.removeprefix(f"{path.stem}-"))
            if form is not None:
                return _assembled(name, entry, **form)
    near = get_close_matches(name, machine_names(), n=3, cutoff=0.3) or machine_names()
    raise InputError(f"machine {name!r} is not in the catalog: nearest are {', '.join(near)}; or give a folder")


def _entry(path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = yaml.safe_load(path.read_text())
    return entry


def _assembled(
    name: str, entry: dict[str, Any], *, packages: int, cores: list[int], gib: int, hbm_gib: int = 0, kind: str = "dram"
) -> Machine:
    """A host of equal packages; `cores` lists those of each NUMA node of a package, `gib` is the memory of one.

    `l3_cores` of an entry is the number of cores that share a level-3 cache, where a NUMA node may have several.
    With `hbm_gib` every such node has a memory-only node of that size next to it. PUs are numbered as Linux does on
    most hosts: the first threads of all cores, package by package, then the second ones.
    """
    sizes = cores * packages
    total, starts = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    threads = range(entry["smt"])
    made = [
        Core(
            pus=tuple(start + i + t * total for t in threads),
            package=node // len(cores),
            numa_node=node,
            l3=start + i - i % entry["l3_cores"] if "l3_cores" in entry else None,
        )
        for node, (start, size) in enumerate(zip(starts, sizes, strict=True))
        for i in range(size)
    ]
    nodes = [
        NumaNode(
            id=node,
            pus=tuple(sorted(pu for core in made if core.numa_node == node for pu in core.pus)),
            memory_bytes=gib * GIB,
            kind=kind,
            near=(node,),
        )
        for node in range(len(sizes))
    ]
    if hbm_gib:
        nodes += [
            NumaNode(id=len(sizes) + node, pus=(), memory_bytes=hbm_gib * GIB, kind="hbm", near=(node,))
            for node in range(len(sizes))
        ]
    return Machine(
        name=name,
        model=entry["model"],
        isa=tuple(entry["isa"]),
        cores=ordered(made),
        numa_nodes=tuple(nodes),
        allowed_pus=tuple(range(total * entry["smt"])),
        allowed_nodes=tuple(node.id for node in nodes),
    )
