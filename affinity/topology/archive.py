"""Machines as tarballs: save this host's kernel files, and read such a file."""

import bz2
import gzip
import io
import lzma
import posixpath
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology.kernel_files import MOST_BYTES, limit_files, text

# What is read of a host's files, which has thousands that are not and that take long to unpack.
CPU = (
    r"online|isolated|cpu\d+/(online|cpu_capacity|cache/index\d/(level|shared_cpu_list|shared_cpu_map)|"
    r"topology/(core_cpus_list|thread_siblings(_list)?|(package_cpus|core_siblings)(_list)?|physical_package_id|die_id)|"
    r"acpi_cppc/(highest_perf|nominal_perf)|cpufreq(/cpuinfo_max_freq)?)|cpufreq/policy\d+/cpuinfo_max_freq"
)
NODE = r"online|node\d+/(cpulist|cpumap|meminfo|distance|access\d/initiators(/\w+)?)"
DEVICES = (
    rf"sys/devices/(system/cpu/({CPU})|system/node/({NODE})|virtual/memory_tiering/memory_tier\d+/nodelist|"
    r"cpu_(core|atom|lowpower)/cpus)"
)
PROCESS = r"proc/(cpuinfo|meminfo|mounts|self/(cgroup|cpuset|status)|sys/kernel/hostname)"
GROUPS = (
    r"(cpuset\.)?(cpus|mems)|cpuset\.(cpus|mems)\.effective|cpuset\.cpus\.partition|cpu\.(max|cfs_quota_us|cfs_period_us)|"
    r"memory\.(max|limit_in_bytes)"
)
# Control groups are mounted anywhere, but for the folders of sys/ that have other files by these names.
READ = re.compile(rf"(?:^|/)(?:{DEVICES}|{PROCESS}|(?!.*\bsys/(?:devices|class|bus|module)/)(?:.*/)?(?:{GROUPS}))$")
# The one link that leads to a file that is read: cpuN/cpufreq, where several CPUs have one clock.
CLOCK = re.compile(r"\.\./cpufreq/policy\d+")
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
OPENED: dict[bytes, Any] = {  # functions of a path that return a binary file
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"]\0\0": lzma.open,
}
MOST_UNPACKED = 1 << 30  # bytes of a tarball; that of a whole /sys and /proc of 4,096 CPUs has less
MOST_MEMBERS = 1 << 19
MOST_WRITTEN, MOST_FILES = 1 << 26, 1 << 17  # bytes, and files and folders, that are read of it
DAMAGE = (OSError, EOFError, ValueError, KeyError, tarfile.TarError, zlib.error, lzma.LZMAError)


def is_archive(spec: str) -> bool:
    """Whether the name is a tarball's."""
    return spec.endswith(SUFFIXES)


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """The tarball's files that are read, in a temporary folder, which is removed afterwards.

    Nothing is written outside it, and no link but to a CPU's clock. Raises InputError when the file is missing,
    damaged, truncated or unpacks to too much. Errors inside the block name the files as the tarball's.
    """
    with tempfile.TemporaryDirectory(prefix="affinity-") as scratch:
        try:
            _unpack(archive, Path(scratch))
            yield Path(scratch)
        except InputError as error:
            message = str(error).replace(f"{scratch}/", f"{archive}: ").replace(scratch, str(archive))
            raise InputError(message) from None


def tree_root(folder: Path) -> Path:
    """The folder itself or the nearest one below it that has sys/devices. Raises InputError when there is none."""
    pattern = "sys/devices/system/cpu"
    for depth in ("", "*/", "*/*/"):
        found = sorted(folder.glob(depth + pattern))
        if found:
            return found[0].parents[3]
    raise InputError(f"{folder} contains no {pattern}: give a folder or tarball with a host's sys/ and proc/")


class _Bounded:
    """A tarball's bytes for tarfile. Raises InputError where more of them than MOST_UNPACKED, or more than MOST_BYTES
    at once, would be unpacked: headers too are as long as they say."""

    def __init__(self, file: IO[bytes], archive: Path) -> None:
        self._file, self._archive = file, archive
        self.tell = file.tell

    def read(self, count: int) -> bytes:
        """The next bytes."""
        if count > MOST_BYTES:
            raise _too_large(self._archive, f"a header of {count:,} bytes: no more than {MOST_BYTES:,} are read")
        self._check(self.tell() + count)
        return self._file.read(count)

    def seek(self, position: int) -> int:
        """Go to a position."""
        self._check(position)
        return self._file.seek(position)

    def _check(self, position: int) -> None:
        if position > MOST_UNPACKED:
            raise _too_large(self._archive, f"more than {MOST_UNPACKED >> 20:,} MiB: no more is unpacked")


def _too_large(archive: Path, found: str) -> InputError:
    return InputError(f"{archive} has {found}: pack only the host's sys/devices and proc/")


def _opened(archive: Path) -> IO[bytes]:
    """The tarball's file, decompressed by what its first bytes say."""
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
        with _opened(archive) as file, tarfile.open(fileobj=_Bounded(file, archive), mode="r:") as tar:  # type: ignore[call-overload]
            for number, packed in enumerate(tar, 1):
                if number > MOST_MEMBERS:
                    raise _too_large(archive, f"more than {MOST_MEMBERS:,} members: no more are read")
                name = posixpath.normpath(packed.name)
                member = _with_content(packed, name, contents)
                if READ.search(name) and not name.startswith(("/", "..")) and member.size <= MOST_BYTES:
                    written, files = written + member.size, files + 1
                    if written > MOST_WRITTEN:
                        raise _too_large(archive, f"more than {MOST_WRITTEN >> 20} MiB of the files that are read")
                    if files > MOST_FILES:
                        raise _too_large(archive, f"more than {MOST_FILES:,} of the files that are read")
                    _write(tar, member, folder / name)
            _check_end(tar)
    except FileNotFoundError:
        raise InputError(f"{archive} does not exist: name a tarball with a host's sys/ and proc/") from None
    except DAMAGE as error:
        why = "it is damaged, cut short or no tarball" if isinstance(error, tarfile.ReadError) else error
        raise InputError(f"cannot unpack {archive}: {why}: copy or pack it again") from None


def _with_content(member: tarfile.TarInfo, name: str, contents: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo:
    """The member itself; of a hard link the file that it leads to, whose size counts. `contents` are the files so far,
    by name."""
    if member.islnk():
        member = contents.get(posixpath.normpath(member.linkname), member)
    if member.isfile():
        contents[name] = member
    return member


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise ReadError unless the members end with a block of zeros: tarfile stops in silence at a damaged header.

    Reading to the end checks the sums of a compressed tarball, too.
    """
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    end = tar.fileobj.read(tarfile.BLOCKSIZE)
    while tar.fileobj.read(MOST_BYTES):
        pass
    if end != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("it is damaged or cut short")


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():  # a later member of the same name takes an earlier one's place
        path.unlink()
    if member.issym() and path.name == "cpufreq" and CLOCK.fullmatch(member.linkname):
        path.symlink_to(member.linkname)
    elif member.isdir() or member.issym():  # initiators/nodeN is a link whose name is all that counts
        path.mkdir(exist_ok=True)
    elif member.islnk():
        raise tarfile.ReadError(f"{member.name} is a link to no file in it")
    elif (content := tar.extractfile(member)) is not None:
        path.write_bytes(content.read())


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
