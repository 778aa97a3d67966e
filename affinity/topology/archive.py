"""A tarball of a host's /sys and /proc, unpacked while it is read."""

import re
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from affinity.errors import InputError

# A host's /sys has thousands of small files that nothing here reads and that take long to unpack.
SYS = re.compile(r"(?<!proc/)\bsys/(devices|bus|class|firmware|module|kernel)/.")
TOPOLOGY = re.compile(
    r"/system/(cpu|node)/(online|(cpu|node)\d+/(online|cpulist|cpumap|meminfo|distance|access\d/initiators(/\w+)?|"
    r"topology/(core_cpus_list|thread_siblings|thread_siblings_list|physical_package_id|die_id)|"
    r"cache/index\d/(level|shared_cpu_list|shared_cpu_map)|cpu_capacity|acpi_cppc/(highest|nominal)_perf|"
    r"cpufreq(/cpuinfo_max_freq)?)|cpufreq/policy\d+/cpuinfo_max_freq)$|"
    r"/memory_tiering/memory_tier\d+/nodelist$|/cpu_(core|atom|lowpower)/cpus$"
)
SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def is_archive(spec: str) -> bool:
    """Whether the name is a tarball's."""
    return spec.endswith(SUFFIXES)


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """The tarball's files in a temporary folder, which is removed afterwards.

    Members that would end or point outside it (links of /sys do) are left out. Raises InputError when the file is
    missing, damaged or truncated.
    """
    with tempfile.TemporaryDirectory(prefix="affinity-") as scratch:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter=_inside)
        except (OSError, EOFError, tarfile.TarError) as error:
            raise InputError(f"cannot unpack {archive}: {error}") from None
        yield Path(scratch)


def tree_root(folder: Path) -> Path:
    """The folder itself or the nearest one below it that holds sys/devices. Raises InputError when there is none."""
    pattern = "sys/devices/system/cpu"
    for depth in ("", "*/", "*/*/"):
        found = sorted(folder.glob(depth + pattern))
        if found:
            return found[0].parents[3]
    raise InputError(f"{folder} holds no {pattern}: give a folder or tarball with a host's sys/ and proc/")


def _inside(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    if SYS.search(member.name) and not TOPOLOGY.search(member.name):
        return None
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None
