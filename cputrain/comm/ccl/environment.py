"""The environment variables of oneCCL, Intel MPI and libfabric, set before they load; the user's values are kept."""

import os
import resource
from collections.abc import Mapping

from affinity.errors import InputError
from affinity.ranks.rank import Rank
from affinity.ranks.rendezvous import LOOPBACK_INTERFACE, PMI_CONNECTIONS
from affinity.ranks.route import interface_to
from cputrain.comm.ccl.libraries import Libraries
from cputrain.comm.ccl.segments import SHM
from mpi.fabric import Setting

SHM_BYTES_PER_RANK = 32 << 20
# Providers that register (lock) memory with the network card.
PINNING = ("psm2", "psm3", "verbs", "mlx", "efa", "cxi")
LOCKED_BYTES = 64 << 20
# A variable that only this MPI's launcher sets: affinity.bind sets OMPI_COMM_WORLD_RANK and PMI_RANK for all scripts.
OTHER_MPI = {"OMPI_UNIVERSE_SIZE": "Open MPI's mpirun"}


def transport_of(env: Mapping[str, str], world_size: int) -> tuple[str, str]:
    """The transport "mpi" or "ofi", and the reason. Raises InputError where MPI is requested but cannot be used.

    MPI needs ranks that a PMI process manager has started: mpirun of Intel MPI or MPICH, or srun with PMI-2. All other
    ranks find each other through the job's store and communicate over libfabric.
    """
    requested = env.get("CCL_ATL_TRANSPORT")
    other = next((name for variable, name in OTHER_MPI.items() if variable in env), None)
    connected = "PMI_RANK" in env and any(name in env for name in PMI_CONNECTIONS)
    managed = other is None and connected and env.get("PMI_SIZE", "") == str(world_size)
    if requested == "mpi" and not managed:
        starter = other or "a launcher without Intel MPI's process manager (PMI)"
        raise InputError(
            f"CCL_ATL_TRANSPORT=mpi, but this rank was started by {starter}: start it with Intel MPI's mpirun or "
            "srun --mpi=pmi2, or unset the variable"
        )
    if requested:
        return requested, "CCL_ATL_TRANSPORT is set"
    if managed:
        return "mpi", "the launcher supports PMI"
    return "ofi", f"started by {other}" if other else "not started by a PMI process manager"


def settings(libraries: Libraries, rank: Rank, env: Mapping[str, str]) -> tuple[Setting, ...]:
    """Variables that the environment does not set yet, each with its value and the reason."""
    transport, why = transport_of(env, rank.world_size)
    root = libraries.mpi.parent.parent
    found: list[Setting] = [
        ("CCL_ATL_TRANSPORT", transport, why),
        ("CCL_ROOT", str(libraries.include.parent), "oneCCL's folder"),
        ("I_MPI_ROOT", str(root), "Intel MPI's folder"),
        ("FI_PROVIDER_PATH", str(libraries.fabric.parent), "libfabric's providers come with Intel MPI"),
        ("CCL_MPI_LIBRARY_PATH", str(libraries.mpi), "this libmpi, not the first one on the library path"),
        ("CCL_OFI_LIBRARY_PATH", str(libraries.fabric), "the libfabric of these providers"),
        ("CCL_BUFFER_CACHE", "0", "oneCCL would keep a buffer of every size that it has seen, without bound"),
        ("CCL_LOG_LEVEL", "error", "without it, oneCCL warns about each variable that is set here"),
        ("I_MPI_OFI_LIBRARY", str(libraries.fabric), "one libfabric in a process"),
        ("I_MPI_OFI_LIBRARY_INTERNAL", "0", "one libfabric in a process"),
    ]
    if transport == "ofi":
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
    return tuple(setting for setting in found if setting[0] not in env)


def check_host(rank: Rank, env: Mapping[str, str]) -> None:
    """Raise InputError for limits of this host that would make oneCCL or MPI fail later without a clear message."""
    if rank.local_world_size > 1:
        space = os.statvfs(SHM) if SHM.is_dir() else None
        found = space.f_bavail * space.f_frsize if space else 0
        if found < rank.local_world_size * SHM_BYTES_PER_RANK:
            raise InputError(
                f"{SHM} has {found >> 20} MiB free, {rank.local_world_size} ranks that share memory need "
                f"{rank.local_world_size * SHM_BYTES_PER_RANK >> 20} MiB: enlarge it (docker --shm-size=2g), or set "
                "comm.backend=gloo"
            )
    provider = next((name for name in PINNING if name in env.get("FI_PROVIDER", "")), None)
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if provider and limit != resource.RLIM_INFINITY and limit < LOCKED_BYTES:
        raise InputError(
            f"FI_PROVIDER={provider} registers memory, but this process may lock only {limit >> 10} KiB: raise the "
            "limit (ulimit -l unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK), or use FI_PROVIDER=tcp"
        )
