"""oneCCL as a c10d backend for CPU tensors: torch.distributed.init_process_group("ccl").

Where the package is installed, `import torch` knows the backend (cputrain.comm.autoload); importing this module
registers it too.
"""

import json
import math
import os
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from affinity.ranks.rank import Rank
from cputrain.comm.ccl.build import ensure_built, load
from cputrain.comm.ccl.environment import check_host, settings
from cputrain.comm.ccl.libraries import find_libraries
from cputrain.comm.ccl.place import place_of
from cputrain.comm.ccl.segments import sweep_segments
from cputrain.comm.heartbeats import PendingCollective, key_of, place_of_this_process
from cputrain.comm.store import SignedKeys
from cputrain.comm.watchdog import Watchdog
from mpi.fabric import Setting
from mpi.supervise.connection import HEARTBEAT_S, TOKEN_VARIABLE

BACKEND = "ccl"
KVS_TIMEOUT = "CCL_KVS_GET_TIMEOUT"
KVS_MARGIN_S = 60  # after the group's timeout, at which our own exchange of addresses ends with a clearer error
applied: tuple[Setting, ...] = ()
"""The environment variables set for oneCCL in this process, with reasons; empty before the first group."""

watchdog: Watchdog | None = None
"""The watchdog of the default group."""

_watchdogs: list[Watchdog] = []  # of the default group, or of the groups of a world that is not ours
_extension: ModuleType | None = None
_kvs_timeout_is_set = KVS_TIMEOUT in os.environ


def extension(rank: Rank) -> ModuleType:
    """The compiled backend, loaded once with the environment variables that oneCCL needs.

    Raises InputError or RunError that names what is missing and the remedy.
    """
    global _extension, applied  # noqa: PLW0603  libraries load once in a process
    if _extension is None:
        libraries = find_libraries(os.environ)
        sweep_segments()
        check_host(rank, os.environ)
        applied = settings(libraries, rank, os.environ)
        path = ensure_built(libraries, os.environ)
        os.environ.update({name: value for name, value, _ in applied})
        _extension = load(path)
    return _extension


def create(options: Any, _backend_options: Any) -> Any:
    """The backend of a group, as c10d asks for it (DistributedBackendOptions)."""
    whole = not dist.is_initialized()
    place = place_of(options.group_rank, options.group_size, options.store, options.timeout, os.environ, whole=whole)
    loaded = extension(place)
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if whole:
        for earlier in _watchdogs:
            earlier.stop()
        _watchdogs.clear()
    if not any(set(ranks) <= set(one.ranks) for one in _watchdogs):
        _watch(options, loaded, ranks)
    seconds = options.timeout.total_seconds()
    if not _kvs_timeout_is_set:
        os.environ[KVS_TIMEOUT] = str(math.ceil(seconds) + KVS_MARGIN_S)  # oneCCL reads it for each communicator
    return loaded.CclBackend(options.store, options.group_rank, options.group_size, seconds, options.group_id)


def _watch(options: Any, loaded: ModuleType, ranks: tuple[int, ...]) -> None:
    """Watch the ranks of a group, from before it is made: a rank may be lost while others wait for it there."""
    global watchdog  # noqa: PLW0603  one default group in a process
    token, timeout_s = os.environ.get(TOKEN_VARIABLE, ""), options.timeout.total_seconds()
    rank = ranks[options.group_rank]
    place = json.dumps(asdict(place_of_this_process(native=True)))[1:-1]

    def connection() -> PrefixStore:
        return PrefixStore("watchdog", options.store.clone())

    watchdog = Watchdog(
        SignedKeys(connection(), token),
        ranks=ranks,
        rank=rank,
        timeout_s=timeout_s,
        sender=loaded.HeartbeatSender(connection(), key_of(rank), token, place, HEARTBEAT_S),
        pending=lambda: PendingCollective(*loaded.pending_collective()),
        set_absent_ranks=loaded.set_absent_ranks,
        abort=lambda reason: loaded.abort(f"ccl: {reason}"),
    )
    _watchdogs.append(watchdog)


dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
