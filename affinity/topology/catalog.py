"""Machines by name (configs/machines/PROCESSOR.yaml and one of its variants), and any other description of one."""

import os
import tarfile
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import shipped
from cputrain.affinity.topology.archive import is_archive, tree_root, unpacked
from cputrain.affinity.topology.hwloc import read_lstopo, read_synthetic
from cputrain.affinity.topology.machine import Core, Machine, NumaNode, ordered
from cputrain.affinity.topology.sysfs import read_machine, this_machine
from cputrain.affinity.wording import GIB

# The memory of a NUMA node in a description without sizes: plenty, so that memory does not decide the number of workers
# (hwloc: 1 GiB).
ASSUMED_NODE_BYTES = 256 * GIB
REACHED = 0.8  # of the nominal speed of memory channels


MACHINES = shipped("machines")


def find_machine(spec: str) -> Machine:
    """The machine named by `spec`: "this", a folder or tarball with sys/ and proc/, lstopo XML, a synthetic description
    ("pack:2 core:24 pu:2") or a catalog name. Raises InputError where it cannot be read."""
    if spec == "this":
        return this_machine()
    try:
        return _described(spec, Path(spec))
    except OSError as error:
        raise InputError(f"cannot read machine {spec[:200]!r}: {error.strerror}") from None


def _described(spec: str, path: Path) -> Machine:
    if path.is_dir():
        return read_machine(tree_root(path))
    if is_archive(spec) or (path.is_file() and tarfile.is_tarfile(path)):
        with unpacked(path) as folder:
            return read_machine(tree_root(folder), name=path.name.split(".")[0])
    if (spec.endswith(".xml") and (path.is_file() or not path.exists())) or (path.is_file() and _starts_as_xml(path)):
        return read_lstopo(path)
    if path.exists():
        raise InputError(f"{spec} is neither lstopo's XML nor a tarball with a host's sys/ and proc/: give one of them")
    if ":" in spec:
        return read_synthetic(
            spec, name="synthetic", model="synthetic machine", isa=(), memory_bytes=ASSUMED_NODE_BYTES
        )
    return named_machine(spec)


def _starts_as_xml(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def described_machines(folder: Path) -> tuple[Path, ...]:
    """The descriptions of machines under a folder: tarballs, XML files, folders with sys/ and proc/; by path.

    Raises InputError where there are none.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name one with descriptions of machines")
    found = []
    for place, folders, files in os.walk(folder):
        if "sys" in folders and (Path(place) / "sys/devices/system/cpu").is_dir():
            found.append(Path(place))
            folders.clear()
        folders.sort()
        found += [Path(place) / file for file in files if is_archive(file) or file.endswith(".xml")]
    if not found:
        raise InputError(f"{folder} contains no tarball, XML file or folder that describes a machine")
    return tuple(sorted(found))


def machine_names() -> list[str]:
    """Every machine of the catalog: PROCESSOR-VARIANT."""
    return sorted(f"{path.stem}-{variant}" for path in MACHINES.glob("*.yaml") for variant in _entry(path)["variants"])


def catalog_machines() -> tuple[Machine, ...]:
    """Every machine of the catalog, by name."""
    entries = ((path, _entry(path)) for path in MACHINES.glob("*.yaml"))
    found = (
        _assembled(f"{path.stem}-{variant}", entry, **sizes)
        for path, entry in entries
        for variant, sizes in entry["variants"].items()
    )
    return tuple(sorted(found, key=lambda machine: machine.name))


def description_of(machine: Machine) -> str:
    """The comment at the top of a catalog machine's file: the processor's code name and what is special of it."""
    files = [path for path in MACHINES.glob("*.yaml") if machine.name.startswith(f"{path.stem}-")]
    return files[0].read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def named_machine(name: str) -> Machine:
    """The catalog's machine of that name. Raises InputError with the nearest names."""
    for path in MACHINES.glob("*.yaml"):
        if name.startswith(f"{path.stem}-"):
            entry = _entry(path)
            variant = entry["variants"].get(name.removeprefix(f"{path.stem}-"))
            if variant is not None:
                return _assembled(name, entry, **variant)
    near = get_close_matches(name, machine_names(), n=3, cutoff=0.4)
    nearest = f"nearest are {', '.join(near)}; " if near else ""
    raise InputError(
        f"machine {name!r} is not in the catalog: {nearest}cputrain machines lists all of them; or give a folder"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFacts:
    """What the catalog knows of a processor beyond its cores; None where it does not know.

    `memory_bytes_per_s`: what a package reads from memory, 80 % of the nominal speed of its channels (McCalpin's STREAM
    reaches about that) or as measured. `clock_range`: how much faster than the base clock all cores run at most.
    """

    memory_bytes_per_s: float | None = None
    clock_range: float | None = None


@lru_cache(maxsize=8)
def processor_facts(model: str) -> ProcessorFacts:
    """What is known of a processor by the name that the kernel gives it."""
    for path in MACHINES.glob("*.yaml"):
        if f"model: {model}\n" not in path.read_text(encoding="utf-8"):
            continue
        entry = _entry(path)
        nominal, measured, clock = (entry.get(key) for key in ("memory_gb_s", "stream_gb_s", "clock_ghz"))
        memory = measured or (None if nominal is None else REACHED * nominal)
        return ProcessorFacts(
            memory_bytes_per_s=None if memory is None else memory * 1e9,
            clock_range=None if clock is None else clock[1] / clock[0] - 1,
        )
    return ProcessorFacts()


def _entry(path: Path) -> dict[str, Any]:
    try:
        import yaml  # for the catalog alone: `python -m cputrain.affinity` reads every other description without it
    except ModuleNotFoundError:
        raise InputError(
            "the catalog of machines needs PyYAML, which is not installed: pip install pyyaml, or give a folder, a "
            "tarball, lstopo's XML or a synthetic description"
        ) from None
    entry: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return entry


def _assembled(
    name: str, entry: dict[str, Any], *, packages: int, cores: list[int], gib: int, hbm_gib: int = 0, kind: str = "dram"
) -> Machine:
    """A host of equal packages; `cores` lists those of each NUMA node of a package, `gib` is the memory of one: of
    DRAM a usual size, as hosts differ.

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
            memory_assumed=kind == "dram",
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
