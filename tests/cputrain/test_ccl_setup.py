"""Before oneCCL runs: where it is found, what is set for it, how its backend is compiled; each failure in one line."""

import fcntl
import hashlib
import logging
import mmap
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cputrain import native_build as compiled
from cputrain.affinity.binding import Thread
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import cache_folder
from cputrain.affinity.rank import Rank
from cputrain.comm import ccl
from cputrain.comm.ccl import environment
from cputrain.comm.ccl.environment import (
    NATIVE,
    Libraries,
    Transport,
    ccl_extension,
    ccl_settings,
    check_host,
    ensure_extension,
    extension_path,
    find_libraries,
    link_line,
    load_extension,
    sweep_segments,
    units_of,
)
from cputrain.native_build import checksum_file
from cputrain.training.session import misplaced_comm_threads
from tests.support.ccl_jobs import needs_ccl, ran, ran_with_shm
from tests.support.commands import HANGS_S
from tests.support.forked import in_fork
from tests.support.trainings import LENET

RANK = Rank(rank=1, world_size=4, local_rank=1, local_world_size=4, convention="env")
LIBFABRIC = Transport(name="ofi", why="a test")
ALONE = ("plan.ppn=1", "plan.threads=1")


TWO_WORLDS = """
import os
import torch, torch.distributed as dist
from cputrain.mpi.supervise.run import free_port
os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
for _ in range(2):
    before = dict(os.environ)
    os.environ["MASTER_PORT"] = str(free_port())
    dist.init_process_group("ccl")
    dist.all_reduce(torch.ones(3))
    print(os.environ["FI_TCP_IFACE"], os.environ["CCL_LOG_LEVEL"])
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
"""


@needs_ccl
def test_a_later_world_of_a_process_has_the_same_variables() -> None:
    """Without its interface, libfabric would take any, such as a container's that is about to go."""
    done = ran(TWO_WORLDS, limit_s=120)
    assert done.status == 0, done.err
    assert done.out.splitlines() == ["lo error", "lo error"]


