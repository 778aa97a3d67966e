"""What a checkpoint costs a training: ResNet-50 with momentum, saved in the background, on this machine.

    python -m benchmarks.checkpoint_stall [--rounds 5] [--steps 4] [--batch 8] [--folder DIR]

Groups of training steps with and without a checkpoint at their beginning take turns. The stall is the time that the
call keeps the training waiting, plus what the steps beside the writing take longer; its share is that of one checkpoint
in five minutes, the default. Beside it: the time of the checksums, of reading and verifying, and of a synchronous
torch.save of the same state.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

from cputrain.checkpoints.folder import name_of
from cputrain.checkpoints.manifest import Manifest, NetworkRecord, ScaleRecord, TrainingRecord
from cputrain.checkpoints.tensors import file_sum
from cputrain.comm.hooks import AllReduceHook
from cputrain.comm.store import SignedKeys
from cputrain.models.build import build_model
from cputrain.optim.build import build_optimizer, set_lr_and_decay
from cputrain.recipe.schema import ModelSection, OptimSection
from cputrain.training.engine import prepare_model
from cputrain.training.saving.position import Position
from cputrain.training.saving.restore import load
from cputrain.training.saving.snapshot import take_snapshot
from cputrain.training.saving.writer import CheckpointWriter
from cputrain.training.state import TrainState

INTERVAL_S = 300.0
CLASSES = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each group")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="on the file system to measure  [default: a temporary one]")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        show(measure(Path(scratch), options.rounds, options.steps, options.batch))
    dist.destroy_process_group()


def measure(folder: Path, rounds: int, steps: int, batch: int) -> dict[str, list[float]]:
    """Seconds by what takes them, one value for each round."""
    state = made_state()
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(CLASSES, (batch,))
    images = images.to(memory_format=torch.channels_last)
    writer = CheckpointWriter(
        folder=folder,
        keys=SignedKeys(HashStore(), ""),
        rank=0,
        world_size=1,
        keep=2,
        pus=os.sched_getaffinity(0),
    )
    found: dict[str, list[float]] = {}
    trained_s(state, images, labels, 2)
    for number in range(rounds):
        took = {"steps alone": trained_s(state, images, labels, steps)}
        begun = time.perf_counter()
        save(writer, state, number)
        took["the call"] = time.perf_counter() - begun
        took["steps beside the writing"] = trained_s(state, images, labels, steps)
        if writer.busy:
            print(f"round {number + 1}: the writing took longer than {steps} steps: more --steps")
        writer.wait()
        took["stall"] = took["the call"] + took["steps beside the writing"] - took["steps alone"]
        path = folder / name_of(number)
        took["checksums of the files"] = seconds(lambda path=path: [file_sum(file) for file in path.iterdir()])
        took["reading and verifying"] = seconds(lambda path=path: load(path, 0, 1))
        took["torch.save, synchronous"] = seconds(lambda: plain_save(state, folder / "plain.pt"))
        for name, value in took.items():
            found.setdefault(name, []).append(value)
    return found


def made_state() -> TrainState:
    """ResNet-50 with momentum, as a training has them, without DDP."""
    network = prepare_model(build_model(ModelSection(), CLASSES, 224), "native", "float32")
    optimizer = build_optimizer(network, OptimSection())
    set_lr_and_decay(optimizer, 0.01, 5e-5)
    hook = AllReduceHook()
    ddp: nn.Module = network
    return TrainState(
        network=network,
        ddp=ddp,  # type: ignore[arg-type]  only its forward pass is used
        optimizer=optimizer,
        all_reduce=hook,
        bucket_mib=25.0,
        ema_model=None,
    )


def trained_s(state: TrainState, images: Tensor, labels: Tensor, steps: int) -> float:
    """Seconds of so many steps."""

    def train() -> None:
        for _ in range(steps):
            functional.cross_entropy(state.network(images), labels).backward()
            state.optimizer.step()
            state.optimizer.zero_grad()

    return seconds(train)


def save(writer: CheckpointWriter, state: TrainState, step: int) -> None:
    """Begin a checkpoint, as a training does."""
    snapshot = take_snapshot(state, 0, "momentum")
    assert snapshot.optimizer is not None
    training = TrainingRecord(
        epoch_done=False,
        own_statistics=True,
        best_score=None,
        bucket_mib=25.0,
        first_loss=None,
        diverged=False,
        rollbacks={},
        optimizer=snapshot.optimizer,
    )
    half = (0.5, 0.5, 0.5)
    network = NetworkRecord(model={}, classes=(), features=None, crop=224, resize=256, mean=half, std=half)
    scale = ScaleRecord(workers=1, global_batch=1, train_images=1, classes=CLASSES)
    manifest = Manifest(cputrain="0", step=step, network=network, scale=scale, training=training, recipe={}, files={})
    writer.begin(step, snapshot, Position(step=step).metadata(), manifest)


def plain_save(state: TrainState, path: Path) -> None:
    """What most scripts do, and a disk's synchronization, without which the time is the page cache's."""
    with path.open("wb") as file:
        torch.save({"model": state.network.state_dict(), "optimizer": state.optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def seconds(action) -> float:  # type: ignore[no-untyped-def]
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def show(found: dict[str, list[float]]) -> None:
    """Print medians and ranges, and the stall's share of the interval between two checkpoints."""
    print("| ResNet-50 with momentum, 205 MB | s, median (range) |\n|---|---|")
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f}) |")
    for name in ("stall", "torch.save, synchronous"):
        print(f"{name}: {100 * statistics.median(found[name]) / INTERVAL_S:.2f} % of {INTERVAL_S:.0f} s")


if __name__ == "__main__":
    main()
