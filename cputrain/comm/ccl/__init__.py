"""oneCCL as a c10d backend for CPU tensors: import this, then torch.distributed.init_process_group("ccl")."""

import os
import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from affinity.ranks.rank import Rank, discover
from cputrain.comm.ccl.build import ensure_built, load
from cputrain.comm.ccl.environment import check_host, settings
from cputrain.comm.ccl.libraries import find_libraries
from cputrain.comm.watchdog import PendingCollective, Watchdog
from mpi.fabric import Setting

BACKEND = "ccl"
applied: tuple[Setting, ...] = ()
"""The environment variables set for oneCCL in this process, with reasons; empty before the first group."""

watchdog: Watchdog | None = None
"""The watchdog of the default group."""

_extension: ModuleType | None = None


def extension(rank: Rank) -> ModuleType:
    """The compiled backend, loaded once with the environment variables that oneCCL needs.

    Raises InputError or RunError that names what is missing and the remedy.
    """
    global _extension, applied  # noqa: PLW0603  libraries load once in a process
    if _extension is None:
        libraries = find_libraries(os.environ)
        check_host(rank, os.environ)
        applied = settings(libraries, rank, os.environ)
        path = ensure_built(libraries, os.environ)
        os.environ.update({name: value for name, value, _ in applied})
        _extension = load(path)
        sys.addaudithook(_refuse_fork)
    return _extension


def _refuse_fork(event: str, _arguments: tuple[Any, ...]) -> None:
    """A forked child would share oneCCL's and MPI's memory and connections with its parent."""
    if event in ("os.fork", "os.forkpty") and dist.is_initialized():
        raise RuntimeError(
            "fork after the ccl group was created, which oneCCL and MPI do not support: use threads, or the spawn "
            "method of multiprocessing and DataLoader (multiprocessing_context='spawn')"
        )


def _create(options: Any, _backend_options: Any) -> Any:
    rank = discover(os.environ) or Rank(
        rank=options.group_rank,
        world_size=options.group_size,
        local_rank=options.group_rank,
        local_world_size=options.group_size,
        convention="script",
    )
    loaded = extension(rank)
    backend = loaded.CclBackend(
        options.store, options.group_rank, options.group_size, options.timeout.total_seconds(), options.group_id
    )
    if not dist.is_initialized():
        _start_watchdog(options, loaded)
    return backend


def _start_watchdog(options: Any, loaded: ModuleType) -> None:
    global watchdog  # noqa: PLW0603  one default group in a process
    if watchdog is not None:
        watchdog.stop()

    def pending() -> PendingCollective:
        return PendingCollective(*loaded.pending_collective())

    watchdog = Watchdog(
        PrefixStore("watchdog", options.store.clone()),
        rank=options.group_rank,
        world_size=options.group_size,
        pending=pending,
        set_absent_ranks=loaded.set_absent_ranks,
        abort=lambda reason: loaded.abort(f"ccl: {reason}"),
    )


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
