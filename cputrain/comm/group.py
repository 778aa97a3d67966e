"""Process group of a training: choose the backend, join, check that all ranks have the same settings, leave; its
all-reduces."""

import faulthandler
import gc
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# If this module were imported later (as by DDP and torchvision), its default arguments would hold the current group;
# gloo's threads would then outlive destroy_process_group and sometimes abort the interpreter's exit.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import PrefixStore, Store

from cputrain.affinity.binding import running_on
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.rank import Rank, with_rank
from cputrain.affinity.wording import first_named
from cputrain.comm import ccl
from cputrain.comm.store import SignedKeys, connect_store
from cputrain.comm.watchdog import HeartbeatThread, PendingCollective, Watchdog, WatchedBackend, place_of_this_process
from cputrain.mpi.supervise.wire import TOKEN_VARIABLE
from cputrain.predict.collectives import MEASURED_BYTES, fit_alpha_beta

FACTS = "facts"

T = TypeVar("T")
SHUTDOWN_S = 60.0  # limit for destroying the group and exiting the process
# Causes in gloo's messages; the last one appears without "gloo", in operations after one that timed out.
FROM_GLOO = re.compile(
    r"gloo.*?(Connection \w+(?: by peer)?|Timed out waiting \w+|Socket closed|Broken pipe)"
    r"|(Application timeout caused pair closure)"
)

_watchdog: Watchdog | None = None  # of the last group
_numbers = count()  # of the groups of this process: all ranks create the same ones, whose keys differ
_stores: dict[tuple[str, str], Store] = {}  # the store of the last group, by its address

ROUNDS = 5


def check_consistency(facts: Mapping[str, str], rank: Rank, keys: SignedKeys) -> None:
    """Check that versions, settings and data (`facts`, texts by name) equal rank 0's, and wait for every rank's check.

    Raises InputError on every rank if any rank differs, with the differences; RunError if the store is another job's.
    """
    facts_here = {"host": socket.gethostname(), "facts": dict(facts)}
    if rank.rank == 0:
        keys.set(FACTS, json.dumps(facts_here))
    problem = describe_rank_difference(rank.rank, facts_here, json.loads(keys.read(FACTS)))
    if reported := keys.problem_of_any(FACTS, problem, rank):
        raise InputError(reported)


