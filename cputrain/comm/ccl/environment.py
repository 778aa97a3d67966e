"""Set up oneCCL on a host: find its libraries, compile the extension, choose the transport, set the environment."""

import ctypes
import fcntl
import json
import os
import platform
import re
import resource
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.filesystem import read_stat
from cputrain.affinity.rank import (
    HYDRA,
    LAUNCHER_VARIABLES,
    LOOPBACK_INTERFACE,
    PMI_CONNECTIONS,
    Rank,
    interface_to,
    rank_from_env,
)
from cputrain.affinity.wording import plural
from cputrain.comm.store import SignedKeys, describe_gone
from cputrain.measurements import LIBFABRIC, MPI, TITLES, VARIABLE, comparison
from cputrain.mpi.fabric import Setting
from cputrain.native_build import NativeExtension, ensure_compiled, library_path, loading, object_file

SHM = Path("/dev/shm")
OWNED_SEGMENT = re.compile(r"(\d+):\d+:\d+")  # libfabric's shm provider: PID:UID:INDEX
# Intel MPI and native/ledger.cpp unlink the segment once all ranks have mapped it.
UNOWNED_SEGMENT = re.compile(r"Intel_MPI_\w{6}|cputrain_[0-9a-f]{32}")
SWEEP_S, SWEEP_POLL_S = 1.0, 0.01
STALE_S = 120.0  # age from which an unmapped segment is stale, because its ranks would have mapped it by now

# cputrain.affinity.bind sets OMPI_COMM_WORLD_RANK and PMI_RANK for all scripts, so they do not identify the launcher.
OTHER_MPI = dict(variables.pmi_of for variables in LAUNCHER_VARIABLES if variables.pmi_of is not None)
PMI_RANK, PMI_SIZE = HYDRA.rank_names[:2]
KEY = "transport"
MEASURE = "`cputrain doctor ccl` measures whether libfabric is faster here"

INSTALL = 'pip install "cputrain[ccl]"'
CCL_LIBRARY, HEADER, MPI_LIBRARY, FABRIC_LIBRARY = "libccl.so.1", "oneapi/ccl.hpp", "libmpi.so.12", "libfabric.so.1"
OLDEST_RELEASE, NEWEST_RELEASE = (2021, 9), (2021, 13)  # releases that have a shared CPU library and this C++ API

SHM_BYTES_PER_RANK = 32 << 20
# libfabric providers that register (lock) memory with the network card.
PINNING = ("psm2", "psm3", "verbs", "mlx", "efa", "cxi")
LOCKED_BYTES = 64 << 20
AUTO = "auto"  # oneCCL uses the last CPUs of the host
# With four queues and no threads for them, messages have been mixed up.
ONE_QUEUE: Setting = (
    "CCL_WORKER_COUNT",
    "1",
    "no comm cores, so no threads of oneCCL, each of which has its own queue",
)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

NAME = "cputrain_ccl"
NATIVE = Path(__file__).parent / "native"
MAX_UNITS = 4
REQUESTED_BY, ALTERNATIVE = "comm.backend=ccl", "set comm.backend=gloo"


def sweep_segments(folder: Path = SHM) -> int:
    """Remove this user's stale shared-memory segments, whose owners are dead; return the bytes freed."""
    patterns = OWNED_SEGMENT, UNOWNED_SEGMENT
    segments = [path for path in folder.glob("*") if any(pattern.fullmatch(path.name) for pattern in patterns)]
    freed = 0
    with _alone_in(folder):
        for path in segments:
            with suppress(OSError):  # a process in another container may remove it first
                status = path.stat()
                if status.st_uid == os.getuid() and not _in_use(path, status.st_mtime):
                    path.unlink()
                    freed += status.st_blocks * 512
    return freed


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Run the block while no other process sweeps the folder: two at once would take each other for a file's users.
    After SWEEP_S it runs anyway, as anybody may keep the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + SWEEP_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # another sweep, or a file system without locks
                if time.monotonic() > deadline:
                    break
                time.sleep(SWEEP_POLL_S)
            else:
                break
        yield
    finally:
        os.close(descriptor)


