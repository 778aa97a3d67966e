"""oneCCL as a c10d backend for CPU tensors: torch.distributed.init_process_group("ccl").

Where the package is installed, `import torch` knows the backend (_cputrain_autoload); importing this module
registers it too.
"""

import json
import logging
import math
import os
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from cputrain.affinity.ranks.rank import Rank
from cputrain.comm.ccl.environment import (
    ONE_QUEUE,
    Transport,
    agree,
    check_host,
    choose_transport,
    ensure_built,
    find_libraries,
    load,
    place_of,
    settings,
    sweep_segments,
)
from cputrain.comm.store import SignedKeys, describe_gone, openssl_hmac
from cputrain.comm.watchdog import (
    HeartbeatThread,
    PendingCollective,
    Watchdog,
    WatchedBackend,
    key_of,
    place_of_this_process,
)
from cputrain.measurements import VARIABLE, kept_seconds
from cputrain.mpi.fabric import Setting
from cputrain.mpi.supervise.wire import HEARTBEAT_S, TOKEN_VARIABLE

BACKEND = "ccl"
KVS_TIMEOUT = "CCL_KVS_GET_TIMEOUT"
KVS_MARGIN_S = 60  # after the group's timeout, at which our own exchange of addresses ends with a clearer error
log = logging.getLogger(__name__)
_env = os.environ
"""torch makes a group without passing us anything of the caller's, and oneCCL takes its settings from nowhere else."""

applied: tuple[Setting, ...] = ()
"""The environment variables set for oneCCL in this process, with reasons; empty before the first group."""

watchdog: Watchdog | None = None
"""The watchdog of the default group."""

_watchdogs: list[Watchdog] = []  # of the default group, or of the groups of a world that is not ours
_extension: ModuleType | None = None
_transport: Transport | None = None  # that the extension was loaded with
_kvs_timeout_is_set = KVS_TIMEOUT in _env


def transport_of_job(rank: Rank, keys: SignedKeys) -> Transport:
    """The transport of all ranks of a job, each of which must call this; the one in use where oneCCL has been loaded.

    Raises InputError where this rank cannot use it.
    """

    def own() -> Transport:
        return _transport or choose_transport(_env, rank, lambda: kept_seconds(_env))

    return agree(rank, keys, own, is_set=_transport is not None or VARIABLE in _env)


def extension(rank: Rank, transport: Transport) -> ModuleType:
    """The compiled backend, loaded once with the environment variables that oneCCL needs.

    Raises InputError or RunError that names what is missing and the remedy.
    """
    global _extension, _transport, applied  # noqa: PLW0603  libraries load once in a process
    if _extension is None:
        libraries = find_libraries(_env)
        sweep_segments()
        check_host(rank, _env)
        applied = settings(libraries, rank, transport, _env)
        path = ensure_built(libraries, _env)
        _set_variables()
        _extension, _transport = load(path), transport
    _set_variables()
    return _extension


def _set_variables() -> None:
    """Set what oneCCL needs, for a later world too: oneCCL and libfabric read some of it anew then, and the program, or
    `cputrain.train` at its end, may have put its environment back."""
    for setting in applied:
        name, value, _ = setting
        if setting == ONE_QUEUE or name not in _env:  # the user's number of queues is replaced
            _env[name] = value


def create(options: Any, _backend_options: Any) -> Any:
    """The backend of a group, as c10d asks for it (DistributedBackendOptions)."""
    if _extension is not None:
        _extension.refuse_in_child(f"the creation of group {options.group_id}")
    whole = not dist.is_initialized()
    attempt = _attempt(options)
    store = PrefixStore(attempt, options.store)
    loaded = _extension_for(options, attempt, whole=whole)
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    for earlier in [one for one in _watchdogs if whole or (_answers(store) and not one.watches())]:
        earlier.stop()  # of a world that has ended; where this one's store is gone too, it ends this rank
        _watchdogs.remove(earlier)
    unwatched = not any(set(ranks) <= set(one.ranks) for one in _watchdogs)
    if unwatched:
        _watch(options, attempt, loaded, ranks)
    loaded.set_watched(bool(_watchdogs))
    seconds = options.timeout.total_seconds()
    if not _kvs_timeout_is_set:
        _env[KVS_TIMEOUT] = str(math.ceil(seconds) + KVS_MARGIN_S)  # oneCCL reads it for each communicator
    try:
        return loaded.CclBackend(store, options.group_rank, ranks, seconds, options.group_id)
    except Exception:
        if unwatched:  # a later group of these ranks is watched under its own prefix
            _watchdogs.pop().stop()
        raise