def describe_rank_difference(rank: int, facts: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Return a line about the facts in which a rank differs from rank 0, "" if none. `facts` and `first` are
    {"host", "facts"}.
    """
    ours, theirs = facts["facts"], first["facts"]
    pairs = ((name, ours.get(name, "nothing"), theirs.get(name, "nothing")) for name in {**theirs, **ours})
    different = [f"{name}: {value} instead of {expected}" for name, value, expected in pairs if value != expected]
    if not different:
        return ""
    return (
        f"rank {rank} on {facts['host']} differs from rank 0 on {first['host']} in {first_named(different)}: start all "
        "ranks with the same program, recipe and data"
    )


def choose_backend(requested: str, rank: Rank, keys: SignedKeys) -> tuple[str, str]:
    """Choose the backend of all ranks; return it and the reason. Loads oneCCL if chosen, and waits for all ranks.

    With "auto", all ranks use gloo if any rank cannot use oneCCL. With "ccl", raises InputError or RunError on every
    rank if any rank cannot use oneCCL; with "mpi", InputError if torch was built without MPI.
    """
    if requested == "mpi" and not dist.is_mpi_available():
        raise InputError(
            "comm.backend=mpi needs a torch with MPI, which PyPI does not have: build torch from source with MPI, or "
            "set comm.backend=ccl, which also communicates over MPI"
        )
    if requested in ("gloo", "mpi"):
        return requested, f"comm.backend={requested}"
    problem: InputError | RunError | None = None
    over = ""
    try:
        transport = ccl.transport_of_job(rank, keys)
        ccl.extension(rank, transport)
        over = f"over {transport}"
    except (InputError, RunError) as error:
        problem = error
    problem_here = f"rank {rank.rank}: {str(problem).removeprefix('comm.backend=ccl: ')}" if problem else ""
    reported = keys.problem_of_any("ccl", problem_here, rank)
    if not reported:
        return "ccl", over
    if requested == "ccl":
        raise problem or RunError(f"comm.backend=ccl: {reported}")
    return "gloo", reported


@dataclass(frozen=True, slots=True, kw_only=True)
class CommGroup:
    """A job's process group: backend and the reason for it, signed keys in the store, and this rank's watchdog."""

    backend: str
    why: str
    keys: SignedKeys
    watchdog: Watchdog


def _store_of_job(rank: Rank, env: Mapping[str, str]) -> Store:
    """Return the job's store. Ranks keep it for later groups: others may need it before rank 0 could serve it again."""
    if rank.world_size == 1:
        return connect_store(rank, env)
    address = env["MASTER_ADDR"], env["MASTER_PORT"]
    if address not in _stores:
        _stores.clear()
        _stores[address] = connect_store(rank, env)
    return _stores[address]


def start_group(
    rank: Rank,
    worker: WorkerPlan,
    backend: str,
    timeout_s: float,
    env: Mapping[str, str],
    facts: Mapping[str, str] | None = None,
) -> CommGroup:
    """Join the job's process group; its threads run on the worker's comm PUs, or on its compute PUs if it has none.

    `env` has the launcher's variables of this rank; the rank variables are also set in this process's environment.

    Raises InputError if a job on several hosts has no address of rank 0 or the `facts` differ between ranks; InputError
    or RunError if the requested backend cannot be used.
    """
    os.environ.update(with_rank(rank, env))  # torch and its backends read them here, now and later
    store = PrefixStore(f"group{next(_numbers)}", _store_of_job(rank, env))
    token = env.get(TOKEN_VARIABLE, "")
    keys = SignedKeys(store, token)
    check_consistency(facts or {}, rank, keys)
    chosen, why = choose_backend(backend, rank, keys)
    with running_on(worker.comm_pus or worker.compute_pus):
        if chosen == dist.Backend.MPI:
            _join_mpi(rank)
        else:
            dist.init_process_group(
                chosen,
                store=PrefixStore("group", store),
                rank=rank.rank,
                world_size=rank.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
    global _watchdog  # noqa: PLW0603  one default group in a process
    _watchdog = watchdog = ccl.watchdog if chosen == "ccl" else _python_watchdog(rank, store, token, timeout_s)
    assert watchdog is not None
    return CommGroup(backend=chosen, why=why, keys=keys, watchdog=watchdog)


def _join_mpi(rank: Rank) -> None:
    """Join the group over torch's MPI, which assigns ranks itself. Raises InputError if MPI's ranks differ, because the
    ranks were not started by its mpirun."""
    dist.init_process_group("mpi")
    mpi = dist.get_rank(), dist.get_world_size()
    if mpi != (rank.rank, rank.world_size):
        raise InputError(
            f"comm.backend=mpi: rank {rank.rank} of {rank.world_size} is rank {mpi[0]} of {mpi[1]} in MPI: start "
            "the ranks with mpirun of the MPI that torch was built with, or set comm.backend=ccl"
        )


def _python_watchdog(rank: Rank, store: Store, token: str, timeout_s: float) -> Watchdog:
    """Start the watchdog for gloo or MPI; MPI does not report whether a rank waits."""

    def pending() -> PendingCollective:
        if dist.get_backend() == dist.Backend.MPI:
            return PendingCollective("a collective of MPI, or computes")
        number = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        return PendingCollective(f"gloo's collective #{number} or before the next")

    def connection() -> SignedKeys:
        return SignedKeys(store.clone(), token, "watchdog")  # type: ignore[attr-defined]

    return Watchdog(
        connection(),
        ranks=range(rank.world_size),
        rank=rank.rank,
        timeout_s=timeout_s,
        sender=HeartbeatThread(connection(), rank.rank, place_of_this_process(native=False), pending),
        backend=WatchedBackend(pending=pending),
    )


def end_group(group: CommGroup) -> None:
    """Leave the process group and end its threads, as a rank's last collective call.

    The process must then exit within SHUTDOWN_S, or it is ended with a traceback of every thread, in case libraries or
    the interpreter's shutdown hang. Further work must run under `no_exit_limit`.
    """
    dist.barrier()  # under the watchdog, because rank 0 may arrive later than others
    group.watchdog.stop()
    dist.barrier()  # no rank leaves while another's watchdog still expects its heartbeats
    faulthandler.dump_traceback_later(SHUTDOWN_S, exit=True)
    _destroy_group()


def abandon_group() -> None:
    """End the group of a process that is its only rank, after a failure; does nothing if there is none.

    Without this, the watchdog would end the process in a later group, because its own store is gone.
    """
    if _watchdog is not None:
        _watchdog.stop()
    if dist.is_initialized():
        _destroy_group()


def _destroy_group() -> None:
    gc.unfreeze()
    gc.collect()  # DDP's reference cycles also refer to the group
    dist.destroy_process_group()


@contextmanager
def no_exit_limit() -> Iterator[None]:
    """Suspend the time limit that `end_group` sets for the process's exit."""
    faulthandler.cancel_dump_traceback_later()
    yield
    faulthandler.dump_traceback_later(SHUTDOWN_S, exit=True)


@contextmanager
def convert_lost_peer_errors(rank: int) -> Iterator[None]:
    """Convert a backend's error about a lost peer to a RunError of one line. The launcher reports the peer itself."""
    try:
        yield
    except RuntimeError as error:
        from_ccl = re.search(r"(?:^|: )ccl: (.*)", str(error))  # torch adds a prefix if a hook failed
        from_gloo = FROM_GLOO.search(str(error))
        if from_ccl:
            raise RunError(f"rank {rank}: {from_ccl[1]}") from error
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            cause = str(error).splitlines()[0][:150]
            raise RunError(f"rank {rank} cannot reach the job's store, which rank 0 serves ({cause})") from error
        if from_gloo is None:
            raise
        raise RunError(
            f"rank {rank} lost a peer ({from_gloo[1] or from_gloo[2]}): see the rank that ended first"
        ) from error


def run_on_main_rank(action: Callable[[], T]) -> T | None:
    """Run `action` on rank 0 while the others wait, and return its result, None on the others. If it raises InputError,
    every rank raises it."""
    result, refused = None, [""]
    if dist.get_rank() == 0:
        try:
            result = action()
        except InputError as error:
            refused = [str(error)]
    dist.broadcast_object_list(refused)
    if refused[0]:
        raise InputError(refused[0])
    return result


def all_reduce_sum(*values: float) -> list[float]:
    """Return the sum of each value over all ranks, in float64."""
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return [float(value) for value in summed]


def all_gather(value: T) -> list[T]:
    """Return the values of all ranks, ordered by rank."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def timed_rounds(act: Callable[[], object], rounds: int) -> list[float]:
    """Call `act` in all ranks, each time after a barrier; return the seconds of each round."""
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure_alpha_beta() -> tuple[float, float]:
    """Measure alpha and beta of the default group's float32 all-reduce; all ranks return the slowest rank's values."""
    medians = []
    for size in MEASURED_BYTES:
        values = torch.zeros(size // 4)
        medians.append(median(timed_rounds(partial(dist.all_reduce, values), ROUNDS)))
    slowest = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return fit_alpha_beta(list(zip(map(float, MEASURED_BYTES), slowest.tolist(), strict=True)))
