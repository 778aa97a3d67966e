"""One rank from its start to a ready process group, and what train and eval both need afterwards."""

import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from affinity.errors import InputError
from affinity.kernel.observe import Observed, Thread, memory_share, misallocated, misplaced, refuse, team_of, threads_of
from affinity.planner.plan import WorkerPlan
from affinity.ranks.rank import Rank
from affinity.topology.cpuset import format_list
from cputrain import __version__
from cputrain.comm import ccl
from cputrain.comm.group import Group, gather, start_group
from cputrain.data.blocks import block_length
from cputrain.data.decode import Decode, choose_decoder
from cputrain.data.generated import Points
from cputrain.data.images import Dataset, Images
from cputrain.data.normalize import choose_normalize
from cputrain.data.shards import Shards
from cputrain.data.source import open_data
from cputrain.recipe.derivation import Numbers, derive
from cputrain.recipe.schema import Recipe
from cputrain.training.in_use import planned_allocator

FIRST_ALLOCATION = 16 << 20  # float32 values: 64 MiB, far more than any page or thread would hide


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A rank that is bound, connected and has its data open. `observed` is what the kernel gave it at its start.

    `block_length` images are read at once, 0 where each is by itself; a step's images are cut over the ranks in
    proportion to `batches`, the most that each has in a backward pass, recipe.batch.local on average; `team` is the
    threads of its first parallel region, `memory_share` the NUMA nodes of its first large allocation; `decoder` what
    `decode` is.
    """

    recipe: Recipe
    rank: Rank
    worker: WorkerPlan
    observed: Observed
    dataset: Dataset
    decode: Decode
    decoder: str
    normalize: Callable[[torch.Tensor], torch.Tensor]
    numbers: Numbers
    block_length: int
    group: Group
    batches: tuple[int, ...]
    team: tuple[Thread, ...]
    memory_share: dict[int, float]

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone writes and prints."""
        return self.rank.rank == 0

    @property
    def features(self) -> int | None:
        """Numbers in a row of the network's input where that is points; None where it is images."""
        return self.dataset.train.x.shape[1] if isinstance(self.dataset.train, Points) else None

    @property
    def loader_pus(self) -> tuple[int, ...]:
        """Where images are decoded. Said even where it is the compute PUs: OpenMP has bound this thread to one."""
        return self.worker.loader_pus or self.worker.compute_pus

    @property
    def loader_threads(self) -> int:
        """Threads that decode images: one per loader PU, or one that shares the compute PUs."""
        return len(self.worker.loader_pus) or 1


def start_session(recipe: Recipe, rank: Rank, worker: WorkerPlan, observed: Observed, *, check: bool) -> Session:
    """Set torch's threads, open the data, join the group. Raises InputError where data or launcher do not fit.

    Raises RunError, with `check`, where OpenMP's threads or the first large allocation are not where the plan has
    them.
    """
    torch.set_num_threads(worker.intra_op)
    first = torch.empty(FIRST_ALLOCATION)
    team = team_of(lambda: touch(first))
    share = memory_share(first.data_ptr())
    if check:
        bound = observed.memory_policy == worker.memory_policy
        refuse(worker, misplaced(worker, team) + (misallocated(worker, share) if bound else []))
    if torch.get_num_interop_threads() != worker.inter_op:  # a process may set it once
        torch.set_num_interop_threads(worker.inter_op)
    torch.manual_seed(recipe.seed)
    dataset = open_data(recipe)
    _check_labels(dataset)
    decode, decoder = choose_decoder(recipe.data.decoder, os.environ)
    numbers = derive(
        recipe,
        ppn=rank.local_world_size,
        nodes=rank.world_size // rank.local_world_size,
        images=len(dataset.train),
    )
    blocks = _block_length(dataset.train, recipe.data.block_mib, numbers.steps_per_epoch)
    group = start_group(rank, worker, recipe.comm.backend, recipe.comm.timeout_s)
    if check and group.backend == ccl.BACKEND:
        refuse(worker, misplaced_comm(rank.local_rank, os.environ, threads_of(os.getpid())))
    return Session(
        recipe=recipe,
        rank=rank,
        worker=worker,
        observed=observed,
        dataset=dataset,
        decode=decode,
        decoder=decoder,
        normalize=(lambda x: x) if isinstance(dataset.train, Points) else choose_normalize(recipe.data, os.environ),
        numbers=numbers,
        block_length=blocks,
        group=group,
        batches=_batches(recipe, worker, numbers),
        team=team,
        memory_share=share,
    )


