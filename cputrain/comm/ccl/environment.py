"""The environment variables of oneCCL, Intel MPI and libfabric, set before they load; the user's values are kept."""

import os
import re
import resource
from collections.abc import Mapping

from affinity.errors import InputError
from affinity.ranks.rank import Rank
from affinity.ranks.route import LOOPBACK_INTERFACE, interface_to
from affinity.wording import counted
from cputrain.comm.ccl.libraries import Libraries
from cputrain.comm.ccl.segments import SHM
from cputrain.comm.ccl.transport import Transport
from cputrain.transports import LIBFABRIC, VARIABLE
from mpi.fabric import Setting

SHM_BYTES_PER_RANK = 32 << 20
# Providers that register (lock) memory with the network card.
PINNING = ("psm2", "psm3", "verbs", "mlx", "efa", "cxi")
LOCKED_BYTES = 64 << 20
AUTO = "auto"  # oneCCL takes the last CPUs of the host
# Seen: with four queues and no thread to work on them, a message was taken for another.
ONE_QUEUE: Setting = (
    "CCL_WORKER_COUNT",
    "1",
    "no comm cores, so none of oneCCL's threads, each with a queue of its own",
)


def settings(libraries: Libraries, rank: Rank, transport: Transport, env: Mapping[str, str]) -> tuple[Setting, ...]:
    """Variables that the environment does not set yet, each with its value and the reason."""
    found: list[Setting] = [
        (VARIABLE, transport.name, transport.why),
        ("CCL_ROOT", str(libraries.include.parent), "oneCCL's folder"),
        ("I_MPI_ROOT", str(libraries.mpi_root), "Intel MPI's folder"),
        ("FI_PROVIDER_PATH", str(libraries.fabric.parent), "libfabric's providers come with Intel MPI"),
        ("CCL_MPI_LIBRARY_PATH", str(libraries.mpi), "this libmpi, not the first one on the library path"),
        ("CCL_OFI_LIBRARY_PATH", str(libraries.fabric), "the libfabric of these providers"),
        ("CCL_BUFFER_CACHE", "0", "oneCCL would keep a buffer of every size that it has seen, without bound"),
        ("CCL_LOG_LEVEL", "error", "without it, oneCCL warns about each variable that is set here"),
        ("I_MPI_OFI_LIBRARY", str(libraries.fabric), "one libfabric in a process"),
        ("I_MPI_OFI_LIBRARY_INTERNAL", "0", "one libfabric in a process"),
    ]
    if transport.name == LIBFABRIC:
        found += [
            ("CCL_PROCESS_LAUNCHER", "none", "ranks find each other through the job's store"),
            ("CCL_LOCAL_RANK", str(rank.local_rank), "given by the launcher"),
            ("CCL_LOCAL_SIZE", str(rank.local_world_size), "given by the launcher"),
        ]
    else:
        found += [
            ("CCL_PROCESS_LAUNCHER", "hydra", "PMI numbers the ranks"),
            ("I_MPI_THREAD_SPLIT", "0", "one thread at a time calls oneCCL"),
        ]
    if "CCL_WORKER_AFFINITY" not in env:
        found.append(("CCL_WORKER_OFFLOAD", "0", "no comm cores: oneCCL's spinning threads would slow the computation"))
    if rank.local_world_size == rank.world_size:
        # libfabric would choose any interface, even a container's, and hang once that is removed.
        found.append(("FI_TCP_IFACE", LOOPBACK_INTERFACE, "all ranks are on this host"))
    elif interface := interface_to(env.get("MASTER_ADDR", "")):
        found.append(("FI_TCP_IFACE", interface, "the interface that reaches rank 0's host"))
    unset = tuple(setting for setting in found if setting[0] not in env)
    without_threads = ("CCL_WORKER_OFFLOAD", "0") in {(name, value) for name, value, _ in unset}
    return (*unset, ONE_QUEUE) if without_threads and env.get("CCL_WORKER_COUNT", "1") != "1" else unset


def check_host(rank: Rank, env: Mapping[str, str]) -> None:
    """Raise InputError for limits of this host and variables that would make oneCCL or MPI fail later without a clear
    message."""
    if rank.local_world_size > 1:
        space = os.statvfs(SHM) if SHM.is_dir() else None
        found = space.f_bavail * space.f_frsize if space else 0
        if found < rank.local_world_size * SHM_BYTES_PER_RANK:
            raise InputError(
                f"{SHM} has {found >> 20} MiB free, {rank.local_world_size} ranks that share memory need "
                f"{rank.local_world_size * SHM_BYTES_PER_RANK >> 20} MiB: enlarge it (docker --shm-size=2g), or set "
                "comm.backend=gloo"
            )
    _check_workers(rank, env)
    provider = next((name for name in PINNING if name in env.get("FI_PROVIDER", "")), None)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if provider and limit != resource.RLIM_INFINITY and limit < LOCKED_BYTES:
        raise InputError(
            f"FI_PROVIDER={provider} registers memory, but this process may lock only {limit >> 10} KiB: raise the "
            "limit (ulimit -l unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK), or use FI_PROVIDER=tcp"
        )


def _check_workers(rank: Rank, env: Mapping[str, str]) -> None:
    """Check the variables of oneCCL's threads, which it calls workers."""
    count, affinity = env.get("CCL_WORKER_COUNT", "1"), env.get("CCL_WORKER_AFFINITY", AUTO)
    if not re.fullmatch(r"[1-9]\d{0,3}", count):
        raise InputError(
            f"CCL_WORKER_COUNT={count[:20]} is not a number of oneCCL's threads: set it to 1 or more, or unset it"
        )
    cpus = re.findall(r"(\d+)(?:-(\d+))?", affinity)
    listed = sum(int(last or first) - int(first) + 1 for first, last in cpus)
    needed = rank.local_world_size * int(count)
    if affinity != AUTO and listed != needed:
        raise InputError(
            f"CCL_WORKER_AFFINITY={affinity[:60]} names {counted(listed, 'CPU')}; CCL_WORKER_COUNT={count} for each of "
            f"{counted(rank.local_world_size, 'rank')} of this host needs {needed}: name a CPU for each, or unset both"
        )
