"""Tarballs of a host's kernel files: read with limits, as anybody may have made them, and saved."""

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
from cputrain.affinity.filesystem import is_tarball
from cputrain.affinity.topology.kernel_files import MAX_FILE_BYTES, limit_files, read_text

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
OPENED: dict[bytes, Any] = {  # functions of a path that return a binary file
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"]\0\0": lzma.open,
}
MAX_UNPACKED_BYTES = 1 << 30  # bytes of a tarball; the whole /sys and /proc of a host with 4,096 CPUs has less
MAX_MEMBERS = 1 << 19
MAX_WRITTEN_BYTES, MAX_FILES = 1 << 26, 1 << 17  # limits of bytes, and of files and folders, that are unpacked
DAMAGE = (OSError, EOFError, ValueError, KeyError, tarfile.TarError, zlib.error, lzma.LZMAError)
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


@contextmanager
def unpacked_tarball(archive: Path) -> Iterator[Path]:
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


class _Bounded:
    """A tarball's bytes for tarfile, with limits against decompression bombs.

    Raises InputError if more than MAX_UNPACKED_BYTES would be unpacked, or more than MAX_FILE_BYTES at once, as headers
    may claim any size.
    """

    def __init__(self, file: IO[bytes], archive: Path) -> None:
        self._file, self._archive = file, archive
        self.tell = file.tell

    def read(self, count: int) -> bytes:
        """Read the next bytes."""
        if count > MAX_FILE_BYTES:
            raise _too_large(self._archive, f"a header of {count:,} bytes, above the limit of {MAX_FILE_BYTES:,}")
        self._check(self.tell() + count)
        return self._file.read(count)

    def seek(self, position: int) -> int:
        """Seek to a position."""
        self._check(position)
        return self._file.seek(position)

    def _check(self, position: int) -> None:
        if position > MAX_UNPACKED_BYTES:
            raise _too_large(self._archive, f"more than {MAX_UNPACKED_BYTES >> 20:,} MiB, the limit for unpacking")


def _too_large(archive: Path, what: str) -> InputError:
    return InputError(f"{archive} has {what}: pack only the host's sys/devices and proc/")


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
                if number > MAX_MEMBERS:
                    raise _too_large(archive, f"more than {MAX_MEMBERS:,} members, the limit for reading")
                name = posixpath.normpath(packed.name)
                member = _resolve_hard_link(packed, name, contents)
                if READ.search(name) and not name.startswith(("/", "..")) and member.size <= MAX_FILE_BYTES:
                    written, files = written + member.size, files + 1
                    if written > MAX_WRITTEN_BYTES:
                        raise _too_large(archive, f"more than {MAX_WRITTEN_BYTES >> 20} MiB of topology files")
                    if files > MAX_FILES:
                        raise _too_large(archive, f"more than {MAX_FILES:,} topology files")
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
    while tar.fileobj.read(MAX_FILE_BYTES):
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


def save_machine(root: Path, file: Path) -> int:
    """Save the topology of the host under root in a new tarball, and return its number of files.

    `find_machine(str(file))` reads the same machine, and so does `lstopo` with HWLOC_FSROOT after unpacking. Files that
    the kernel refuses to read are left out. Raises InputError if the tarball exists or its name has no known suffix.
    """
    if not is_tarball(file.name):
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
    for path in sorted({*(path for pattern in PLACES for path in root.glob(pattern)), *limit_files(root)}):
        name = str(path.relative_to(root))
        if READ.search(name) or HWLOC.search(name):
            if path.is_dir() and path.parent.name == "initiators":
                contents[name] = None
            elif path.is_file() and (content := _content(path)) is not None:
                contents[name] = content
    for name, pattern in LINES.items():
        if (root / name).is_file():
            matching = (line for line in read_text(root / name).splitlines() if pattern.match(line))
            contents[name] = "".join(f"{line}\n" for line in matching).encode()
    return contents


def _content(path: Path) -> bytes | None:
    """Read a file; None if the kernel refuses, for lack of a value or of permission."""
    try:
        return read_text(path).encode() + b"\n"
    except InputError:
        return None