def _block_length(images: Images, block_mib: float, steps: int) -> int:
    """How many images are read at once; 0 where each is by itself. Raises InputError."""
    if block_mib == 0:
        return 0
    if not isinstance(images, Shards):
        raise InputError(
            "data.block_mib reads shards, which data.path does not hold: cputrain prepare makes them, or set it to 0"
        )
    return block_length(images.bytes_per_image, block_mib * (1 << 20), steps)


def _check_labels(dataset: Dataset) -> None:
    for split, images in dataset.splits.items():
        labels = images.labels
        wrong = np.flatnonzero((labels < 0) | (labels >= len(dataset.classes)))
        if len(wrong):
            told = f"{images.name(int(wrong[0]))} has label {labels[wrong[0]]}"
            raise InputError(f"{split}: {told}, but there are {len(dataset.classes)} classes: prepare again")


def misplaced_comm(local_rank: int, env: Mapping[str, str], threads: tuple[Thread, ...]) -> list[str]:
    """Which of this rank's oneCCL threads are not where CCL_WORKER_AFFINITY has them; empty without one."""
    if "CCL_WORKER_AFFINITY" not in env:
        return []
    count = int(env.get("CCL_WORKER_COUNT", "1"))
    places = [int(pu) for pu in env["CCL_WORKER_AFFINITY"].split(",")][local_rank * count :][:count]
    empty = sorted(pu for pu in places if (pu,) not in [thread.pus for thread in threads])
    return [f"oneCCL's threads planned on PUs {format_list(places)}, none on {format_list(empty)}"] if empty else []


def touch(values: torch.Tensor) -> None:
    """Write all values, in a parallel region."""
    values.fill_(1.0)


def _batches(recipe: Recipe, worker: WorkerPlan, numbers: Numbers) -> tuple[int, ...]:
    """Every rank's local batch: the recipe's, or the plan's share where the recipe wants them balanced."""
    mine = recipe.batch.local if recipe.plan.balance == "equal" else worker.local_batch or 0
    batches = tuple(gather(mine))
    if sum(batches) != recipe.batch.local * len(batches):
        raise InputError(
            f"the plan's local batches {batches} are not {recipe.batch.local} on average: plan with this recipe"
        )
    images = numbers.used // numbers.steps_per_epoch
    if images * min(batches) // sum(batches) < numbers.passes:
        raise InputError(
            f"{images} images a step, shared as {batches}, leave a rank without one for each of {numbers.passes} "
            "pass(es): set plan.balance=equal"
        )
    return batches


def describe_environment(session: Session) -> dict[str, Any]:
    """What the run was made with: versions, backend, kernel, CPU features, and the variables that matter."""
    telling = (
        "OMP_",
        "KMP_",
        "GOMP_",
        "MKL_",
        "MALLOC_",
        "I_MPI_",
        "FI_",
        "CCL_",
        "GLOO_",
        "AFFINITY_",
        "SLURM_",
        "PBS_",
    )
    exact = ("LD_PRELOAD", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        "cputrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": session.group.backend,
        "backend_why": session.group.why,
        "decoder": session.decoder,
        "allocator": planned_allocator(os.environ),
        "torch_build": torch.__config__.show().split("\n"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
        "host": socket.gethostname(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(telling) or k in exact},
    }


def _local_batch(session: Session) -> int:
    """Images of this rank's backward pass, rounded where its shares of the steps or their passes differ."""
    share = session.batches[session.rank.rank] / sum(session.batches)
    return round(session.numbers.global_batch * share / session.numbers.passes)


def binding_record(session: Session) -> dict[str, Any]:
    """This rank's line of the start event: planned and given PUs and memory."""
    return {
        "rank": session.rank.rank,
        "host": socket.gethostname(),
        "planned_pus": list(session.worker.pus),
        "local_batch": _local_batch(session),
        **asdict(session.observed),
        "threads": torch.get_num_threads(),
        "thread_pus": [list(thread.pus) for thread in session.team],
        "memory_share": session.memory_share,
    }
