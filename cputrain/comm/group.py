"""The process group: its start and end, and the few things that ranks agree on."""

import faulthandler
import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

# Imported later (DDP and torchvision do), this module would keep the group of that moment in its default arguments:
# gloo's threads would then outlive destroy_process_group and abort the interpreter's exit now and then.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as meet

from affinity.errors import InputError, RunError
from affinity.kernel.binding import running_on
from affinity.planner.plan import WorkerPlan
from affinity.ranks.rank import Rank
from affinity.ranks.rendezvous import with_rank
from cputrain.comm import ccl
from cputrain.comm.choice import choose
from cputrain.comm.watchdog import Waiting, Watchdog

T = TypeVar("T")
END_S = 60.0  # for taking the group down and leaving the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A job's process group: its backend and why that one, the store that its ranks met in, who watches over it."""

    backend: str
    why: str
    store: Store
    watchdog: Watchdog


def start_group(rank: Rank, worker: WorkerPlan, backend: str, timeout_s: float) -> Group:
    """Join the job's group; its threads run on the worker's comm PUs, or on its compute PUs.

    Raises InputError when the launcher says nothing of where rank 0 is and the job has several hosts, InputError or
    RunError where the backend asked for cannot be used.
    """
    os.environ.update(with_rank(rank, os.environ))
    store, _, _ = next(meet("env://"))
    chosen, why = choose(backend, rank, store)
    with running_on(worker.comm_pus or worker.compute_pus):
        dist.init_process_group(
            chosen,
            store=PrefixStore("group", store),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    watchdog = ccl.watchdog if chosen == "ccl" else _watch_gloo(rank, store)
    assert watchdog is not None
    return Group(backend=chosen, why=why, store=store, watchdog=watchdog)


def _watch_gloo(rank: Rank, store: Store) -> Watchdog:
    def waits_in() -> Waiting:
        number = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        return Waiting(f"gloo's collective #{number} or before the next", number)

    return Watchdog(
        PrefixStore("watchdog", store.clone()),  # type: ignore[attr-defined]
        rank=rank.rank,
        world_size=rank.world_size,
        waits_in=waits_in,
        note=_nothing,
        fail=_nothing,
    )


def _nothing(_text: str) -> None:
    """gloo takes neither notes nor an end."""


def end_group(group: Group) -> None:
    """Leave the group and end its threads: a rank's last act.

    What hangs in that, libraries or the interpreter's end, is ended with every thread's traceback.
    """
    dist.barrier()  # watched over: rank 0 may have more to do at the end than others
    group.watchdog.stop()
    dist.barrier()  # nobody leaves whom another's watchdog still wants to hear
    faulthandler.dump_traceback_later(END_S, exit=True)
    gc.unfreeze()
    gc.collect()  # DDP's reference cycles hold the group too
    dist.destroy_process_group()


@contextmanager
def naming_lost_peers(rank: int) -> Iterator[None]:
    """Turn a backend's word for a peer that is gone into one line (the peer itself is named by who started it)."""
    try:
        yield
    except RuntimeError as error:
        ours = re.search(r"(?:^|: )ccl: (.*)", str(error))  # within PyTorch's words where a hook has met it
        found = re.search(r"Connection \w+ by peer|Connection \w+|Timed out waiting \w+", str(error))
        if ours:
            raise RunError(f"rank {rank}: {ours[1]}") from error
        if "gloo" not in str(error) or found is None:
            raise
        raise RunError(f"rank {rank} lost a peer ({found.group()}): see the rank that ended first") from error


def on_rank_0(action: Callable[[], T]) -> T | None:
    """Do something on rank 0 alone while the others wait; an InputError there is one everywhere."""
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


def total(*values: float) -> list[float]:
    """Each value summed over all ranks, in float64."""
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return [float(value) for value in summed]


def gather(value: T) -> list[T]:
    """Every rank's value, by rank."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
