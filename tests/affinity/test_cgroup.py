"""Control groups and cpusets as kernels show them, each written out under a root of its own."""

import io
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError
from cputrain.affinity.topology import tarball
from cputrain.affinity.topology.catalog import find_machine, tree_root
from cputrain.affinity.topology.kernel_files import Limits, read_limits
from cputrain.affinity.topology.tarball import unpacked_tarball
from tests.support.machines import build_machine, write_sysfs

NOTHING = Limits(pus=None, nodes=None, cpu_quota=None, memory_bytes=None)


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_no_groups_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == NOTHING


def test_v2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/system.slice/slurmstepd.scope"
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
            f"{group}/job_7/cpuset.cpus.effective": "0-7\n",
            f"{group}/job_7/cpuset.mems.effective": "0\n",
            f"{group}/job_7/step_0/cpu.max": "max 100000\n",
            f"{group}/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/cpu.max": "800000 100000\n",
            f"{group}/job_7/step_0/memory.max": "2000\n",
            f"{group}/memory.max": "1000\n",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-63\n",
        },
    )
    assert read_limits(tmp_path) == Limits(pus=tuple(range(8)), nodes=(0,), cpu_quota=3.5, memory_bytes=1000)


def test_a_container_sees_its_own_root(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/../../outside\n",
            "sys/fs/cgroup/cpuset.cpus.effective": "4-5\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        },
    )
    assert read_limits(tmp_path) == Limits(pus=(4, 5), nodes=None, cpu_quota=1.5, memory_bytes=None)