def _in_use(path: Path, changed: float) -> bool:
    owner = OWNED_SEGMENT.fullmatch(path.name)
    settled = not _is_alive(int(owner[1])) if owner else time.time() - changed >= STALE_S
    return not settled or _is_open(path)


def _is_alive(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has, and keeps only its number until its parent reaps it."""
    try:
        return read_stat(pid).state not in "ZXx"
    except OSError:
        return False


def _is_open(path: Path) -> bool:
    """Return whether any process has a file open or mapped, also in a container that shares the folder, where its PID
    has no meaning here. The kernel grants a lease only on a file that nobody else has open (fcntl(2))."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # an ignored signal, in case the lease is broken
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A transport by oneCCL's name, "mpi" or "ofi", and why it was chosen."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{TITLES.get(self.name, self.name)} ({self.why})"


def choose_transport(
    env: Mapping[str, str], rank: Rank, measured: Callable[[], Mapping[str, float]], *, whole: bool = True
) -> Transport:
    """Choose a rank's transport. `whole`: its group has all ranks of the job; `measured` returns times by transport.

    MPI needs ranks started by a PMI process manager: mpirun of Intel MPI or MPICH, or srun with PMI-2. Libfabric works
    for all ranks, which find each other through the job's store. If both are possible, the default is MPI; on one host
    it is the faster one if both were measured. Raises InputError if MPI is requested but cannot be used.
    """
    requested = env.get(VARIABLE)
    launcher = next((name for variable, name in OTHER_MPI.items() if variable in env), None)
    connected = PMI_RANK in env and any(name in env for name in PMI_CONNECTIONS)
    managed = launcher is None and connected and env.get(PMI_SIZE, "") == str(rank.world_size)
    if requested == MPI and not managed:
        starter = launcher or "a launcher without Intel MPI's process manager (PMI)"
        raise InputError(
            f"{VARIABLE}=mpi, but this rank was started by {starter}: start it with Intel MPI's mpirun or "
            "srun --mpi=pmi2, or unset the variable"
        )
    if requested:
        return Transport(name=requested, why=f"{VARIABLE} is set")
    if not managed:
        why = f"started by {launcher}" if launcher else "not started by a PMI process manager"
        return Transport(name=LIBFABRIC, why=why)
    if not whole:
        return Transport(name=LIBFABRIC, why="MPI would wait for ranks that may never join a ccl group")
    if not rank.one_host:
        return Transport(name=MPI, why="the launcher supports PMI, on several hosts")
    seconds = measured()
    if len(seconds) < len(TITLES):
        return Transport(name=MPI, why=f"the launcher supports PMI; not measured: {MEASURE}")
    return Transport(name=min(seconds, key=lambda name: seconds[name]), why=f"measured: {comparison(seconds)}")


def agree_on_transport(
    rank: Rank, keys: SignedKeys, choose: Callable[[], Transport], *, is_set: bool, threads: int
) -> Transport:
    """Return rank 0's transport, because the caches of the hosts may differ. All ranks of a job must call this.

    `choose` returns this rank's choice; `is_set`: it cannot use another; `threads` is its number of oneCCL threads.
    Raises InputError if it cannot use rank 0's transport or has another number of threads, RunError if the store is
    another job's.
    """
    if rank.rank > 0:
        return _follow(rank, keys, choose(), is_set=is_set, threads=threads)
    try:
        chosen = choose()
    except Exception:
        keys.set(KEY, json.dumps(None))  # the other ranks wait for it
        raise
    keys.set(KEY, json.dumps([asdict(chosen), threads]))
    return chosen


def _follow(rank: Rank, keys: SignedKeys, local: Transport, *, is_set: bool, threads: int) -> Transport:
    first = json.loads(keys.read(KEY))
    if first is None:
        return local  # rank 0 reports its error
    chosen, first_threads = Transport(**first[0]), first[1]
    if threads != first_threads:  # oneCCL connects each thread to the one of its number on every rank
        raise InputError(
            f"rank {rank.rank} has {plural(threads, 'oneCCL thread')} (CCL_WORKER_COUNT), rank 0 {first_threads}: set "
            "--comm-cores to a number that all hosts can have, or CCL_WORKER_COUNT to the same value on all ranks"
        )
    if is_set and chosen.name != local.name:
        raise InputError(
            f"rank {rank.rank} uses {local}, rank 0 {chosen}: set {VARIABLE} to the same value on all ranks, or "
            "unset it"
        )
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """oneCCL's shared CPU library, headers and version, and the libmpi and libfabric that it loads."""

    ccl: Path
    include: Path
    version: tuple[int, int]
    mpi: Path
    fabric: Path

    @property
    def mpi_root(self) -> Path:
        """Intel MPI's root folder, with lib/ and bin/."""
        return next(folder.parent for folder in self.mpi.parents if folder.name == "lib")


def find_libraries(env: Mapping[str, str]) -> Libraries:
    """Find each library under CCL_ROOT or I_MPI_ROOT, then in this Python's packages, then under its prefix.

    Raises InputError if one is missing, or if this release of oneCCL is not supported.
    """
    roots = [*_roots(env, "CCL_ROOT", "oneccl-devel", HEADER, 2)]
    include = next((root / "include" for root in roots if (root / "include" / HEADER).is_file()), None)
    if include is None:
        raise InputError(f"comm.backend=ccl: oneCCL is not installed: {INSTALL}, or set comm.backend=gloo")
    version = _version(include / "oneapi/ccl/config.h")
    folders = ("lib/ccl/cpu/lib", "lib/cpu", "lib/cpu_icx")
    ccl = next((path for folder in folders if (path := include.parent / folder / CCL_LIBRARY).is_file()), None)
    if ccl is None or not OLDEST_RELEASE <= version <= NEWEST_RELEASE:
        release, oldest, newest = (".".join(map(str, numbers)) for numbers in (version, OLDEST_RELEASE, NEWEST_RELEASE))
        raise InputError(
            f"comm.backend=ccl: found oneCCL {release} in {include.parent}, but {oldest} to {newest} with their shared "
            f"CPU library are supported: {INSTALL}"
        )
    return Libraries(
        ccl=ccl, include=include, version=version, mpi=_library(env, MPI_LIBRARY), fabric=_library(env, FABRIC_LIBRARY)
    )


def _library(env: Mapping[str, str], name: str) -> Path:
    folders = ("lib", "lib/release", "opt/mpi/libfabric/lib", "libfabric/lib")
    roots = _roots(env, "I_MPI_ROOT", "impi-rt", MPI_LIBRARY, 1)
    path = next((path for root in roots for folder in folders if (path := root / folder / name).is_file()), None)
    if path is None:
        raise InputError(f"comm.backend=ccl: oneCCL needs {name} of Intel MPI's runtime, not found: {INSTALL}")
    return path


def _roots(env: Mapping[str, str], variable: str, package: str, landmark: str, depth: int) -> Iterator[Path]:
    """Yield folders that may contain lib/ and include/; a package's is `depth` levels above its landmark's folder."""
    if variable in env:
        yield Path(env[variable])
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    yield from (Path(str(file.locate())).resolve().parents[depth] for file in files if str(file).endswith(landmark))
    yield Path(sys.prefix)


def _version(header: Path) -> tuple[int, int]:
    text = header.read_text(encoding="utf-8") if header.is_file() else ""
    numbers = re.findall(r"CCL_(?:MAJOR|MINOR)_VERSION\s+(\d+)", text)
    if len(numbers) != 2:
        raise InputError(f"comm.backend=ccl: {header} does not contain oneCCL's version: {INSTALL}")
    return int(numbers[0]), int(numbers[1])


def ccl_settings(libraries: Libraries, rank: Rank, transport: Transport, env: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the variables to set that the environment does not have yet, each with its value and the reason."""
    variables: list[Setting] = [
        (VARIABLE, transport.name, transport.why),
        ("CCL_ROOT", str(libraries.include.parent), "oneCCL's folder"),
        ("I_MPI_ROOT", str(libraries.mpi_root), "Intel MPI's folder"),
        ("FI_PROVIDER_PATH", str(libraries.fabric.parent), "libfabric's providers come with Intel MPI"),
        ("CCL_MPI_LIBRARY_PATH", _readable(libraries.mpi), "this libmpi instead of the first one on the library path"),
        ("CCL_OFI_LIBRARY_PATH", _readable(libraries.fabric), "the libfabric of these providers"),
        ("CCL_BUFFER_CACHE", "0", "oneCCL would cache a buffer of every size, without limit"),
        ("CCL_LOG_LEVEL", "error", "oneCCL would warn about each variable that is set here"),
        ("I_MPI_OFI_LIBRARY", str(libraries.fabric), "the same libfabric for MPI and oneCCL"),
        ("I_MPI_OFI_LIBRARY_INTERNAL", "0", "the same libfabric for MPI and oneCCL"),
    ]
    if transport.name == LIBFABRIC:
        variables += [
            ("CCL_PROCESS_LAUNCHER", "none", "ranks find each other through the job's store"),
            ("CCL_LOCAL_RANK", str(rank.local_rank), "given by the launcher"),
            ("CCL_LOCAL_SIZE", str(rank.local_world_size), "given by the launcher"),
        ]
    else:
        variables += [
            ("CCL_PROCESS_LAUNCHER", "hydra", "PMI assigns the ranks"),
            ("I_MPI_THREAD_SPLIT", "0", "only one thread at a time calls oneCCL"),
        ]
    if "CCL_WORKER_AFFINITY" not in env:
        reason = "no comm cores, and oneCCL's spinning threads would slow the computation"
        variables.append(("CCL_WORKER_OFFLOAD", "0", reason))
    if rank.local_world_size == rank.world_size:
        # libfabric may choose any interface, even a container's, and hangs if it is removed.
        variables.append(("FI_TCP_IFACE", LOOPBACK_INTERFACE, "all ranks are on this host"))
    elif interface := interface_to(env.get("MASTER_ADDR", "")):
        variables.append(("FI_TCP_IFACE", interface, "the interface to rank 0's host"))
    unset = tuple(setting for setting in variables if setting[0] not in env)
    without_threads = ("CCL_WORKER_OFFLOAD", "0") in {(name, value) for name, value, _ in unset}
    return (*unset, ONE_QUEUE) if without_threads and env.get("CCL_WORKER_COUNT", "1") != "1" else unset


def _readable(library: Path) -> str:
    """Return a library's path, or its name if the path has a space: oneCCL reads these variables up to the first space.

    The loader then finds the library that `preload_libraries` has loaded.
    """
    return library.name if _has_space(library) else str(library)


def _has_space(library: Path) -> bool:
    return any(character.isspace() for character in str(library))


def preload_libraries(libraries: Libraries) -> None:
    """Load the libraries whose paths oneCCL cannot read. Raises RunError if one does not load."""
    for library in filter(_has_space, (libraries.fabric, libraries.mpi)):
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise RunError(f"comm.backend=ccl: cannot load {library} ({error}): {INSTALL}") from None


def worker_threads(env: Mapping[str, str]) -> int:
    """Return the number of oneCCL's worker threads, each of which has a queue; 1 if `ccl_settings` turns them off."""
    user_set = "CCL_WORKER_OFFLOAD" in env or "CCL_WORKER_AFFINITY" in env
    count = env.get("CCL_WORKER_COUNT", "1")
    return int(count) if user_set and count.isdecimal() else 1


def check_host(rank: Rank, env: Mapping[str, str]) -> None:
    """Raise InputError for limits and variables with which oneCCL or MPI would fail later without a clear message."""
    if rank.local_world_size > 1:
        space = os.statvfs(SHM) if SHM.is_dir() else None
        free = space.f_bavail * space.f_frsize if space else 0
        if free < rank.local_world_size * SHM_BYTES_PER_RANK:
            raise InputError(
                f"{SHM} has {free >> 20} MiB free, but {rank.local_world_size} ranks on a host need "
                f"{rank.local_world_size * SHM_BYTES_PER_RANK >> 20} MiB of shared memory: enlarge it (docker "
                "--shm-size=2g), or set comm.backend=gloo"
            )
    _check_workers(rank, env)
    requested = env.get("FI_PROVIDER", "")
    provider = next((name for name in PINNING if name in requested and not requested.startswith("^")), None)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if provider and limit != resource.RLIM_INFINITY and limit < LOCKED_BYTES:
        raise InputError(
            f"FI_PROVIDER={provider} registers memory, but this process may lock only {limit >> 10} KiB: raise the "
            "limit (ulimit -l unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK), or use FI_PROVIDER=tcp"
        )


def _check_workers(rank: Rank, env: Mapping[str, str]) -> None:
    """Check the variables of oneCCL's worker threads. Raises InputError."""
    count, affinity = env.get("CCL_WORKER_COUNT", "1"), env.get("CCL_WORKER_AFFINITY", AUTO)
    if not re.fullmatch(r"[1-9]\d{0,3}", count):
        raise InputError(f"CCL_WORKER_COUNT={count[:20]} is not a number of threads: set it to 1 or more, or unset it")
    cpus = re.findall(r"(\d+)(?:-(\d+))?", affinity)
    listed = sum(int(last or first) - int(first) + 1 for first, last in cpus)
    needed = rank.local_world_size * int(count)
    if affinity != AUTO and listed != needed:
        raise InputError(
            f"CCL_WORKER_AFFINITY={affinity[:60]} lists {plural(listed, 'CPU')}, but CCL_WORKER_COUNT={count} for "
            f"{plural(rank.local_world_size, 'rank')} on this host needs {needed}: list one CPU per thread, or unset "
            "both"
        )


def place_of(rank: int, size: int, store: Store, timeout: timedelta, env: Mapping[str, str], *, whole: bool) -> Rank:
    """Return rank and local rank of a group's rank; `whole`: the group has all ranks of the job.

    If the launcher's variables do not give the local rank (scripts that use mp.spawn set RANK and WORLD_SIZE, or
    nothing), or belong to another job, the group's ranks exchange their hosts through its store. Raises RuntimeError if
    a rank does not join in time, or the store is gone.
    """
    with suppress(InputError):
        rank_here = rank_from_env(env)
        if rank_here is not None and (not whole or (rank_here.rank, rank_here.world_size) == (rank, size)):
            return rank_here
    hosts = _hosts(rank, size, PrefixStore("place", store), timeout)
    ranks_here = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return Rank(
        rank=rank,
        world_size=size,
        local_rank=ranks_here.index(rank),
        local_world_size=len(ranks_here),
        convention="script",
    )


def _hosts(rank: int, size: int, store: Store, timeout: timedelta) -> list[str]:
    """Return an identifier of each rank's host."""
    boot = BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.is_file() else ""
    keys = [str(number) for number in range(size)]
    try:
        store.set(keys[rank], f"{socket.gethostname()} {boot} {Path('/proc/self/ns/ipc').stat().st_ino}")
        with suppress(RuntimeError):  # timeout, or the store is gone, in which case the next call fails too
            store.wait(keys, timeout)
        missing = [key for key in keys if not store.check([key])]
        if not missing:
            return [value.decode() for value in store.multi_get(keys)]
    except RuntimeError as error:
        raise RuntimeError(f"ccl: a group cannot be created: {describe_gone(error)}") from None
    raise RuntimeError(
        f"ccl: Timed out after {timeout.total_seconds():g} s while a group was created: not all of its ranks joined "
        f"(missing: {', '.join(missing)})"
    )


def ccl_extension(libraries: Libraries) -> NativeExtension:
    """Describe the extension to compile against these libraries."""
    units = units_of(len(os.sched_getaffinity(0)))
    return NativeExtension(
        title=f"the oneCCL backend for torch {torch.__version__}",
        requested_by=REQUESTED_BY,
        alternative=ALTERNATIVE,
        parts=lambda cxx, output: tuple(
            compile_line(cxx, libraries, unit, object_file(output, number)) for number, unit in enumerate(units)
        ),
        argv=lambda cxx, output: link_line(
            cxx, libraries, tuple(object_file(output, number) for number in range(len(units))), output
        ),
    )


def units_of(cores: int) -> tuple[tuple[Path, ...], ...]:
    """Group the sources into units compiled in parallel; each unit parses PyTorch's headers, most of the work, once."""
    sources = sorted(NATIVE.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    count = min(cores, MAX_UNITS)
    return tuple(tuple(sources[number::count]) for number in range(count))


def compile_line(cxx: str, libraries: Libraries, unit: tuple[Path, ...], output: Path) -> tuple[str, ...]:
    """Return the command that compiles several sources as one unit."""
    torch_root = Path(torch.__file__).parent
    *siblings, last = map(str, unit)
    return (
        *(cxx, "-std=c++20", "-O1", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *_pybind11_flags(),
        *("-DAT_PER_OPERATOR_HEADERS", f"-I{NATIVE / 'operators'}", f"-I{libraries.include}"),
        *(f"-I{sysconfig.get_path('include')}", f"-I{torch_root}/include"),
        f"-I{torch_root}/include/torch/csrc/api/include",
        *(word for source in siblings for word in ("-include", source)),
        *("-c", last, "-o", str(output)),
    )


def link_line(cxx: str, libraries: Libraries, objects: tuple[Path, ...], output: Path) -> tuple[str, ...]:
    """Return the command that links the extension."""
    torch_lib = Path(torch.__file__).parent / "lib"
    # An rpath is searched before LD_LIBRARY_PATH, which may have oneCCL's GPU build with a library of the same name.
    rpath = tuple(f"-Wl,-rpath,{folder}" for folder in (libraries.ccl.parent, torch_lib))
    return (
        *(cxx, "-shared", "-Wl,--disable-new-dtags", *map(str, objects), "-o", str(output)),
        *(f"-L{torch_lib}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
        *(f"-L{libraries.ccl.parent}", f"-l:{libraries.ccl.name}", *rpath),
    )


def _pybind11_flags() -> tuple[str, ...]:
    """Return torch's pybind11 ABI names, which must match for pybind11 < 3 to share classes between extensions."""
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    libraries = ((name, getattr(torch._C, f"_PYBIND11_{name}", None)) for name in names)
    return tuple(f'-DPYBIND11_{name}="{value}"' for name, value in libraries if value is not None)


def extension_path(libraries: Libraries, env: Mapping[str, str]) -> Path:
    """Return the path of the compiled extension; its folder is a hash of everything the extension depends on."""
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(NATIVE.rglob("*.*")) if path.is_file())
    commands = (*compile_line("c++", libraries, (NATIVE,), Path(NAME)), *link_line("c++", libraries, (), Path(NAME)))
    parts = (source, torch.__version__, sys.version, platform.machine(), *commands)
    return library_path(f"ccl-torch{torch.__version__}", parts, env, file=NAME)


def ensure_extension(libraries: Libraries, env: Mapping[str, str]) -> Path:
    """Compile the extension if necessary, and return its path. Raises the errors of ensure_compiled."""
    return ensure_compiled(ccl_extension(libraries), extension_path(libraries, env), env)


def load_extension(path: Path) -> ModuleType:
    """Import the compiled extension. Raises RunError if it does not load."""
    spec = spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, str(path)))
    assert spec is not None and spec.loader is not None
    with loading(path, REQUESTED_BY, ALTERNATIVE):
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
