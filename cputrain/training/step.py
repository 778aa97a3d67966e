"""A network and its optimizer, and one update of them."""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from affinity.errors import RunError
from cputrain.comm.buckets import bucket_bytes, measure_alpha_beta
from cputrain.comm.hooks import HOOKS, CommClock
from cputrain.data.loader import Batch
from cputrain.optim.build import set_rate
from cputrain.optim.ratios import layer_ratios
from cputrain.recipe.schema import CommSection
from cputrain.training.engine import computing, network_input
from cputrain.training.evaluation import hits
from cputrain.training.losses import losses_of
from cputrain.training.session import Session

# The name of DDP's switch for sending rank 0's buffers before every forward pass changed in torch 2.13.
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


@dataclass(slots=True)
class Sums:
    """What one rank adds up over an epoch."""

    loss: float = 0.0
    hits: float = 0.0
    images: float = 0.0
    damaged: list[str] = field(default_factory=list)

    def add(self, other: "Sums") -> None:
        """Take another's numbers in; its damaged images are not among them."""
        self.loss += other.loss
        self.hits += other.hits
        self.images += other.images


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What came of an update: this rank's loss and its seconds of waiting for images and for gradients.

    `finite` is the same on all ranks; where it is False nothing has been updated, and `lost` is where this rank's
    numbers ended, "" where it has lost none. `ratios` are the layers' norms where they were asked for.
    """

    loss: float
    data_wait_s: float
    comm_wait_s: float
    finite: bool
    lost: str
    ratios: list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Learner:
    """A network, alone and as DDP has it, its optimizer, and the mean of its weights where one is kept."""

    network: nn.Module
    model: DistributedDataParallel
    optimizer: Optimizer
    clock: CommClock
    mean: nn.Module | None

    def judged(self) -> nn.Module:
        """The network that is evaluated: the mean where there is one, given the network's batch-norm statistics."""
        if self.mean is None:
            return self.network
        for kept, now in zip(self.mean.buffers(), self.network.buffers(), strict=True):
            kept.copy_(now)
        return self.mean

    @torch.no_grad()
    def follow(self, decay: float | None) -> None:
        """Move the mean of the weights, where one is kept, towards the weights as they are now."""
        if self.mean is not None and decay is not None:
            torch._foreach_lerp_(list(self.mean.parameters()), list(self.network.parameters()), 1 - decay)


def make_learner(session: Session, network: nn.Module, optimizer: Optimizer) -> Learner:
    """Rank 0's weights go to all ranks. Running statistics stay each rank's own until they are averaged."""
    recipe = session.recipe
    keep_buffers: dict[str, Any] = {SYNC_BUFFERS: False}
    model = DistributedDataParallel(
        network, gradient_as_bucket_view=True, bucket_cap_mb=_bucket_mb(recipe.comm, network), **keep_buffers
    )
    clock = HOOKS[recipe.comm.compression]()
    model.register_comm_hook(None, clock.hook)
    mean = deepcopy(network).requires_grad_(False) if recipe.ema_decay is not None else None
    return Learner(network=network, model=model, optimizer=optimizer, clock=clock, mean=mean)


def _bucket_mb(comm: CommSection, network: nn.Module) -> float:
    """MiB of a bucket of gradients; measured where the recipe leaves it open."""
    if comm.bucket_mib != "auto":
        return comm.bucket_mib
    gradients = sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad)
    return bucket_bytes(gradients, *measure_alpha_beta()) / (1 << 20)


@dataclass(slots=True)
class _Passes:
    """What the backward passes of an update come to: seconds of waiting, images of all, `inputs` of the last one."""

    data_wait_s: float = 0.0
    comm_wait_s: float = 0.0
    images: int = 0
    sums: Sums = field(default_factory=Sums)
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def loss(self) -> float:
        """The mean over this rank's images."""
        return self.sums.loss / self.images


def update(
    learner: Learner, session: Session, loaded: Iterator[Batch], sums: Sums, *, step: int, rate: float, decay: float
) -> Step:
    """One optimizer update with the next batches. Raises RunError at a damaged image where the recipe wants that."""
    recipe, network, optimizer = session.recipe, learner.network, learner.optimizer
    buffers = [buffer.clone() for buffer in network.buffers()] if recipe.on_nan == "skip" else []
    done = _backward(learner, session, loaded, step)
    sums.damaged += done.sums.damaged
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    norm = float(torch.stack(torch._foreach_norm(gradients)).double().norm())
    finite, lost, ratios = math.isfinite(norm), "", []
    set_rate(optimizer, rate, decay)
    if finite:
        sums.add(done.sums)
        if recipe.optim.clip_norm is not None and norm > recipe.optim.clip_norm:
            torch._foreach_mul_(gradients, recipe.optim.clip_norm / norm)
        if session.leads and recipe.log_norms_every_steps and (step + 1) % recipe.log_norms_every_steps == 0:
            ratios = layer_ratios(network, optimizer)
        optimizer.step()
        learner.follow(recipe.ema_decay)
    else:
        with computing(recipe.precision):
            lost = _lost(network, done.inputs, done.loss)
        learner.clock.forget()
        for kept, now in zip(buffers, network.buffers(), strict=False):  # none are kept where none are wanted
            now.copy_(kept)
    optimizer.zero_grad()
    return Step(
        loss=done.loss,
        data_wait_s=done.data_wait_s,
        comm_wait_s=done.comm_wait_s,
        finite=finite,
        lost=lost,
        ratios=ratios,
    )


def _backward(learner: Learner, session: Session, loaded: Iterator[Batch], step: int) -> _Passes:
    """The gradients of the next batches, averaged over the ranks; a loss that is no number makes them none, for all."""
    recipe, numbers = session.recipe, session.numbers
    passes, images = numbers.accumulation_steps, numbers.images_until(step + 1) - numbers.images_until(step)
    done = _Passes()
    for number in range(passes):
        asked = time.perf_counter()
        batch = next(loaded)
        done.data_wait_s += time.perf_counter() - asked
        if batch.damaged and recipe.data.on_error == "raise":
            raise RunError(
                f"rank {session.rank.rank}: {batch.damaged[0]}: mend it, take it out, or set data.on_error=skip"
            )
        done.inputs = network_input(session.normalize(batch.images), recipe.precision)
        with nullcontext() if number == passes - 1 else learner.model.no_sync():
            with computing(recipe.precision):
                outputs = learner.model(done.inputs)
            losses = losses_of(recipe.loss, outputs, batch.labels, recipe.label_smoothing) * batch.weights
            loss = float(losses.detach().sum())
            # Divided by the mean of the ranks' images in this step: after DDP's averaging every image weighs the same,
            # whatever its rank's batch; a damaged one adds nothing.
            share = losses.sum() / (images / session.rank.world_size)
            (share if math.isfinite(loss) else share * math.nan).backward()  # type: ignore[no-untyped-call]
        done.comm_wait_s = time.perf_counter() - learner.clock.last_ready_s
        done.images += len(batch.labels)
        done.sums.add(Sums(loss, hits(outputs.detach(), batch, 1), float(batch.weights.sum())))
        done.sums.damaged += batch.damaged
    return done


@torch.no_grad()
def _lost(network: nn.Module, inputs: Tensor, loss: float) -> str:
    """The first layer, in the order of their computing, whose output is not all numbers; else what is lost after it."""
    lost: list[str] = []

    def look(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                lost.append(name)

        return hook

    leaves = [(name, module) for name, module in network.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(look(name)) for name, module in leaves]
    try:
        network(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if lost:
        return f", no number first in the output of {lost[0]}"
    return "" if math.isfinite(loss) else ", none in any layer"