@needs_ccl
def test_the_libraries_of_this_environment_are_found() -> None:
    found = find_libraries({})
    assert found.version == (2021, 13)
    assert found.ccl.parts[-4:] == ("cpu", "lib", "libccl.so.1") or found.ccl.name == "libccl.so.1"
    assert found.mpi.name == "libmpi.so.12" and found.fabric.name == "libfabric.so.1"
    assert (found.include / "oneapi/ccl.hpp").is_file()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Python without packages, whose prefix is that folder."""
    monkeypatch.setattr("cputrain.comm.ccl.environment.metadata.files", lambda _package: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def one_ccl(root: Path, version: str, *, library: bool = True) -> None:
    major, minor = version.split(".")
    header = root / "include/oneapi/ccl/config.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#define CCL_MAJOR_VERSION {major}\n#define CCL_MINOR_VERSION {minor}\n")
    (root / "include/oneapi/ccl.hpp").write_text("")
    if library:
        (root / "lib/ccl/cpu/lib").mkdir(parents=True)
        (root / "lib/ccl/cpu/lib/libccl.so.1").write_text("")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda root: None, "oneCCL is not installed"),
        (
            lambda root: one_ccl(root, "2021.17", library=False),
            "found oneCCL 2021.17 in .*, but 2021.9 to 2021.13 with their shared CPU library are supported",
        ),
        (lambda root: one_ccl(root, "2022.0"), "oneCCL 2022.0 in"),
        (lambda root: one_ccl(root, "2021.13"), r"needs libmpi.so.12 of Intel MPI's runtime"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(bare: Path, make: Callable[[Path], None], expected: str) -> None:
    make(bare)
    with pytest.raises(InputError, match=expected) as error:
        find_libraries({})
    assert 'pip install "cputrain[ccl]"' in str(error.value) and "\n" not in str(error.value)


def test_a_loaded_module_s_oneccl_comes_first(bare: Path, tmp_path: Path) -> None:
    one_ccl(tmp_path / "module", "2021.12")
    for name in ("libmpi.so.12", "libfabric.so.1"):
        (tmp_path / "mpi/lib").mkdir(parents=True, exist_ok=True)
        (tmp_path / "mpi/lib" / name).write_text("")
    found = find_libraries({"CCL_ROOT": str(tmp_path / "module"), "I_MPI_ROOT": str(tmp_path / "mpi")})
    assert found.version == (2021, 12) and found.mpi == tmp_path / "mpi/lib/libmpi.so.12"


LIBRARIES = Libraries(
    ccl=Path("/o/lib/ccl/cpu/lib/libccl.so.1"),
    include=Path("/o/include"),
    version=(2021, 13),
    mpi=Path("/i/lib/libmpi.so.12"),
    fabric=Path("/i/lib/libfabric.so.1"),
)


def test_variables_set_by_the_user_are_kept() -> None:
    names = {name for name, _, _ in ccl_settings(LIBRARIES, RANK, LIBFABRIC, {})}
    assert {"I_MPI_ROOT", "CCL_ROOT", "FI_PROVIDER_PATH", "CCL_LOCAL_RANK", "CCL_WORKER_OFFLOAD"} <= names
    kept = dict.fromkeys(names, "mine") | {"CCL_ATL_TRANSPORT": "ofi"}
    assert ccl_settings(LIBRARIES, RANK, LIBFABRIC, kept) == ()


def test_oneccl_s_threads_run_on_comm_cores_only() -> None:
    planned = {"CCL_WORKER_COUNT": "1", "CCL_WORKER_AFFINITY": "3,7,11,15"}
    assert "CCL_WORKER_OFFLOAD" not in {name for name, _, _ in ccl_settings(LIBRARIES, RANK, LIBFABRIC, planned)}
    assert ("CCL_WORKER_OFFLOAD", "0") in {
        (name, value) for name, value, _ in ccl_settings(LIBRARIES, RANK, LIBFABRIC, {})
    }
    without = {name: value for name, value, _ in ccl_settings(LIBRARIES, RANK, LIBFABRIC, {"CCL_WORKER_COUNT": "4"})}
    assert without["CCL_WORKER_COUNT"] == "1"
    there = (Thread(tid=1, name="python", pus=(4, 5, 6, 7)), Thread(tid=2, name="python", pus=(7,)))
    assert misplaced_comm_threads(1, planned, there) == []
    assert misplaced_comm_threads(2, planned, there) == ["oneCCL threads planned on CPU 11, none found on 11"]
    assert misplaced_comm_threads(1, {}, there) == []


def test_a_user_s_number_of_oneccl_s_threads_is_replaced_and_other_variables_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several queues and no threads oneCCL takes libfabric's psm3, which may hang."""
    env = {"CCL_WORKER_COUNT": "4"}
    monkeypatch.setattr(ccl, "_env", env)
    monkeypatch.setattr(ccl, "applied", ccl_settings(LIBRARIES, RANK, LIBFABRIC, env))
    env["CCL_LOG_LEVEL"] = "info"  # set since then
    ccl._set_variables()
    assert (env["CCL_WORKER_COUNT"], env["CCL_WORKER_OFFLOAD"], env["CCL_LOG_LEVEL"]) == ("1", "0", "info")


def test_ranks_of_one_host_meet_on_loopback() -> None:
    """On any other interface they would wait for ever once it goes, as those of containers do."""
    assert ("FI_TCP_IFACE", "lo") in {(name, value) for name, value, _ in ccl_settings(LIBRARIES, RANK, LIBFABRIC, {})}
    spread = replace(RANK, world_size=4, local_world_size=2)
    assert ("FI_TCP_IFACE", "lo") not in {
        (n, v) for n, v, _ in ccl_settings(LIBRARIES, spread, LIBFABRIC, {"MASTER_ADDR": "192.0.2.9"})
    }


