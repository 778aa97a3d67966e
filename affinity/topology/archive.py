"""A tarball of a host's /sys and /proc: the files in it that are read, and how it is unpacked while it is read."""

import lzma
import posixpath
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from affinity.errors import InputError
from affinity.topology.kernel_files import MOST_BYTES

# What is read of a host's files, which has thousands that are not and that take long to unpack.
CPU = (
    r"online|cpu\d+/(online|cpu_capacity|cache/index\d/(level|shared_cpu_list|shared_cpu_map)|"
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
    r"(cpuset\.)?(cpus|mems)|cpuset\.(cpus|mems)\.effective|cpu\.(max|cfs_quota_us|cfs_period_us)|"
    r"memory\.(max|limit_in_bytes)"
)
# Control groups are mounted anywhere, but for the folders of sys/ that have other files by these names.
READ = re.compile(rf"(?:^|/)(?:{DEVICES}|{PROCESS}|(?!.*\bsys/(?:devices|class|bus|module)/)(?:.*/)?(?:{GROUPS}))$")
# The one link that leads to a file that is read: cpuN/cpufreq, where several CPUs have one clock.
CLOCK = re.compile(r"\.\./cpufreq/policy\d+")
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
DAMAGE = (OSError, EOFError, ValueError, KeyError, tarfile.TarError, zlib.error, lzma.LZMAError)


def is_archive(spec: str) -> bool:
    """Whether the name is a tarball's."""
    return spec.endswith(SUFFIXES)


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """The tarball's files that are read, in a temporary folder, which is removed afterwards.

    Nothing is written outside it, and no link but to a CPU's clock. Raises InputError when the file is missing, damaged
    or truncated. Errors inside the block name the files as the tarball's.
    """
    with tempfile.TemporaryDirectory(prefix="affinity-") as scratch:
        _unpack(archive, Path(scratch))
        try:
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


def _unpack(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = posixpath.normpath(member.name)
                if READ.search(name) and not name.startswith(("/", "..")) and member.size <= MOST_BYTES:
                    _write(tar, member, folder / name)
    except FileNotFoundError:
        raise InputError(f"{archive} does not exist: name a tarball with a host's sys/ and proc/") from None
    except DAMAGE as error:
        # tarfile's message has a line for each compression that it tried
        why = "it is damaged, cut short or no tarball" if "\n" in str(error) else error
        raise InputError(f"cannot unpack {archive}: {why}: copy or pack it again") from None


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.issym() and path.name == "cpufreq" and CLOCK.fullmatch(member.linkname):
        path.symlink_to(member.linkname)
    elif member.isdir() or member.issym():  # initiators/nodeN is a link whose name is all that counts
        path.mkdir(exist_ok=True)
    elif (content := tar.extractfile(member)) is not None:
        path.write_bytes(content.read())
