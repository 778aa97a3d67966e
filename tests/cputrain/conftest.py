"""Fixtures of several files: a folder to train in, a Slurm cluster, a process group, a checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import CORES
from tests.support.images import write_images
from tests.support.slurm_cluster import Slurm, slurm_cluster


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with images/ of three classes: 27 to train on, 21 for validation."""
    write_images(tmp_path / "images", train=9, val=7)
    return tmp_path


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two hosts, each with this machine's cores."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), CORES) as cluster:
        yield cluster


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone; from some random weights, trainings diverge, and NaN equals nothing."""
    import torch
    from torch._C._distributed_c10d import HashStore

    torch.manual_seed(1)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def saved(group: None, tmp_path: Path) -> Path:
    """The only checkpoint of a training, with the rounding errors of bf16 gradients."""
    from tests.support.checkpoint_files import TrainProgress, network, state_of, train, written

    state = state_of(network(), bf16=True)
    train(state)
    return written(tmp_path / "checkpoints", state, TrainProgress(step=7, best_score=50.0))
