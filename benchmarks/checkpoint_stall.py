"""Cost of checkpoints during a training: ResNet-50 with momentum, saved in the background, on this machine.

    python -m benchmarks.checkpoint_stall [--rounds 5] [--seconds 30] [--every 10] [--batch 8] [--folder DIR]
    cputrain launch --ppn 2 -- python -m benchmarks.checkpoint_stall          # with the workers of a real training

In each round the same training runs for --seconds without checkpoints, and for --seconds with one every --every
seconds; the order alternates. A checkpoint's stall is the extra time of the steps with checkpoints, including the calls
that start them, divided by the number of checkpoints. Its share assumes one checkpoint in five minutes, the default.
Also prints the time of checksums, of reading and verifying, and of a synchronous torch.save of the same state. The CPU
time of other processes shows how reliable a run is.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from cputrain.checkpoint.files import checkpoint_name
from cputrain.checkpoint.writer import CheckpointWriter
from cputrain.checksums import crc32c_of_file
from cputrain.comm.store import SignedKeys
from cputrain.manifest import Manifest, NetworkRecord, ScaleRecord, TrainingRecord
from cputrain.models.networks import build_model
from cputrain.optim import build_optimizer, set_lr_and_decay
from cputrain.recipe.schema import CommSection, Recipe
from cputrain.training.core_usage import CoreUsage
from cputrain.training.engine import choose_engine, prepare_model
from cputrain.training.snapshot import TrainProgress, load, take_snapshot
from cputrain.training.state import Learner, TrainState, make_train_state
from cputrain.training.task import sample_losses

INTERVAL_S = 300.0
CLASSES = 1000
Seconds = dict[str, list[float]]


@dataclass(slots=True, kw_only=True)
class Trial:
    """A training and its checkpoint folder; `step` counts its steps."""

    state: TrainState
    writer: CheckpointWriter
    images: Tensor
    labels: Tensor
    step: int = 0
    calls_s: list[float] = field(default_factory=list)

    def train(self, seconds: float, every_s: float | None) -> tuple[float, int]:
        """Train for a time, with periodic checkpoints; return seconds and steps. All ranks make the same steps."""
        begun, steps, saved = time.perf_counter(), 0, 0
        while (at := self._common(time.perf_counter() - begun)) < seconds:
            if every_s is not None and at >= saved * every_s:
                saved += 1
                self._save()
            self.state.ddp(self.images, self.labels, 0.0)[1].mean().backward()
            self.state.optimizer.step()
            self.state.optimizer.zero_grad()
            self.step += 1
            steps += 1
        return time.perf_counter() - begun, steps

    def _common(self, seconds: float) -> float:
        """Return rank 0's clock, broadcast to all ranks."""
        if dist.get_world_size() == 1:
            return seconds
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.broadcast(value, src=0)
        return float(value)

    def _save(self) -> None:
        begun = time.perf_counter()
        self.writer.wait()
        snapshot = take_snapshot(self.state, dist.get_rank(), "momentum")
        content = None
        if snapshot.optimizer is not None:
            content = manifest_of(self.step, snapshot.optimizer).model_dump(mode="json")
        self.writer.begin(self.step, snapshot.files, TrainProgress(step=self.step).metadata(), content)
        self.calls_s.append(time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration with and without checkpoints")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between checkpoints")
    parser.add_argument("--batch", type=int, default=8, help="images per step and worker")
    parser.add_argument("--folder", type=Path, help="on the file system to measure  [default: a temporary folder]")
    options = parser.parse_args()
    store: Store
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
    else:
        store = HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folders = [scratch]
        dist.broadcast_object_list(folders, src=0)
        trial = made_trial(Path(folders[0]), store, options.batch)
        found = measure(trial, options.rounds, options.seconds, options.every)
        dist.barrier()
        if dist.get_rank() == 0:
            found |= beside(trial, Path(folders[0]))
            show(found, options)
        dist.barrier()
    dist.destroy_process_group()


