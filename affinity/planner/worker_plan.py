"""What a plan gives one worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker: the PUs that compute, communicate and load, its memory, threads, batch and environment.

    `local_batch` (images per step) and `memory_bytes` (estimated peak) are None where the request leaves them open.
    """

    local_rank: int
    compute_pus: tuple[int, ...]
    comm_pus: tuple[int, ...]
    loader_pus: tuple[int, ...]
    memory_policy: str
    memory_nodes: tuple[int, ...]
    memory_bytes: int | None
    intra_op: int
    inter_op: int
    local_batch: int | None
    env: tuple[tuple[str, str], ...]

    @property
    def pus(self) -> tuple[int, ...]:
        """The domain: every PU that this worker may run on, ascending."""
        return tuple(sorted({*self.compute_pus, *self.comm_pus, *self.loader_pus}))
