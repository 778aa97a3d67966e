"""A host's topology as a tarball: the small files of /sys and /proc that cputrain and hwloc read, and nothing else."""

import io
import re
import tarfile
from pathlib import Path

from affinity.errors import InputError
from affinity.topology.archive import READ, is_archive
from affinity.topology.cgroup import limit_files
from affinity.topology.kernel_files import text

# Where the files are; of these only those are saved that `READ` or `HWLOC` names.
PLACES = (
    *("sys/devices/system/cpu/*", "sys/devices/system/cpu/cpu[0-9]*/*", "sys/devices/system/cpu/cpu[0-9]*/*/*"),
    *("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*/*", "sys/devices/system/cpu/cpu[0-9]*/regs/identification/*"),
    *("sys/devices/system/node/*", "sys/devices/system/node/node[0-9]*/*", "sys/devices/cpu_*/cpus"),
    *("sys/devices/system/node/node[0-9]*/access[0-9]/initiators/*", "sys/devices/virtual/memory_tiering/*/nodelist"),
    *("sys/devices/system/node/node[0-9]*/hugepages/*/nr_hugepages",),
    *("proc/*info", "proc/self/cgroup", "proc/self/cpuset", "proc/sys/kernel/*"),
)
# What hwloc reads beyond: sizes of caches, sets of PUs under other names, huge pages, the kernel's release.
HWLOC = re.compile(
    r"/cpu\d+/(cache/index\d/(type|size|id|coherency_line_size|number_of_sets|physical_line_partition|"
    r"ways_of_associativity)|topology/(core_cpus|(die|cluster|book|drawer)_(cpus|cpus_list|id|siblings)|core_id)|"
    r"regs/identification/midr_el1|cpufreq/base_frequency)$|"
    r"/node\d+/hugepages/hugepages-\d+kB/nr_hugepages$|proc/sys/kernel/(ostype|osrelease)$"
)
# Of these files only the lines that tell limits: the others tell about the user, the job and the file servers.
LINES = {
    "proc/self/status": re.compile(r"(Cpus|Mems)_allowed(_list)?:"),
    "proc/mounts": re.compile(r"\S+ \S+ (cgroup2?|cpuset) "),
}


def save_machine(root: Path, file: Path) -> int:
    """Write the topology of the host under root into a new tarball; the number of files in it.

    `find_machine(str(file))` reads the same machine, and `lstopo` after unpacking and with HWLOC_FSROOT. Files that the
    kernel refuses to read are not in it. Raises InputError where the tarball exists or cannot be one by its name.
    """
    if not is_archive(file.name):
        raise InputError(f"{file} is not the name of a tarball: name it HOST.tar.xz")
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
    """Name -> content; None for a folder whose name tells something (initiators/node0)."""
    contents: dict[str, bytes | None] = {}
    for path in sorted({*(path for place in PLACES for path in root.glob(place)), *limit_files(root)}):
        name = str(path.relative_to(root))
        if READ.search(name) or HWLOC.search(name):
            if path.is_dir() and path.parent.name == "initiators":
                contents[name] = None
            elif path.is_file() and (content := _content(path)) is not None:
                contents[name] = content
    for name, wanted in LINES.items():
        if (root / name).is_file():
            kept = (line for line in text(root / name).splitlines() if wanted.match(line))
            contents[name] = "".join(f"{line}\n" for line in kept).encode()
    return contents


def _content(path: Path) -> bytes | None:
    """None where the kernel refuses: a driver without a value, a file for root alone."""
    try:
        return text(path).encode() + b"\n"
    except InputError:
        return None
