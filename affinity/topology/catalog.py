"""Find a machine: by its name in the catalog (configs/machines/PROCESSOR.yaml and a variant) or in any other form."""

import os
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import is_tarball, read_yaml, shipped_folder
from cputrain.affinity.topology.machine import Core, Machine, NumaNode, ordered_cores
from cputrain.affinity.topology.sysfs import read_machine, this_machine
from cputrain.affinity.wording import GIB

ACHIEVED = 0.8  # achieved share of the memory channels' nominal bandwidth
MACHINES = shipped_folder("machines")


def find_machine(spec: str) -> Machine:
    """Return the machine that `spec` describes.

    "this", a folder or tarball with sys/ and proc/, lstopo XML, a synthetic description ("pack:2 core:24 pu:2") or a
    catalog name. Raises InputError if it cannot be read.
    """
    if spec == "this":
        return this_machine()
    try:
        return _read_description(spec, Path(spec))
    except OSError as error:
        raise InputError(f"cannot read machine {spec[:200]!r}: {error.strerror}") from None


def _read_description(spec: str, path: Path) -> Machine:
    if path.is_dir():
        return read_machine(tree_root(path))
    if is_tarball(spec) or (path.is_file() and _holds_tarball(path)):
        from cputrain.affinity.topology.tarball import (
            unpacked_tarball,  # imports decompressors, which are rarely needed
        )

        with unpacked_tarball(path) as folder:
            return read_machine(tree_root(folder), name=path.name.split(".")[0])
    if (spec.endswith(".xml") and (path.is_file() or not path.exists())) or (path.is_file() and _starts_as_xml(path)):
        from cputrain.affinity.topology.hwloc import read_lstopo  # imports XML, which is rarely needed

        return read_lstopo(path)
    if path.exists():
        raise InputError(f"{spec} is neither lstopo's XML nor a tarball with a host's sys/ and proc/: give one of them")
    if ":" in spec:
        from cputrain.affinity.topology.hwloc import read_synthetic

        return read_synthetic(spec)
    return named_machine(spec)


def tree_root(folder: Path) -> Path:
    """Return the folder, or the nearest one below it, that has sys/devices. Raises InputError if there is none."""
    pattern = "sys/devices/system/cpu"
    for depth in ("", "*/", "*/*/"):
        paths = sorted(folder.glob(depth + pattern))
        if paths:
            return paths[0].parents[3]
    raise InputError(f"{folder} contains no {pattern}: give a folder or tarball with a host's sys/ and proc/")


def _holds_tarball(path: Path) -> bool:
    from tarfile import is_tarfile

    return is_tarfile(path)


def _starts_as_xml(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def described_machines(folder: Path) -> tuple[Path, ...]:
    """List the machine descriptions under a folder by path: tarballs, XML files, folders with sys/ and proc/.

    Raises InputError if there are none.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name a folder with machine descriptions")
    paths = []
    for folder_path, folders, files in os.walk(folder):
        if "sys" in folders and (Path(folder_path) / "sys/devices/system/cpu").is_dir():
            paths.append(Path(folder_path))
            folders.clear()
        folders.sort()
        paths += [Path(folder_path) / file for file in files if is_tarball(file) or file.endswith(".xml")]
    if not paths:
        raise InputError(f"{folder} contains no tarball, XML file or folder that describes a machine: name another one")
    return tuple(sorted(paths))


def machine_names() -> list[str]:
    """List the names of all machines in the catalog: PROCESSOR-VARIANT."""
    variants = ((path.stem, read_yaml(path)["variants"]) for path in MACHINES.glob("*.yaml"))
    return sorted(f"{processor}-{variant}" for processor, listed in variants for variant in listed)


def catalog_machines() -> tuple[Machine, ...]:
    """Return all machines in the catalog, sorted by name."""
    entries = ((path, read_yaml(path)) for path in MACHINES.glob("*.yaml"))
    matches = (
        _build_machine(f"{path.stem}-{variant}", entry, **sizes)
        for path, entry in entries
        for variant, sizes in entry["variants"].items()
    )
    return tuple(sorted(matches, key=lambda machine: machine.name))


def machine_description(machine: Machine) -> str:
    """Return the first comment in a catalog machine's file: the processor's code name and special features."""
    files = [path for path in MACHINES.glob("*.yaml") if machine.name.startswith(f"{path.stem}-")]
    return files[0].read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def named_machine(name: str) -> Machine:
    """Return a catalog machine by name. Raises InputError with the nearest names if it does not exist."""
    for path in MACHINES.glob("*.yaml"):
        if name.startswith(f"{path.stem}-"):
            entry: dict[str, Any] = read_yaml(path)
            variant = entry["variants"].get(name.removeprefix(f"{path.stem}-"))
            if variant is not None:
                return _build_machine(name, entry, **variant)
    near = get_close_matches(name, machine_names(), n=3, cutoff=0.4)
    nearest = f" (nearest are {', '.join(near)})" if near else ""
    raise InputError(
        f"machine {name!r} is not in the catalog{nearest}: cputrain machines lists all of them; or give a folder"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFacts:
    """A processor's memory bandwidth and clock range in the catalog; None if unknown.

    `memory_bytes_per_s`: read bandwidth of a package, measured or 80 % of its channels' nominal bandwidth, which is
    about what McCalpin's STREAM reaches. `clock_range`: all-core turbo clock over base clock, minus 1.
    """

    memory_bytes_per_s: float | None = None
    clock_range: float | None = None


@lru_cache(maxsize=8)
def processor_facts(model: str) -> ProcessorFacts:
    """Return the catalog's facts on a processor by the kernel's name for it."""
    for path in MACHINES.glob("*.yaml"):
        if f"model: {model}\n" not in path.read_text(encoding="utf-8"):
            continue
        entry = read_yaml(path)
        nominal, measured, clock = (entry.get(key) for key in ("memory_gb_s", "stream_gb_s", "clock_ghz"))
        memory = measured or (None if nominal is None else ACHIEVED * nominal)
        return ProcessorFacts(
            memory_bytes_per_s=None if memory is None else memory * 1e9,
            clock_range=None if clock is None else clock[1] / clock[0] - 1,
        )
    return ProcessorFacts()


def _build_machine(
    name: str, entry: dict[str, Any], *, packages: int, cores: list[int], gib: int, hbm_gib: int = 0, kind: str = "dram"
) -> Machine:
    """Build a host of equal packages.

    `cores`: number of cores of each NUMA node of a package. `gib`: memory of a node, for DRAM a typical size, as hosts
    differ. `hbm_gib`: size of a memory-only node next to each node. `l3_cores` of an entry: number of cores that share
    a level-3 cache, of which a NUMA node may have several. PUs are numbered as by Linux on most hosts: first the first
    threads of all cores, package by package, then the second threads.
    """
    sizes = cores * packages
    total, starts = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    threads = range(entry["smt"])
    entries = [
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
            pus=tuple(sorted(pu for core in entries if core.numa_node == node for pu in core.pus)),
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
        cores=ordered_cores(entries),
        numa_nodes=tuple(nodes),
        allowed_pus=tuple(range(total * entry["smt"])),
        allowed_nodes=tuple(node.id for node in nodes),
    )
