"""Pools of cores. Cores are bound when a program starts, by `cputrain launch`: threads are not moved while it runs."""

import os
from typing import Any

from cputrain import InputError, find_machine

BOUND = "cores are bound at the start: use cputrain launch --instances N, or cputrain.bind_process"


class CPUPool:
    """CPUs by number, or those of a NUMA node, of which this process may use `core_ids`; by default all."""

    def __init__(self, core_ids: list[int] | range | None = None, node_id: int | None = None) -> None:
        allowed = os.sched_getaffinity(0)
        if core_ids is None and node_id is not None:
            core_ids = get_core_list_of_node_id(node_id)
        self.core_ids = [core for core in (sorted(allowed) if core_ids is None else core_ids) if core in allowed]


def get_core_list_of_node_id(node_id: int) -> list[int]:
    """Return the first hardware thread of each core of a NUMA node. Raises InputError if there is no such node."""
    cores = [min(core.pus) for core in find_machine("this").cores if core.numa_node == node_id]
    if not cores:
        raise InputError(f"node_id={node_id}: this machine has no such NUMA node with cores (cputrain plan lists them)")
    return sorted(cores)


def is_runtime_ext_enabled() -> bool:
    """Return False: the original needs it for `pin`, `Task` and `MultiStreamModule`."""
    return False


class _AtStart:
    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        raise InputError(
            f"intel_extension_for_pytorch.cpu.runtime.{type(self).__name__} is not in the stand-in: {BOUND}"
        )


class pin(_AtStart):  # noqa: N801
    """Refused, with what to do."""


class Task(_AtStart):
    """Refused, with what to do."""


class MultiStreamModule(_AtStart):
    """Refused, with what to do."""


class MultiStreamModuleHint(_AtStart):
    """Refused, with what to do."""
