"""How a training runs: batch, evaluation, checkpoints, communication, plan."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from affinity.topology.cpuset import parse_list
from cputrain.recipe.schema.base import Auto, NotNegative, Positive, Section, misfit


class BatchSection(Section):
    """Images per step: either local x workers x accumulation, or a fixed global batch for any number of workers."""

    local: Positive = 32
    """Images in one backward pass of one worker. With batch.global it is the largest allowed number instead."""
    accumulation: Positive = 1
    """Gradient accumulation steps: backward passes of each worker whose gradients are summed before one update."""
    global_: Positive | None = Field(default=None, alias="global")
    """Images in one step over all workers. Workers get equal shares (one image more or less where it does not divide)
    and accumulate gradients as often as batch.local requires; null: local x workers x accumulation. Set on the command
    line, it replaces the recipe's batch.accumulation."""

    @model_validator(mode="after")
    def _accumulation_is_decided_once(self) -> "BatchSection":
        if self.global_ is not None and self.accumulation != 1:
            raise misfit(
                f"batch.global={self.global_} already decides the gradient accumulation steps: remove "
                f"batch.accumulation={self.accumulation}",
                "batch.accumulation",
                "batch.global",
            )
        return self


class EvaluateSection(Section):
    """Evaluation on all validation images: exact loss, top-1 and top-5 accuracy."""

    every_epochs: Positive | None = 1
    """Number of epochs between evaluations; null: once, after the last epoch."""
    batch: Positive | None = None
    """Images in one forward pass of one worker during evaluation; null: batch.local."""


class CheckpointSection(Section):
    """Checkpoints of the training state, from which `cputrain train --resume` continues."""

    every_epochs: Positive | None = 1
    """Number of epochs between checkpoints. One is also saved before every evaluation, so that none can be lost with
    it, and after the last step; null: only these."""
    every_minutes: Annotated[float, Field(gt=0)] | None = 5.0
    """Minutes between checkpoints within an epoch: the most that a crash can cost, except where one step takes longer.
    They are written while the training goes on; null: none."""
    every_steps: Positive | None = None
    """Number of steps between checkpoints within an epoch, in place of every_minutes; null: none."""
    keep: Positive = 2
    """Number of checkpoints to keep: the newest ones. The best one (checkpoints/best) is kept in addition. With 1,
    nothing is left to fall back to where a file is damaged."""


class CommSection(Section):
    """Communication of gradients between the workers."""

    backend: Literal["auto", "ccl", "gloo", "mpi"] = "auto"
    """Backend of torch.distributed: ccl (oneCCL), gloo, or mpi, which only torch built from source with MPI has. auto
    takes ccl where every rank can use it, otherwise gloo."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a rank waits for the others in a collective operation before it fails."""
    bucket_mib: Annotated[float, Field(gt=0)] | Auto = "auto"
    """Size in MiB of the gradient buckets that DDP all-reduces at a time. auto computes it from all-reduce times
    measured at the start of the training."""
    compression: Literal["none", "bf16"] = "none"
    """Number format of the gradients in transit. bf16 halves the traffic: it sends bfloat16 and adds the rounding error
    to the next step's gradients; none sends them as they are."""


class PlanSection(Section):
    """Requests to the planner of workers, threads and cores; auto leaves a choice to the planner."""

    ppn: Positive | Auto = "auto"
    """Number of workers per host (processes per node)."""
    threads: Positive | Auto = "auto"
    """Number of intra-op threads per worker: the OpenMP threads that compute."""
    inter_op: Positive | Auto = "auto"
    """Number of inter-op threads per worker, for operators that torch runs at the same time."""
    comm_cores: NotNegative | Auto = "auto"
    """Number of cores per worker reserved for communication threads; 0 reserves none."""
    loader_cores: NotNegative | Auto = "auto"
    """Number of cores per worker reserved for decoding images; 0 decodes on the compute cores."""
    smt: Literal["auto", "on", "off"] = "auto"
    """Whether to compute on the second hardware thread of each core too; auto: off."""
    profile: Literal["auto", "bkm-2018", "mlperf-spr"] = "auto"
    """Published set of choices to use wherever this section has auto. bkm-2018: SURFsara and Intel's best-known
    methods; mlperf-spr: Intel's MLPerf v2.1 submission; auto: the planner's own rules."""
    openmp: Literal["auto", "libgomp", "libiomp5"] = "auto"
    """OpenMP runtime to plan for: libgomp (GNU) or libiomp5 (Intel). auto takes the profile's, or else the one that
    this Python loads."""
    allocator: Literal["auto", "glibc", "tcmalloc", "jemalloc"] = "auto"
    """Memory allocator of the workers. auto takes tcmalloc, or else jemalloc, where this host has it, or else glibc's
    own."""
    cores: str = "all"
    """CPUs to plan with, as taskset numbers them: all, or a list such as 0-15,32. Their hyper-threads are used only
    where they are listed too."""
    e_cores: Literal["auto", "off"] = "auto"
    """Whether slower types of cores (efficiency cores) compute: auto uses them where that is faster; off leaves them
    out."""
    oversubscribe: bool = False
    """Whether ppn may exceed the number of cores, so that workers share them. For trials only: timings mean nothing."""
    share: bool = False
    """Whether to leave out cores to which other plans have bound running processes, to share the host with them."""
    balance: Literal["equal", "batch"] = "equal"
    """How a host's images are divided among its workers. equal: the same number each; batch: in proportion to each
    worker's cores, with batch.local as the average."""

    @field_validator("cores")
    @classmethod
    def _is_list_of_cpus(cls, value: str) -> str:
        if value != "all" and not parse_list(value):
            raise ValueError("give all, or a list of CPUs as in 0-15,32")
        return value