def made_trial(folder: Path, store: Store, batch: int) -> Trial:
    """Build ResNet-50 with momentum in DDP, as a training does."""
    recipe = Recipe(comm=CommSection(bucket_mib=25.0))
    engine = choose_engine(recipe.engine, recipe.precision, os.environ)
    network = prepare_model(build_model(recipe.model, CLASSES, 224), engine, recipe.precision)
    optimizer = build_optimizer(network, recipe.optim)
    set_lr_and_decay(optimizer, 0.01, 5e-5)
    writer = CheckpointWriter(
        folder=folder,
        keys=SignedKeys(store, ""),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        keep=2,
    )
    images = torch.randn(batch, 3, 224, 224).to(memory_format=torch.channels_last)
    return Trial(
        state=make_train_state(Learner(network, partial(sample_losses, "cross_entropy")), optimizer, recipe.comm),
        writer=writer,
        images=images,
        labels=torch.randint(CLASSES, (batch,)),
    )


def measure(trial: Trial, rounds: int, seconds: float, every_s: float) -> Seconds:
    """Return seconds by activity, one value per round."""
    trial.train(seconds / 4, None)  # a warm-up
    found: Seconds = {}
    usage = CoreUsage(os.sched_getaffinity(0))
    for number in range(rounds):
        took: dict[float | None, float] = {}
        count = 0
        for every in (None, every_s) if number % 2 == 0 else (every_s, None):
            before = len(trial.calls_s)
            spent, steps = trial.train(seconds, every)
            trial.writer.wait()
            took[every] = spent / steps
            if every is not None:
                count, steps_with = len(trial.calls_s) - before, steps
        found.setdefault("step alone", []).append(took[None])
        found.setdefault(f"step with a checkpoint every {every_s:g} s", []).append(took[every_s])
        found.setdefault("stall of a checkpoint", []).append((took[every_s] - took[None]) * steps_with / count)
    found["the call in it"] = trial.calls_s
    found["others' share of the CPU time"] = [usage.since_restart().others]
    return found


def beside(trial: Trial, folder: Path) -> Seconds:
    """Time the parts of a checkpoint on rank 0, without a training."""
    path = folder / checkpoint_name(trial.step)
    if not path.is_dir():
        path = max(folder.glob("step-*"))
    repeated: dict[str, Callable[[], Any]] = {
        "checksums of the files": lambda: [crc32c_of_file(file) for file in path.iterdir()],
        "reading and verifying": lambda: load(path, 0, dist.get_world_size()),
        "torch.save, synchronous": lambda: plain_save(trial.state, folder / "plain.pt"),
    }
    return {name: [timed_s(action) for _ in range(5)] for name, action in repeated.items()}


def manifest_of(step: int, optimizer: Any) -> Manifest:
    """Build the manifest of a checkpoint as a training does."""
    training = TrainingRecord(
        epoch_done=False,
        own_statistics=True,
        best_score=None,
        bucket_mib=25.0,
        first_loss=None,
        diverged=False,
        rollbacks={},
        optimizer=optimizer,
    )
    half = (0.5, 0.5, 0.5)
    network = NetworkRecord(model={}, classes=(), features=None, crop=224, resize=256, mean=half, std=half)
    scale = ScaleRecord(workers=dist.get_world_size(), global_batch=1, train_images=1, classes=CLASSES)
    return Manifest(cputrain="0", step=step, network=network, scale=scale, training=training, recipe={}, files={})


def plain_save(state: TrainState, path: Path) -> None:
    """Save as most scripts do, followed by fsync, without which only the page cache would be timed."""
    with path.open("wb") as file:
        torch.save({"model": state.network.state_dict(), "optimizer": state.optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def timed_s(action: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def show(found: Seconds, options: argparse.Namespace) -> None:
    """Print medians and ranges, and the stall as a share of the interval between two checkpoints."""
    workers = dist.get_world_size()
    print(
        f"ResNet-50 with momentum, 205 MB, {workers} x {options.batch} images, {torch.get_num_threads()} threads each"
    )
    others = found.pop("others' share of the CPU time")[0]
    print("| what | s, median (range) |\n|---|---|")
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f}) |")
    for name in ("stall of a checkpoint", "torch.save, synchronous"):
        print(f"{name}: {100 * statistics.median(found[name]) / INTERVAL_S:.2f} % of {INTERVAL_S:.0f} s")
    print(f"other processes: {others:.0%} of the CPU time")


if __name__ == "__main__":
    main()
