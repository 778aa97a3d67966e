"""oneCCL as a c10d backend for CPU tensors: torch.distributed.init_process_group("ccl").

If the package is installed, `import torch` registers the backend (_cputrain_autoload); so does importing this module.
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

from _cputrain_autoload import STATE_FILE, STATE_VARIABLE, file_of_watcher
from cputrain.affinity.rank import Rank
from cputrain.comm.ccl.environment import (
    ONE_QUEUE,
    Transport,
    agree_on_transport,
    ccl_settings,
    check_host,
    choose_transport,
    ensure_extension,
    find_libraries,
    load_extension,
    place_of,
    preload_libraries,
    sweep_segments,
    worker_threads,
)
from cputrain.comm.store import SignedKeys, describe_gone, openssl_hmac
from cputrain.comm.watchdog import (
    HeartbeatThread,
    PendingCollective,
    Watchdog,
    WatchedBackend,
    heartbeat_key,
    place_of_this_process,
)
from cputrain.measurements import VARIABLE, cached_seconds
from cputrain.mpi.fabric import Setting
from cputrain.mpi.supervise.wire import HEARTBEAT_S, TOKEN_VARIABLE

BACKEND = "ccl"
KVS_TIMEOUT = "CCL_KVS_GET_TIMEOUT"
KVS_MARGIN_S = 60  # added to the group's timeout, at which our exchange of addresses fails with a clearer error
log = logging.getLogger(__name__)
_env = os.environ
"""torch passes no settings to `create`, and oneCCL reads its settings only from the environment."""

applied: tuple[Setting, ...] = ()
"""The environment variables set for oneCCL in this process, with reasons; empty before the first group."""

watchdog: Watchdog | None = None
"""The watchdog of the default group."""

_watchdogs: list[Watchdog] = []  # of the default group, or of single groups if the default group is not ours
_extension: ModuleType | None = None
_transport: Transport | None = None  # with which the extension was loaded
_kvs_timeout_is_set = KVS_TIMEOUT in _env


def transport_of_job(rank: Rank, keys: SignedKeys) -> Transport:
    """Choose the transport of all ranks of a job: the one in use if oneCCL is loaded. All ranks must call this.

    Raises InputError if this rank cannot use it.
    """

    def own() -> Transport:
        return _transport or choose_transport(_env, rank, lambda: cached_seconds(_env))

    is_set = _transport is not None or VARIABLE in _env
    return agree_on_transport(rank, keys, own, is_set=is_set, threads=worker_threads(_env))


def extension(rank: Rank, transport: Transport) -> ModuleType:
    """Load the compiled backend, once, with the environment variables that oneCCL needs.

    Raises InputError or RunError that says what is missing and how to get it.
    """
    global _extension, _transport, applied  # noqa: PLW0603  libraries load once in a process
    if _extension is None:
        libraries = find_libraries(_env)
        sweep_segments()
        check_host(rank, _env)
        applied = ccl_settings(libraries, rank, transport, _env)
        path = ensure_extension(libraries, _env)
        _set_variables()
        preload_libraries(libraries)
        _extension, _transport = load_extension(path), transport
    _set_variables()
    return _extension


def _set_variables() -> None:
    """Set the variables that oneCCL needs. Repeated for a later world, for which oneCCL and libfabric read some again,
    because the program, or the end of `cputrain.train`, may have restored the environment."""
    for setting in applied:
        name, value, _ = setting
        if setting == ONE_QUEUE or name not in _env:  # ONE_QUEUE overrides the user's setting
            _env[name] = value


def create(options: Any, _backend_options: Any) -> Any:
    """Create the backend of a group, called by c10d with DistributedBackendOptions."""
    if _extension is not None:
        _extension.refuse_in_child(f"the creation of group {options.group_id}")
    whole = not dist.is_initialized()
    attempt = _group_prefix(options)
    store = PrefixStore(attempt, options.store)
    loaded = _extension_for(options, attempt, whole=whole)
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    for earlier in [watchdog for watchdog in _watchdogs if whole or (_answers(store) and not watchdog.watches())]:
        earlier.stop()  # of an earlier world; kept if this group's store is gone too, because it then ends this rank
        _watchdogs.remove(earlier)
    unwatched = not any(set(ranks) <= set(watchdog.ranks) for watchdog in _watchdogs)
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


def _group_prefix(options: Any) -> str:
    """Return a prefix for a group's keys that no earlier group of its name has used, as a store may outlive groups, and
    even the job's ranks."""
    try:
        number = options.store.add(f"attempts/{options.group_rank}", 1)
    except RuntimeError as error:
        raise RuntimeError(f"ccl: group {options.group_id} cannot be created: {describe_gone(error)}") from None
    return f"{options.group_id}/attempt{number}"


def _extension_for(options: Any, attempt: str, *, whole: bool) -> ModuleType:
    """Return the extension for a new group, loading it if necessary. The ranks exchange their places before it is
    loaded, or if the group has all ranks of the job (`whole`)."""
    if _extension is not None and not whole:
        return _extension
    store = PrefixStore(attempt, options.store)
    member = place_of(options.group_rank, options.group_size, store, options.timeout, _env, whole=whole)
    first = _extension is None
    loaded = extension(member, _transport_of(options, attempt, member, whole=whole))
    if first and options.group_rank == 0:
        log.info("cputrain: ccl over %s", _transport)
    return loaded


def _transport_of(options: Any, attempt: str, member: Rank, *, whole: bool) -> Transport:
    """Choose the transport of a new group; its ranks agree on one if the group has all ranks of the job (`whole`)."""
    if not whole:
        return choose_transport(_env, member, dict, whole=False)
    try:
        keys = SignedKeys(options.store, _env.get(TOKEN_VARIABLE, ""), f"{attempt}/transport")
        return transport_of_job(member, keys)
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
    """Start to watch the ranks of a group before it is created, because a rank may be lost during its creation."""
    global watchdog  # noqa: PLW0603  one default group in a process
    token, rank, openssl = _env.get(TOKEN_VARIABLE, ""), ranks[options.group_rank], openssl_hmac()
    member, prefix = place_of_this_process(native=openssl is not None), f"{attempt}/watchdog"
    copy = file_of_watcher(_env, STATE_VARIABLE, STATE_FILE)

    def keys() -> SignedKeys:
        return SignedKeys(options.store.clone(), token, prefix)  # over a separate connection

    def pending() -> PendingCollective:
        return PendingCollective(*loaded.pending_collective())

    if openssl:
        constant = json.dumps(asdict(member))[1:-1]
        sender = loaded.HeartbeatSender(
            options.store.clone(),
            f"{prefix}/{heartbeat_key(rank)}",
            token,
            constant,
            HEARTBEAT_S,
            *openssl,
            -1 if copy is None else copy,
        )
    else:
        sender = HeartbeatThread(keys(), rank, member, pending, loaded.groups, copy)
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