def _attempt(options: Any) -> str:
    """The prefix of a group's keys, without those that groups of its name have left: a store may outlive them, or the
    job's ranks."""
    try:
        number = options.store.add(f"attempts/{options.group_rank}", 1)
    except RuntimeError as error:
        raise RuntimeError(f"ccl: group {options.group_id} cannot be created: {describe_gone(error)}") from None
    return f"{options.group_id}/attempt{number}"


def _extension_for(options: Any, attempt: str, *, whole: bool) -> ModuleType:
    """The extension for a group that is made; only before it is loaded, or to agree with all ranks of a job, do the
    ranks need to know where they are."""
    if _extension is not None and not whole:
        return _extension
    store = PrefixStore(attempt, options.store)
    place = place_of(options.group_rank, options.group_size, store, options.timeout, _env, whole=whole)
    first = _extension is None
    loaded = extension(place, _transport_of(options, attempt, place, whole=whole))
    if first and options.group_rank == 0:
        log.info("cputrain: ccl over %s", _transport)
    return loaded


def _transport_of(options: Any, attempt: str, place: Rank, *, whole: bool) -> Transport:
    """The transport of a group that is made: its ranks agree where all of the job are in it."""
    if not whole:
        return choose_transport(_env, place, dict, whole=False)
    try:
        keys = SignedKeys(options.store, _env.get(TOKEN_VARIABLE, ""), f"{attempt}/transport")
        return transport_of_job(place, keys)
    except RuntimeError as error:
        seconds = options.timeout.total_seconds()
        raise RuntimeError(
            f"ccl: rank 0 has not joined group {options.group_id} within {seconds:g} s, or its store is gone "
            f"({str(error).splitlines()[0][:150]})"
        ) from None


def _answers(store: Store) -> bool:
    try:
        store.check([BACKEND])
    except RuntimeError:
        return False
    return True


def _watch(options: Any, attempt: str, loaded: ModuleType, ranks: tuple[int, ...]) -> None:
    """Watch the ranks of a group, from before it is made: a rank may be lost while others wait for it there."""
    global watchdog  # noqa: PLW0603  one default group in a process
    token, rank, openssl = _env.get(TOKEN_VARIABLE, ""), ranks[options.group_rank], openssl_hmac()
    place, prefix = place_of_this_process(native=openssl is not None), f"{attempt}/watchdog"

    def keys() -> SignedKeys:
        return SignedKeys(options.store.clone(), token, prefix)  # over a connection of their own

    def pending() -> PendingCollective:
        return PendingCollective(*loaded.pending_collective())

    if openssl:
        constant = json.dumps(asdict(place))[1:-1]
        sender = loaded.HeartbeatSender(
            options.store.clone(), f"{prefix}/{key_of(rank)}", token, constant, HEARTBEAT_S, *openssl
        )
    else:
        sender = HeartbeatThread(keys(), rank, place, pending, loaded.groups)
    watchdog = Watchdog(
        keys(),
        ranks=ranks,
        rank=rank,
        timeout_s=options.timeout.total_seconds(),
        sender=sender,
        backend=WatchedBackend(
            pending=pending,
            members=loaded.ranks_of_group,
            set_absent_ranks=loaded.set_absent_ranks,
            abort=lambda reason: loaded.abort(f"ccl: {reason}"),
            failure=loaded.failure,
            disagreement=lambda: loaded.disagreement().removeprefix("ccl: "),
            disagree=lambda reason: loaded.disagree(f"ccl: {reason}"),
        ),
    )
    _watchdogs.append(watchdog)


dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
