"""The state of a training: a network, its optimizer, and the moving average of its weights."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from affinity.units import MIB
from cputrain.comm.bucket_sizes import bucket_bytes
from cputrain.comm.buckets import measure_alpha_beta
from cputrain.comm.hooks import HOOKS, AllReduceHook
from cputrain.recipe.schema import CommSection, Recipe
from cputrain.torch_releases import SYNC_BUFFERS


@dataclass(slots=True, kw_only=True)
class TrainState:
    """A network and its DDP wrapper, the optimizer, and an exponential moving average of the weights or None.

    `all_reduce` is DDP's communication hook, `bucket_mib` the size of its gradient buckets.
    """

    network: nn.Module
    ddp: DistributedDataParallel
    optimizer: Optimizer
    all_reduce: AllReduceHook
    bucket_mib: float
    ema_model: nn.Module | None

    def eval_model(self) -> nn.Module:
        """The model to evaluate: the EMA model if there is one, with the network's batch-norm statistics."""
        if self.ema_model is None:
            return self.network
        for averaged, current in zip(self.ema_model.buffers(), self.network.buffers(), strict=True):
            averaged.copy_(current)
        return self.ema_model

    @torch.no_grad()
    def update_ema(self, decay: float | None) -> None:
        """Update the EMA model, if there is one: w_ema = decay w_ema + (1 - decay) w."""
        if self.ema_model is not None and decay is not None:
            torch._foreach_lerp_(list(self.ema_model.parameters()), list(self.network.parameters()), 1 - decay)


def make_train_state(
    recipe: Recipe,
    network: nn.Module,
    optimizer: Optimizer,
    bucket_mib: float | None = None,
    all_reduce: AllReduceHook | None = None,
) -> TrainState:
    """Wrap a network in DDP, which sends rank 0's weights to all ranks; gradient buckets of `bucket_mib`, and their
    all-reduce, are as given or as the recipe requests.

    Each rank keeps batch-norm statistics of its own, until `average_batchnorm`.
    """
    bucket_mib = bucket_mib or _bucket_mib(recipe.comm, network)
    keep_buffers: dict[str, Any] = {SYNC_BUFFERS: False}
    ddp = DistributedDataParallel(network, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib, **keep_buffers)
    all_reduce = all_reduce or HOOKS[recipe.comm.compression]()
    ddp.register_comm_hook(None, all_reduce.hook)
    ema_model = deepcopy(network).requires_grad_(False) if recipe.ema_decay is not None else None
    return TrainState(
        network=network,
        ddp=ddp,
        optimizer=optimizer,
        all_reduce=all_reduce,
        bucket_mib=bucket_mib,
        ema_model=ema_model,
    )


def _bucket_mib(comm: CommSection, network: nn.Module) -> float:
    """MiB of a gradient bucket: the recipe's, or the best one for measured all-reduce times."""
    if comm.bucket_mib != "auto":
        return comm.bucket_mib
    gradients = sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad)
    return bucket_bytes(gradients, *measure_alpha_beta()) / MIB
