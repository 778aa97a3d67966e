"""Find a machine: by its name in the catalog (configs/machines/PROCESSOR.yaml and a variant) or in any other form.

Also reads and saves tarballs of a host's kernel files.
"""

import bz2
import gzip
import io
import lzma
import os
import posixpath
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, cast

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import read_yaml, shipped
from cputrain.affinity.topology.kernel_files import MOST_BYTES, limit_files, text
from cputrain.affinity.topology.machine import Core, Machine, NumaNode, ordered
from cputrain.affinity.topology.sysfs import read_machine, this_machine
from cputrain.affinity.wording import GIB

ACHIEVED = 0.8  # achieved share of the memory channels' nominal bandwidth


MACHINES = shipped("machines")


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
    if is_archive(spec) or (path.is_file() and tarfile.is_tarfile(path)):
        with unpacked(path) as folder:
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


def _starts_as_xml(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def described_machines(folder: Path) -> tuple[Path, ...]:
    """List the machine descriptions under a folder by path: tarballs, XML files, folders with sys/ and proc/.

    Raises InputError if there are none.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name a folder with machine descriptions")
    found = []
    for place, folders, files in os.walk(folder):
        if "sys" in folders and (Path(place) / "sys/devices/system/cpu").is_dir():
            found.append(Path(place))
            folders.clear()
        folders.sort()
        found += [Path(place) / file for file in files if is_archive(file) or file.endswith(".xml")]
    if not found:
        raise InputError(f"{folder} contains no tarball, XML file or folder that describes a machine: name another one")
    return tuple(sorted(found))


def machine_names() -> list[str]:
    """List the names of all machines in the catalog: PROCESSOR-VARIANT."""
    variants = ((path.stem, read_yaml(path)["variants"]) for path in MACHINES.glob("*.yaml"))
    return sorted(f"{processor}-{variant}" for processor, listed in variants for variant in listed)


def catalog_machines() -> tuple[Machine, ...]:
    """Return all machines in the catalog, sorted by name."""
    entries = ((path, read_yaml(path)) for path in MACHINES.glob("*.yaml"))
    found = (
        _build_machine(f"{path.stem}-{variant}", entry, **sizes)
        for path, entry in entries
        for variant, sizes in entry["variants"].items()
    )
    return tuple(sorted(found, key=lambda machine: machine.name))


def description_of(machine: Machine) -> str:
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


# The files that are read; a host's tarball may have thousands of others, which take long to unpack.
CPU = (
    r"online|isolated|cpu\d+/(online|cpu_capacity|cache/index\d/(level|shared_cpu_list|shared_cpu_map)|"
    r"topology/(core_cpus_list|thread_siblings(_list)?|(package_cpus|core_siblings)(_list)?|physical_package_id|die_id)|"
    r"acpi_cppc/(highest_perf|nominal_perf)|cpufreq(/cpuinfo_max_freq)?)|cpufreq/policy\d+/cpuinfo_max_freq"
)
NODE = r"online|node\d+/(cpulist|cpumap|meminfo|distance|access\d/initiators(/\w+)?|memory_side_cache/index\d+/size)"
DEVICES = (
    rf"sys/devices/(system/cpu/({CPU})|system/node/({NODE})|virtual/memory_tiering/memory_tier\d+/nodelist|"
    r"cpu_(core|atom|lowpower)/cpus)"
)
PROCESS = r"proc/(cpuinfo|meminfo|mounts|self/(cgroup|cpuset|status)|sys/kernel/hostname)"
GROUPS = (
    r"(cpuset\.)?(cpus|mems)|cpuset\.(cpus|mems)\.effective|cpuset\.cpus\.partition|cpu\.(max|cfs_quota_us|cfs_period_us)|"
    r"memory\.(max|limit_in_bytes)"
)
# Control groups may be mounted anywhere except in some folders of sys/, which have other files with such names.
READ = re.compile(rf"(?:^|/)(?:{DEVICES}|{PROCESS}|(?!.*\bsys/(?:devices|class|bus|module)/)(?:.*/)?(?:{GROUPS}))$")
# The only link that is followed: cpuN/cpufreq of CPUs that share a clock.
CLOCK = re.compile(r"\.\./cpufreq/policy\d+")
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
OPENED: dict[bytes, Any] = {  # functions of a path that return a binary file
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"]\0\0": lzma.open,
}
MOST_UNPACKED = 1 << 30  # bytes of a tarball; the whole /sys and /proc of a host with 4,096 CPUs has less
MOST_MEMBERS = 1 << 19
MOST_WRITTEN, MOST_FILES = 1 << 26, 1 << 17  # limits of bytes, and of files and folders, that are unpacked
DAMAGE = (OSError, EOFError, ValueError, KeyError, tarfile.TarError, zlib.error, lzma.LZMAError)


def is_archive(spec: str) -> bool:
    """Whether the name ends like a tarball's."""
    return spec.endswith(SUFFIXES)


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Unpack the necessary files of a tarball to a temporary folder, which is removed after the block.

    Nothing is written outside it, and the only links are to a CPU's clock. Raises InputError if the file is missing,
    damaged, truncated or too large when unpacked. Errors inside the block name the tarball's files.
    """
    with tempfile.TemporaryDirectory(prefix="affinity-") as scratch:
        try:
            _unpack(archive, Path(scratch))
            yield Path(scratch)
        except InputError as error:
            message = str(error).replace(f"{scratch}/", f"{archive}: ").replace(scratch, str(archive))
            raise InputError(message) from None


def tree_root(folder: Path) -> Path:
    """Return the folder, or the nearest one below it, that has sys/devices. Raises InputError if there is none."""
    pattern = "sys/devices/system/cpu"
    for depth in ("", "*/", "*/*/"):
        found = sorted(folder.glob(depth + pattern))
        if found:
            return found[0].parents[3]
    raise InputError(f"{folder} contains no {pattern}: give a folder or tarball with a host's sys/ and proc/")


class _Bounded:
    """A tarball's bytes for tarfile, with limits against decompression bombs.

    Raises InputError if more than MOST_UNPACKED would be unpacked, or more than MOST_BYTES at once, as headers may
    claim any size.
    """

    def __init__(self, file: IO[bytes], archive: Path) -> None:
        self._file, self._archive = file, archive
        self.tell = file.tell

    def read(self, count: int) -> bytes:
        """Read the next bytes."""
        if count > MOST_BYTES:
            raise _too_large(self._archive, f"a header of {count:,} bytes, above the limit of {MOST_BYTES:,}")
        self._check(self.tell() + count)
        return self._file.read(count)

    def seek(self, position: int) -> int:
        """Seek to a position."""
        self._check(position)
        return self._file.seek(position)

    def _check(self, position: int) -> None:
        if position > MOST_UNPACKED:
            raise _too_large(self._archive, f"more than {MOST_UNPACKED >> 20:,} MiB, the limit for unpacking")


def _too_large(archive: Path, found: str) -> InputError:
    return InputError(f"{archive} has {found}: pack only the host's sys/devices and proc/")


def _open_tarball(archive: Path) -> IO[bytes]:
    """Open a tarball, decompressed according to its first bytes."""
    with archive.open("rb") as file:
        begin = file.read(8)
    for magic, opened in OPENED.items():
        if begin.startswith(magic):
            return cast(IO[bytes], opened(archive))
    return archive.open("rb")


def _unpack(archive: Path, folder: Path) -> None:
    written = files = 0
    contents: dict[str, tarfile.TarInfo] = {}
    try:
        with _open_tarball(archive) as file, tarfile.open(fileobj=_Bounded(file, archive), mode="r:") as tar:  # type: ignore[call-overload]
            for number, packed in enumerate(tar, 1):
                if number > MOST_MEMBERS:
                    raise _too_large(archive, f"more than {MOST_MEMBERS:,} members, the limit for reading")
                name = posixpath.normpath(packed.name)
                member = _resolve_hard_link(packed, name, contents)
                if READ.search(name) and not name.startswith(("/", "..")) and member.size <= MOST_BYTES:
                    written, files = written + member.size, files + 1
                    if written > MOST_WRITTEN:
                        raise _too_large(archive, f"more than {MOST_WRITTEN >> 20} MiB of topology files")
                    if files > MOST_FILES:
                        raise _too_large(archive, f"more than {MOST_FILES:,} topology files")
                    _write(tar, member, folder / name)
            _check_end(tar)
    except FileNotFoundError:
        raise InputError(f"{archive} does not exist: name a tarball with a host's sys/ and proc/") from None
    except DAMAGE as error:
        why = "it is damaged, truncated or not a tarball" if isinstance(error, tarfile.ReadError) else error
        raise InputError(f"cannot unpack {archive}: {why}; copy or pack it again") from None


def _resolve_hard_link(member: tarfile.TarInfo, name: str, contents: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo:
    """Return the member, or for a hard link the file that it points to, so that its size counts.

    `contents` are the files so far, by name.
    """
    if member.islnk():
        member = contents.get(posixpath.normpath(member.linkname), member)
    if member.isfile():
        contents[name] = member
    return member


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise ReadError unless the members end with a block of zeros, as tarfile ignores damaged headers silently.

    Reading to the end also verifies the checksums of a compressed tarball.
    """
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    end = tar.fileobj.read(tarfile.BLOCKSIZE)
    while tar.fileobj.read(MOST_BYTES):
        pass
    if end != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("it is damaged or truncated")


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():  # a later member of the same name replaces an earlier one
        path.unlink()
    if member.issym() and path.name == "cpufreq" and CLOCK.fullmatch(member.linkname):
        path.symlink_to(member.linkname)
    elif member.isdir() or member.issym():  # initiators/nodeN is a link of which only the name matters
        path.mkdir(exist_ok=True)
    elif member.islnk():
        raise tarfile.ReadError(f"{member.name} is a link to a missing file")
    elif (content := tar.extractfile(member)) is not None:
        path.write_bytes(content.read())


# Places of the files; only files that match `READ` or `HWLOC` are saved.
PLACES = (
    *("sys/devices/system/cpu/*", "sys/devices/system/cpu/cpu[0-9]*/*", "sys/devices/system/cpu/cpu[0-9]*/*/*"),
    *("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*/*", "sys/devices/system/cpu/cpu[0-9]*/regs/identification/*"),
    *("sys/devices/system/node/*", "sys/devices/system/node/node[0-9]*/*", "sys/devices/cpu_*/cpus"),
    *("sys/devices/system/node/node[0-9]*/access[0-9]/initiators/*", "sys/devices/virtual/memory_tiering/*/nodelist"),
    *("sys/devices/system/node/node[0-9]*/hugepages/*/nr_hugepages",),
    *("proc/*info", "proc/self/cgroup", "proc/self/cpuset", "proc/sys/kernel/*"),
)
# Further files that hwloc reads: sizes of caches, sets of PUs under other names, huge pages, the kernel's release.
HWLOC = re.compile(
    r"/cpu\d+/(cache/index\d/(type|size|id|coherency_line_size|number_of_sets|physical_line_partition|"
    r"ways_of_associativity)|topology/(core_cpus|(die|cluster|book|drawer)_(cpus|cpus_list|id|siblings)|core_id)|"
    r"regs/identification/midr_el1|cpufreq/base_frequency)$|"
    r"/node\d+/hugepages/hugepages-\d+kB/nr_hugepages$|proc/sys/kernel/(ostype|osrelease)$"
)
# Only the lines about limits are saved of these files: the others reveal the user, the job and the file servers.
LINES = {
    "proc/self/status": re.compile(r"(Cpus|Mems)_allowed(_list)?:"),
    "proc/mounts": re.compile(r"\S+ \S+ (cgroup2?|cpuset) "),
}


def save_machine(root: Path, file: Path) -> int:
    """Save the topology of the host under root in a new tarball, and return its number of files.

    `find_machine(str(file))` reads the same machine, and so does `lstopo` with HWLOC_FSROOT after unpacking. Files that
    the kernel refuses to read are left out. Raises InputError if the tarball exists or its name has no known suffix.
    """
    if not is_archive(file.name):
        raise InputError(f"{file} is not the name of a tarball: name it HOST.tar.xz, for example")
    if file.exists():
        raise InputError(f"{file} already exists: name another file")
    buffer = io.BytesIO()
    suffix = file.name.rpartition(".")[2]
    mode = {"tgz": "gz", "tbz2": "bz2", "txz": "xz", "tar": ""}.get(suffix, suffix)
    contents = _contents(root)
    with tarfile.open(fileobj=buffer, mode=f"w:{mode}") as tar:  # type: ignore[call-overload]  # a mode made of parts
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{file.name.split('.')[0]}/{name}")
            member.mode = 0o644
            member.size = len(content or b"")
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member, io.BytesIO(content or b""))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(buffer.getvalue())
    return sum(content is not None for content in contents.values())


def _contents(root: Path) -> dict[str, bytes | None]:
    """Map names to contents; None for folders of which only the name matters (initiators/node0)."""
    contents: dict[str, bytes | None] = {}
    for path in sorted({*(path for place in PLACES for path in root.glob(place)), *limit_files(root)}):
        name = str(path.relative_to(root))
        if READ.search(name) or HWLOC.search(name):
            if path.is_dir() and path.parent.name == "initiators":
                contents[name] = None
            elif path.is_file() and (content := _content(path)) is not None:
                contents[name] = content
    for name, pattern in LINES.items():
        if (root / name).is_file():
            kept = (line for line in text(root / name).splitlines() if pattern.match(line))
            contents[name] = "".join(f"{line}\n" for line in kept).encode()
    return contents


def _content(path: Path) -> bytes | None:
    """Read a file; None if the kernel refuses, for lack of a value or of permission."""
    try:
        return text(path).encode() + b"\n"
    except InputError:
        return None
