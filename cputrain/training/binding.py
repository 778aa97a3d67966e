"""The binding of a rank: torch's threads and memory where the plan puts them, checked against the kernel."""

import os
import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import torch

from affinity.kernel.observe import Observed, Thread, memory_share, misallocated, misplaced, refuse, team_of, threads_of
from affinity.planner.plan import WorkerPlan
from affinity.ranks.rank import Rank
from affinity.topology.cpuset import format_list
from cputrain.comm import ccl

FIRST_ALLOCATION = 16 << 20  # float32 values: 64 MiB, far larger than any page or a thread's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A rank's planned worker, and what the kernel gave it: PUs and memory at its start (`observed`), OpenMP threads.

    `team` are the threads of the first parallel region; `memory_share` is the share of each NUMA node in the first
    large allocation.
    """

    worker: WorkerPlan
    observed: Observed
    team: tuple[Thread, ...]
    memory_share: dict[int, float]

    @property
    def loader_pus(self) -> tuple[int, ...]:
        """The PUs that decode images. Set even if they are the compute PUs: OpenMP has bound this thread to one PU."""
        return self.worker.loader_pus or self.worker.compute_pus

    @property
    def loader_threads(self) -> int:
        """The number of threads that decode images: one per loader PU, else one on the compute PUs."""
        return len(self.worker.loader_pus) or 1


def start_threads(worker: WorkerPlan, observed: Observed, *, check: bool) -> Binding:
    """Start torch's threads as planned. With `check`, raises RunError where threads or memory are elsewhere."""
    torch.set_num_threads(worker.intra_op)
    first = torch.empty(FIRST_ALLOCATION)
    team = team_of(lambda: _touch(first))
    share = memory_share(first.data_ptr())
    if check:
        bound = observed.memory_policy == worker.memory_policy
        refuse(worker, misplaced(worker, team) + (misallocated(worker, share) if bound else []))
    if torch.get_num_interop_threads() != worker.inter_op:  # a process may set it once
        # A script that no plan has bound may have computed before: it keeps the threads that it then started.
        with nullcontext() if check else suppress(RuntimeError):
            torch.set_num_interop_threads(worker.inter_op)
    return Binding(worker=worker, observed=observed, team=team, memory_share=share)


def _touch(values: torch.Tensor) -> None:
    """Write all values, in a parallel region."""
    values.fill_(1.0)


def check_comm_threads(worker: WorkerPlan, rank: Rank, backend: str, env: Mapping[str, str]) -> None:
    """Raise RunError where oneCCL's threads of this rank are not on the planned PUs."""
    if backend == ccl.BACKEND:
        refuse(worker, misplaced_comm_threads(rank.local_rank, env, threads_of(os.getpid())))


def misplaced_comm_threads(local_rank: int, env: Mapping[str, str], threads: tuple[Thread, ...]) -> list[str]:
    """A line about this rank's oneCCL threads that are not where a plan's CCL_WORKER_AFFINITY puts them, a list of
    CPUs; empty for other values."""
    if not re.fullmatch(r"\d+(,\d+)*", env.get("CCL_WORKER_AFFINITY", "")):
        return []
    count = int(env.get("CCL_WORKER_COUNT", "1"))
    planned = [int(pu) for pu in env["CCL_WORKER_AFFINITY"].split(",")][local_rank * count :][:count]
    empty = sorted(pu for pu in planned if (pu,) not in [thread.pus for thread in threads])
    if not empty:
        return []
    return [f"oneCCL threads planned on CPUs {format_list(planned)}, none found on {format_list(empty)}"]