FOUR_RANKS = """
from cputrain.affinity.errors import InputError
from cputrain.affinity.rank import Rank
from cputrain.comm.ccl.environment import check_host
subprocess.run("%s", shell=True, check=True)
try:
    check_host(Rank(rank=0, world_size=4, local_rank=0, local_world_size=4, convention="env"), os.environ)
except InputError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (mount)")
@pytest.mark.parametrize(("size", "taken"), [("64m", "0"), ("512m", "448M")], ids=["as in containers", "nearly full"])
def test_a_dev_shm_with_little_room_is_named_at_the_start(size: str, taken: str) -> None:
    """What is free counts, not the size."""
    ballast = "true" if taken == "0" else f"fallocate -l {taken} /dev/shm/ballast"
    done = ran_with_shm(size, FOUR_RANKS % ballast)
    assert "/dev/shm has 64 MiB free, but 4 ranks on a host need 128 MiB of shared memory: enlarge it" in done.out, done


def test_segments_of_dead_processes_are_swept_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    elsewhere = f"{ended.pid}:0:1"  # of a process that has another number here: a container may share the folder
    names = (f"{ended.pid}:0:0", f"{os.getpid()}:0:0", "Intel_MPI_abcdef", "Intel_MPI_ghijkl", "somebody-s", elsewhere)
    dead, living, unmapped, mapped, other, contained = (tmp_path / name for name in names)
    for path in (dead, living, unmapped, mapped, other, contained):
        path.write_bytes(bytes(1 << 16))
        os.utime(path, (0, 0))
    with ExitStack() as stack:
        for path in (mapped, contained):
            with path.open("r+b") as file:
                stack.enter_context(mmap.mmap(file.fileno(), 0))
        assert sweep_segments(tmp_path) >= 2 << 16
        assert sorted(tmp_path.iterdir()) == sorted([living, mapped, other, contained])
        young = tmp_path / "Intel_MPI_mnopqr"
        young.write_bytes(b"1")
        assert sweep_segments(tmp_path) == 0 and young.exists()


def test_segments_of_a_process_that_nobody_has_reaped_yet_are_swept(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as zombie:
        while "Z" not in Path(f"/proc/{zombie.pid}/stat").read_text(encoding="utf-8"):
            time.sleep(0.01)
        (tmp_path / f"{zombie.pid}:0:0").write_bytes(bytes(1 << 16))
        assert sweep_segments(tmp_path) == 1 << 16


def test_sweeps_at_the_same_time_leave_nothing_to_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_file, both = fcntl.fcntl, threading.Barrier(2)

    def together(*arguments: int) -> int:
        """Open the file in both at the same time, if both get this far."""
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        try:
            return set_file(*arguments)
        finally:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.5)

    monkeypatch.setattr(environment.fcntl, "fcntl", together)
    with subprocess.Popen(["true"]) as ended:
        pass
    path = tmp_path / f"{ended.pid}:0:0"
    path.write_bytes(bytes(1 << 16))
    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(sweep_segments, [tmp_path] * 2)) == 1 << 16 and not path.exists()


def test_a_lock_that_others_keep_does_not_stop_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SWEEP_S", 0.1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    path = tmp_path / "Intel_MPI_abcdef"
    path.write_bytes(bytes(1 << 16))
    os.utime(path, (0, 0))
    assert sweep_segments(tmp_path) == 1 << 16
    os.close(descriptor)


def test_too_little_lockable_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.resource, "getrlimit", lambda _what: (64 << 10, 64 << 10))
    check_host(RANK, {"FI_PROVIDER": "tcp"})
    with pytest.raises(InputError, match=r"FI_PROVIDER=psm3 registers memory, but this process may lock only 64 KiB"):
        check_host(RANK, {"FI_PROVIDER": "psm3"})
    check_host(RANK, {"FI_PROVIDER": "^psm3"})  # any but this one


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"CCL_WORKER_COUNT": "two"}, "CCL_WORKER_COUNT=two is not a number of threads: set it to 1 or more"),
        (
            {"CCL_WORKER_COUNT": "2", "CCL_WORKER_AFFINITY": "3,8-10"},
            "CCL_WORKER_AFFINITY=3,8-10 lists 4 CPUs, but CCL_WORKER_COUNT=2 for 4 ranks on this host needs 8",
        ),
    ],
)
def test_threads_that_oneccl_would_refuse_are_named(env: dict[str, str], problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        check_host(RANK, env)


def test_threads_that_oneccl_accepts_pass() -> None:
    for env in ({"CCL_WORKER_COUNT": "4"}, {"CCL_WORKER_AFFINITY": "auto"}, {"CCL_WORKER_AFFINITY": "0-2,7"}):
        check_host(RANK, env)
    assert misplaced_comm_threads(0, {"CCL_WORKER_AFFINITY": "auto"}, ()) == []


def test_no_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"comm.backend=ccl: no C\+\+ compiler on PATH: install g\+\+, or set"):
        ensure_extension(LIBRARIES, {"PATH": "/none", "CPUTRAIN_CACHE": str(tmp_path)})


def test_the_name_of_what_is_built_says_what_it_depends_on(tmp_path: Path) -> None:
    env = {"CPUTRAIN_CACHE": str(tmp_path)}
    path = extension_path(LIBRARIES, env)
    assert re.fullmatch(r"ccl-torch[\w.+]+-x86_64-[0-9a-f]{16}|ccl-torch[\w.+]+-aarch64-[0-9a-f]{16}", path.parent.name)
    assert extension_path(replace(LIBRARIES, ccl=Path("/other/libccl.so.1")), env) != path
    line = link_line("c++", LIBRARIES, (), path)
    assert "-Wl,--disable-new-dtags" in line and "-Wl,-rpath,/o/lib/ccl/cpu/lib" in line


def test_what_does_not_compile_says_why_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    env = {"CPUTRAIN_CACHE": str(tmp_path), "PATH": os.environ["PATH"]}
    with pytest.raises(
        RunError,
        match=r"cannot compile the oneCCL backend for torch .* \(.*oneapi/ccl.hpp.*\); see its output in .*\.log",
    ):
        ensure_extension(LIBRARIES, env)
    assert [path.suffix for path in extension_path(LIBRARIES, env).parent.iterdir()] == [".log"]


def test_every_source_is_compiled_once_on_any_number_of_cores() -> None:
    for cores in (1, 2, 3, 64):
        units = units_of(cores)
        assert len(units) == min(cores, 4)
        assert sorted(path for unit in units for path in unit) == sorted(NATIVE.glob("*.cpp"))


@pytest.mark.slow
def test_what_takes_long_is_told_by_one_rank_of_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As warnings, which are seen in programs that set up no log."""
    monkeypatch.setattr(compiled, "PROGRESS_S", 0.3)
    cxx = str(fake_compiler(tmp_path, 1))
    for rank, lines in (("0", ("compiling the oneCCL backend", "has been compiling for", "compiled in")), ("1", ())):
        caplog.clear()
        cache = str(tmp_path / rank)
        ensure_extension(
            LIBRARIES, {"CPUTRAIN_CACHE": cache, "PATH": os.environ["PATH"], "CXX": cxx, "LOCAL_RANK": rank}
        )
        told = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
        assert all(any(line in each for each in told) for line in lines) and bool(told) == bool(lines), told


