"""A rank's threads as its plan has them, the facts in which ranks must agree, and samples of its usage."""

import json
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from cputrain import __version__
from cputrain.affinity.kernel.binding import bind_thread
from cputrain.affinity.kernel.observe import (
    Observed,
    Thread,
    memory_share,
    misallocated,
    misplaced,
    refuse,
    team_of,
    threads_of,
)
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.ranks.rank import Rank
from cputrain.affinity.topology.machine import format_list
from cputrain.comm import ccl
from cputrain.data.formats.dataset import Dataset
from cputrain.data.formats.shards import crc32c, split_checksum
from cputrain.mpi.usage.records import FOLDER as USAGE
from cputrain.mpi.usage.sampler import Sampler
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import flat

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


PLACES = ("data.path", "data.stage_dir", "output")  # a host may have its own; what is there is compared


def facts_of(recipe: Recipe, dataset: Dataset) -> dict[str, str]:
    """Name -> text of everything that a rank and another one must have in common."""
    settings = flat(recipe.model_dump(mode="json", by_alias=True))
    facts = {"cputrain": __version__, "torch": torch.__version__.partition("+")[0]}
    facts |= {key: json.dumps(value) for key, value in settings.items() if key not in PLACES}
    if recipe.data.generated:  # from the seed, or a user's own
        return facts | {f"{split} {recipe.data.unit}": f"{len(images):,}" for split, images in dataset.splits.items()}
    names = crc32c("\n".join(dataset.classes).encode(errors="surrogateescape"))
    facts["classes"] = f"{len(dataset.classes):,} (checksum {names:08x})"
    for split, images in dataset.splits.items():
        checksum = split_checksum(images, str(recipe.data.path))
        facts[f"{split} images"] = f"{len(images):,} (checksum {checksum:08x})"
    return facts


POLL_S = 0.5


@contextmanager
def sample_usage(folder: Path, rank: Rank, pus: Collection[int]) -> Iterator[None]:
    """Sample this rank, and its host if it is the first rank there, into a run's folder, in a thread on these PUs."""
    sampler = Sampler(folder / USAGE, {rank.rank: os.getpid()}, whole_host=rank.local_rank == 0)
    done = threading.Event()

    def sample() -> None:
        bind_thread(tuple(pus))
        while not done.wait(POLL_S):
            sampler.tick()

    thread = threading.Thread(target=sample, name="cputrain-usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sampler.close()
