"""Machines by name: configs/machines/NAME.yaml -> Machine; and the one place that reads `--machine`."""

from difflib import get_close_matches
from pathlib import Path

import yaml

from affinity.archive import is_archive, tree_root, unpacked
from affinity.errors import InputError
from affinity.hwloc import read_synthetic
from affinity.machine import Machine
from affinity.sysfs import read_machine, this_machine

GIB = 1 << 30


def shipped(package: Path, kind: str) -> Path:
    """Folder of the YAML files that come with a package: inside it once installed, in configs/ in a checkout."""
    inside = package / kind
    return inside if inside.is_dir() else package.parent / "configs" / kind


MACHINES = shipped(Path(__file__).parent, "machines")


def find_machine(spec: str) -> Machine:
    """`this`, a folder or tarball that holds sys/ and proc/, a synthetic description, or a name from the catalog."""
    if spec == "this":
        return this_machine()
    if Path(spec).is_dir():
        return read_machine(tree_root(Path(spec)))
    if is_archive(spec):
        with unpacked(Path(spec)) as folder:
            return read_machine(tree_root(folder))
    if ":" in spec:
        # hwloc gives a synthetic NUMA node 1 GiB where nothing else is said.
        return read_synthetic(spec, name="synthetic", model="synthetic machine", isa=(), memory_bytes=GIB)
    return named_machine(spec)


def named_machine(name: str) -> Machine:
    """The catalog's machine of that name. Raises InputError with the nearest names."""
    known = sorted(path.stem for path in MACHINES.glob("*.yaml"))
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.4) or known
        raise InputError(f"machine {name!r} is not in the catalog: nearest are {', '.join(near)}; or give a folder")
    entry = yaml.safe_load((MACHINES / f"{name}.yaml").read_text())
    return read_synthetic(
        entry["topology"],
        name=name,
        model=entry["model"],
        isa=tuple(entry["isa"]),
        memory_bytes=entry["gib_per_numa_node"] * GIB,
    )