def test_v1_at_an_unusual_mount(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc/mounts": "none /cg/sets cgroup rw,cpuset 0 0\nnone /cg/cpu cgroup rw,cpu,cpuacct 0 0\n"
            "none /cg/memory cgroup rw,memory 0 0\nproc /proc proc rw 0 0\n",
            "proc/self/cgroup": "5:cpuset:/uid_1/job_2\n4:cpu,cpuacct:/uid_1\n3:memory:/uid_1\n",
            "cg/sets/uid_1/job_2/cpuset.cpus": "2-3,6\n",
            "cg/sets/uid_1/job_2/cpuset.mems": "1\n",
            "cg/sets/cpuset.cpus": "0-7\n",
            "cg/cpu/uid_1/cpu.cfs_quota_us": "200000\n",
            "cg/cpu/uid_1/cpu.cfs_period_us": "100000\n",
            "cg/cpu/cpu.cfs_quota_us": "-1\n",
            "cg/memory/uid_1/memory.limit_in_bytes": "4096\n",
            "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert read_limits(tmp_path) == Limits(pus=(2, 3, 6), nodes=(1,), cpu_quota=2.0, memory_bytes=4096)


@pytest.mark.parametrize(
    "mount", ["none /dev/cpuset cpuset rw 0 0\n", "none /dev/cpuset cgroup rw,cpuset,noprefix 0 0\n"]
)
def test_legacy_cpusets_have_names_without_prefix(tmp_path: Path, mount: str) -> None:
    write(
        tmp_path,
        **{
            "proc/mounts": mount,
            "proc/self/cpuset": "/torque/job\n",
            "dev/cpuset/torque/job/cpus": "\n",  # made, not yet filled: the parent's holds
            "dev/cpuset/torque/cpus": "0-6,12-15\n",
            "dev/cpuset/torque/mems": "1-4\n",
        },
    )
    assert read_limits(tmp_path) == Limits(
        pus=(*range(7), *range(12, 16)), nodes=(1, 2, 3, 4), cpu_quota=None, memory_bytes=None
    )


def test_nonsense_names_its_file(tmp_path: Path) -> None:
    write(tmp_path, **{"sys/fs/cgroup/cpuset.cpus.effective": "all\n"})
    with pytest.raises(InputError, match=r"cpuset.cpus.effective contains 'all'"):
        read_limits(tmp_path)


def test_a_machine_is_narrowed_by_its_groups(tmp_path: Path) -> None:
    write_sysfs(build_machine(2, 1, 4, 2), tmp_path)
    write(
        tmp_path, **{"sys/fs/cgroup/cpuset.cpus.effective": "0-1,8-9\n", "sys/fs/cgroup/cpuset.mems.effective": "0\n"}
    )
    machine = find_machine(str(tmp_path))
    assert (machine.allowed_pus, machine.allowed_nodes) == ((0, 1, 8, 9), (0,))
    assert len(machine.pus) == 16


class Zeros(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        buffer[:] = bytes(len(buffer))
        return len(buffer)


def packed(path: Path, members: Iterator[tuple[str, int]], **fields: str) -> Path:
    """A tarball of files of so many zeros."""
    with tarfile.open(path, "w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
        for name, size in members:
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = size, fields
            tar.addfile(member, io.BufferedReader(Zeros()))
    return path


@pytest.mark.parametrize(
    ("members", "why"),
    [
        (((f"x{i}/cpu.max", 1 << 19) for i in range(6)), "more than 2 MiB of topology files"),
        (((f"x{i}/cpu.max", 1 << 19) for i in range(4)), None),
        (((f"notes/{i}", 12 << 20) for i in range(4)), "more than 32 MiB"),
        ((("notes", 0) for _ in range(201)), "more than 200 members"),
        (((f"x{i}/cpu.max", 0) for i in range(101)), "more than 100 topology files"),
    ],
    ids=["files", "as many as are read", "passed over", "members", "small files"],
)
def test_a_tarball_that_unpacks_to_too_much_is_refused(
    members: Iterator[tuple[str, int]], why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tarball, "MAX_UNPACKED_BYTES", 32 << 20)
    monkeypatch.setattr(tarball, "MAX_WRITTEN_BYTES", 2 << 20)
    monkeypatch.setattr(tarball, "MAX_MEMBERS", 200)
    monkeypatch.setattr(tarball, "MAX_FILES", 100)
    path = packed(tmp_path / "m.tar.gz", members)
    assert path.stat().st_size < 1 << 18
    with (
        nullcontext() if why is None else pytest.raises(InputError, match=rf"m\.tar\.gz has {why}"),
        unpacked_tarball(path),
    ):
        pass


def test_a_tarball_s_header_of_many_bytes_is_refused(tmp_path: Path) -> None:
    """It would be read into memory before the member that it belongs to is known."""
    path = packed(tmp_path / "m.tar.gz", iter([("proc/cpuinfo", 1)]), comment="x" * (17 << 20))
    with pytest.raises(InputError, match=r"m\.tar\.gz has a header of 17,82.,... bytes"), unpacked_tarball(path):
        pass


def test_a_tarball_is_read_like_its_folder(tmp_path: Path) -> None:
    machine = build_machine(1, 2, 3, 2)
    write_sysfs(machine, tmp_path / "host")
    (tmp_path / "host/sys/outside").symlink_to("/etc")
    with tarfile.open(tmp_path / "host.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "host", arcname="some/host")
    assert find_machine(str(tmp_path / "host.tar.gz")) == machine == find_machine(str(tmp_path / "host"))
    whole = (tmp_path / "host.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    for broken, why in (("cut.tar.gz", "cannot unpack"), ("absent.tar", "does not exist")):
        with pytest.raises(InputError, match=why):
            find_machine(str(tmp_path / broken))
    (tmp_path / "host/sys/devices/system/cpu/online").write_text("all\n")
    with tarfile.open(tmp_path / "wrong.tar", "w") as tar:
        tar.add(tmp_path / "host", arcname="some/host")
    with pytest.raises(InputError, match=r"wrong\.tar: some/host/sys/devices/system/cpu/online contains 'all'"):
        find_machine(str(tmp_path / "wrong.tar"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="contains no sys/devices/system/cpu"):
        tree_root(tmp_path / "empty")


def test_mounts_without_a_source_are_passed_over(tmp_path: Path) -> None:
    """mount -t tmpfs "" /mnt, as some containers' starters have it."""
    mounts = " /mnt tmpfs rw 0 0\ncgroup2 /other cgroup2 rw 0 0\n"
    write(tmp_path, **{"proc/mounts": mounts, "proc/self/cgroup": "0::/\n", "other/cpuset.cpus.effective": "2-3\n"})
    assert read_limits(tmp_path).pus == (2, 3)


def test_a_mount_that_this_user_may_not_see_is_passed_over() -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write(root, **{"proc/mounts": "cgroup2 /closed/cgroup cgroup2 rw 0 0\n", "closed/cgroup/cpu.max": "1 2\n"})
        root.chmod(0o755)
        (root / "closed").chmod(0)
        before = os.geteuid()
        try:
            if before == 0:
                os.seteuid(65534)
            assert read_limits(root) == NOTHING
        finally:
            os.seteuid(before)
            (root / "closed").chmod(0o755)


def linked(path: Path, links: dict[str, str], size: int = 1) -> Path:
    """A tarball of a file "big" and hard links, name -> target."""
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        big = tarfile.TarInfo("big")
        big.size = size
        tar.addfile(big, io.BytesIO(bytes(size)))
        for name, target in links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, target
            tar.addfile(link)
    return path


@pytest.mark.slow
def test_hard_links_count_as_large_as_what_they_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be written to the disk once more, without a limit."""
    monkeypatch.setattr(tarball, "MAX_WRITTEN_BYTES", 2 << 20)
    path = linked(tmp_path / "m.tar.gz", {f"x{i}/cpu.max": "big" for i in range(5)}, 1 << 19)
    with pytest.raises(InputError, match="more than 2 MiB of topology files"), unpacked_tarball(path):
        pass
    last = sys.getrecursionlimit() + 100
    chain = {f"x{i}/cpu.max": f"x{i - 1}/cpu.max" if i else "big" for i in range(last + 1)}
    with unpacked_tarball(linked(tmp_path / "chain.tar.gz", chain)) as folder:
        assert (folder / f"x{last}/cpu.max").read_bytes() == bytes(1)
    with pytest.raises(InputError, match="cannot unpack"), unpacked_tarball(linked(path, {"x/cpu.max": "absent"})):
        pass
