"""The end of gloo's process groups in launched programs, which torch can make wait forever.

A thread of gloo that frees a finished operation may need the interpreter's lock: for a tensor that Python has dropped,
or for the context that torch's backward pass stores with it. The group's destructor waits for this thread. torch gives
the lock up meanwhile where Python drops the last reference to a group, but not where the reducer of a
DistributedDataParallel network does, after `destroy_process_group` or at the interpreter's end (torch 2.13,
Reducer::~Reducer in torch/csrc/distributed/c10d/reducer.cpp).
"""

import atexit
import sys
import weakref
from functools import wraps
from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401  before there is a group, which it would hold: see group.py
from torch.nn.parallel import DistributedDataParallel

_networks: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # those over gloo
_groups: list[tuple[weakref.ref[Any], dist.ProcessGroup]] = []  # those of their reducers, also of dead ones


def end_groups_without_lock() -> None:
    """Let Python drop the last reference to each gloo group that a DistributedDataParallel network uses, from now on.

    A group stays until its networks are gone and another network is built, or until the process exits, after the
    program's own exit handlers. Programs notice nothing else. Calling this twice changes nothing.
    """
    build = getattr(DistributedDataParallel, "_ddp_init_helper", None)  # torch 2.8 to 2.13 have it
    if build is None or build.__module__ == __name__:
        return

    @wraps(build, assigned=())
    def build_and_keep_group(network: DistributedDataParallel, *args: Any, **options: Any) -> None:
        build(network, *args, **options)
        _drop_unused_groups()
        group = network.process_group
        if type(group) is dist.ProcessGroup and group.name() == dist.Backend.GLOO:
            _networks.add(network)
            _groups.append((weakref.ref(network.reducer), group))

    DistributedDataParallel._ddp_init_helper = build_and_keep_group  # type: ignore[method-assign,assignment]
    atexit.register(_end_groups)


def _drop_unused_groups() -> None:
    _groups[:] = [(reducer, group) for reducer, group in _groups if reducer() is not None]


def _end_groups() -> None:
    """End the groups while gloo's threads can still get the lock, which the interpreter's end denies them. After an
    error the process must not wait for operations, which other ranks may never join."""
    if hasattr(sys, "last_value"):  # of an error that nobody caught
        return
    for network in tuple(_networks):
        vars(network).update(logger=None, reducer=None, process_group=None)
    if _groups and dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO:
        dist.destroy_process_group()
    _groups.clear()
