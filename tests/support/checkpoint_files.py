"""Checkpoints of a small network, written as by rank 0 of a training."""

import math
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from cputrain.checkpoint.files import checkpoint_name
from cputrain.checkpoint.writer import WRITTEN_S, CheckpointWriter
from cputrain.comm.hooks import AllReduceHook, Bf16AllReduceHook
from cputrain.comm.store import SignedKeys
from cputrain.manifest import Manifest, NetworkRecord, ScaleRecord, TrainingRecord
from cputrain.optim import build_optimizer, set_lr_and_decay
from cputrain.optim_settings import OptimSettings
from cputrain.training.snapshot import TrainProgress, take_snapshot
from cputrain.training.state import Learner, TrainState
from cputrain.training.task import sample_losses


def network(outputs: int = 2) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(4, outputs))
    return layers.to(memory_format=torch.channels_last)


def state_of(model: nn.Module, optimizer: str = "momentum", *, bf16: bool = False, ema: bool = False) -> TrainState:
    return TrainState(
        learner=Learner(model, partial(sample_losses, "cross_entropy")),
        ddp=model,
        optimizer=build_optimizer(model, OptimSettings(name=optimizer)),
        all_reduce=Bf16AllReduceHook() if bf16 else AllReduceHook(),
        bucket_mib=25.0,
        averages={name: weight.detach().clone() for name, weight in model.named_parameters()} if ema else None,
        ema_decay=0.5,
    )


def train(state: TrainState, steps: int = 3) -> None:
    set_lr_and_decay(state.optimizer, 0.1, 1e-3)
    for _ in range(steps):
        state.optimizer.zero_grad()
        state.network(torch.randn(4, 3, 3, 3)).square().sum().backward()
        state.optimizer.step()
        state.update_ema()


def written(
    folder: Path,
    state: TrainState,
    progress: TrainProgress,
    optimizer: str = "momentum",
    keep: int = 2,
    store: dist.Store | None = None,
    world_size: int = 1,
    limit_s: float = WRITTEN_S,
) -> Path:
    """Write a checkpoint to this folder, as rank 0 of a training does."""
    writer = CheckpointWriter(
        folder=folder,
        keys=SignedKeys(store or HashStore(), "token"),
        rank=0,
        world_size=world_size,
        keep=keep,
        limit_s=limit_s,
    )
    snapshot = take_snapshot(state, 0, optimizer)
    assert snapshot.optimizer is not None
    manifest = Manifest(
        cputrain="0",
        step=progress.step,
        network=NetworkRecord(
            model={}, classes=("a", "b"), features=None, crop=3, resize=3, mean=(0.5, 0.5, 0.5), std=(1.0, 1.0, 1.0)
        ),
        scale=ScaleRecord(workers=1, global_batch=4, train_images=12, classes=2),
        training=TrainingRecord(
            epoch_done=progress.epoch_done,
            own_statistics=True,
            best_score=None if math.isnan(progress.best_score) else progress.best_score,
            bucket_mib=25.0,
            first_loss=progress.first_loss,
            diverged=progress.diverged,
            rollbacks=progress.rollbacks,
            optimizer=snapshot.optimizer,
        ),
        recipe={},
        files={},
    )
    writer.begin(progress.step, snapshot.files, progress.metadata(), manifest.model_dump(mode="json"))
    writer.wait()
    return folder / checkpoint_name(progress.step)
