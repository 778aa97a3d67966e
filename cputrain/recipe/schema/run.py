"""Batch, evaluation, checkpoints, communication, plan: how a training is run."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cputrain.recipe.schema.base import Auto, NotNegative, Positive, Section, misfit


class BatchSection(Section):
    """Images per step: local x workers x accumulation, or a fixed global batch whatever the workers."""

    local: Positive = 32
    """The images of one worker's backward pass; with batch.global, the most that a pass may have."""
    accumulation: Positive = 1
    """The backward passes of a step, whose gradients are added up before the update."""
    global_: Positive | None = Field(default=None, alias="global")
    """The images of a step over all workers, whatever their number: shares differ by at most one image, and a worker
    makes as many backward passes as keep each within batch.local. null makes it local x workers x accumulation. Setting
    it on the command line drops the recipe's batch.accumulation."""

    @model_validator(mode="after")
    def _passes_are_decided_once(self) -> "BatchSection":
        if self.global_ is not None and self.accumulation != 1:
            raise misfit(
                f"batch.global={self.global_} decides how many passes a step has: leave "
                f"batch.accumulation={self.accumulation} out",
                "batch.accumulation",
                "batch.global",
            )
        return self


class EvaluateSection(Section):
    """Exact top-1 and top-5 over the validation images."""

    every_epochs: Positive | None = 1
    """Evaluate after this many epochs; null: at the end only."""
    batch: Positive | None = None
    """Images per worker and forward pass of an evaluation; null: batch.local."""


class CheckpointSection(Section):
    """What is kept of the training state."""

    every_epochs: Positive | None = 1
    """Write one after this many epochs; null: at the end only."""
    keep: Positive = 2
    """How many of the newest to keep; the best is kept besides."""


class CommSection(Section):
    """How gradients travel."""

    backend: Literal["auto", "ccl", "gloo"] = "auto"
    """The c10d backend; auto: ccl (oneCCL) where every rank can use it, else gloo."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a rank waits in a collective for the others."""
    bucket_mb: Annotated[float, Field(gt=0)] | Auto = "auto"
    """MiB of gradients sent at a time; auto: from what all-reduces take at the start."""
    compression: Literal["none", "bf16"] = "none"
    """bf16: gradients travel as bfloat16, with the rounding carried over to the next step."""


class PlanSection(Section):
    """What is asked of the planner; auto: it decides."""

    ppn: Positive | Auto = "auto"
    """Workers per host."""
    threads: Positive | Auto = "auto"
    """Intra-op threads per worker."""
    inter_op: Positive | Auto = "auto"
    """Inter-op threads per worker."""
    comm_cores: NotNegative | Auto = "auto"
    """Cores per worker kept for communication."""
    loader_cores: NotNegative | Auto = "auto"
    """Cores per worker kept for loading images."""
    smt: Literal["auto", "on", "off"] = "auto"
    """Whether second hardware threads compute; auto: off."""
    profile: Literal["auto", "bkm-2018", "mlperf-spr"] = "auto"
    """Published practice that decides what is auto here; auto: the planner's own rules."""
    openmp: Literal["auto", "libgomp", "libiomp5"] = "auto"
    """The OpenMP runtime to plan for; auto: the profile's, else the one that this Python loads."""
    oversubscribe: bool = False
    """Whether ppn may exceed the cores, which workers then share: a trial, no measure of speed."""
    share: bool = False
    """Whether cores of running processes that other plans have bound are left to them."""
    balance: Literal["equal", "batch"] = "equal"
    """batch: workers of a host get their images in proportion to their cores, batch.local on average."""