def fake_compiler(folder: Path, seconds: float) -> Path:
    """A compiler that notes each call, takes its time and writes its output."""
    path = folder / "slow-c++"
    path.write_text(
        f"#!/bin/sh\necho called >> {folder}/calls\nsleep {seconds}\n"
        'while [ "$1" != "-o" ]; do shift; done\necho made > "$2"\n'
    )
    path.chmod(0o755)
    return path


def built_by_another_process(cache: str, cxx: str) -> None:
    ensure_extension(LIBRARIES, {"CPUTRAIN_CACHE": cache, "PATH": os.environ["PATH"], "CXX": cxx})


def test_of_many_processes_one_compiles(tmp_path: Path) -> None:
    cxx = str(fake_compiler(tmp_path, 1.5))
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "cache"), cxx)
    processes = [context.Process(target=built_by_another_process, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANGS_S)
    assert [process.exitcode for process in processes] == [0] * 8
    assert (tmp_path / "calls").read_text() == "called\n" * (len(ccl_extension(LIBRARIES).parts("c++", tmp_path)) + 1)
    assert extension_path(LIBRARIES, {"CPUTRAIN_CACHE": arguments[0]}).read_text() == "made\n"


def empty_cache(folder: Path) -> tuple[dict[str, str], Path]:
    """Return an environment with a cache and a fast compiler, and the path of what it compiles."""
    env = {"CPUTRAIN_CACHE": str(folder / "cache"), "PATH": os.environ["PATH"], "CXX": str(fake_compiler(folder, 0))}
    path = extension_path(LIBRARIES, env)
    path.parent.mkdir(parents=True)
    return env, path


@pytest.mark.slow
def test_the_lock_of_a_dead_process_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "STALE_S", 1.0)
    env, path = empty_cache(tmp_path)
    path.with_suffix(".lock").write_text("gone 1\n")
    assert ensure_extension(LIBRARIES, env) == path and path.read_text() == "made\n"


def test_a_cache_that_is_no_folder_and_a_user_without_a_home_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for cache in ("file", "file/below"):
        with pytest.raises(RunError, match=r"cannot compile .* into .*: .*; set CPUTRAIN_CACHE to a writable folder"):
            ensure_extension(LIBRARIES, {"CPUTRAIN_CACHE": str(tmp_path / cache), "PATH": os.environ["PATH"]})
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(RunError, match="user 54321 has no home directory for the cache: set CPUTRAIN_CACHE"):
        cache_folder({})


@pytest.mark.slow
def test_a_living_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "STALE_S", 2.0)
    env, path = empty_cache(tmp_path)
    lock = path.with_suffix(".lock")
    lock.write_text("other 1\n")

    def live() -> None:
        for _ in range(16):
            time.sleep(0.25)
            lock.touch()
        checksum_file(path).write_text(hashlib.sha256(b"theirs\n").hexdigest())
        path.write_text("theirs\n")
        lock.unlink()

    other = threading.Thread(target=live)
    other.start()
    assert ensure_extension(LIBRARIES, env).read_text() == "theirs\n"
    other.join()
    assert not (tmp_path / "calls").exists()


def test_a_lock_lives_on_after_a_suspension_of_its_owner_and_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, path = empty_cache(tmp_path)
    path.with_suffix(".lock").write_text("other 1\n")
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 5:
            path.write_text("theirs\n")
            checksum_file(path).write_text(hashlib.sha256(b"theirs\n").hexdigest())

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 100.0 * len(polls))
    monkeypatch.setattr(compiled, "time", clock)
    assert ensure_extension(LIBRARIES, env).read_text() == "theirs\n"
    assert not (tmp_path / "calls").exists()


def test_what_does_not_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "cputrain_ccl.so").write_text("no library")
    with pytest.raises(RunError, match=r"cannot load .* \(.*\); remove it"):
        load_extension(tmp_path / "cputrain_ccl.so")


def test_auto_goes_on_with_gloo_where_oneccl_is_missing_and_ccl_refuses(tmp_path: Path) -> None:
    from tests.support.images import write_images

    write_images(tmp_path / "images", train=9, val=3)
    small = ("data.path=images", *LENET, "batch.local=2", "max_steps=2", "epochs=1")
    broken = {"CCL_ROOT": str(tmp_path)}
    one_ccl(tmp_path, "2021.20", library=False)
    arguments = ("train", "imagefolder", *small, "schedule.warmup_epochs=0", *ALONE)
    refused = in_fork(*arguments, "comm.backend=ccl", "output=refused", cwd=tmp_path, **broken)
    assert refused.returncode == 2 and "oneCCL 2021.20 in" in refused.stderr and "Traceback" not in refused.stderr
    done = in_fork(*arguments, "output=done", cwd=tmp_path, **broken)
    assert done.returncode == 0, done.stderr
    expected = (tmp_path / "done/environment.json").read_text()
    assert '"backend": "gloo"' in expected and "oneCCL 2021.20" in expected
