"""The training loop: every rank its share of each global batch, gradients averaged by DDP while they are computed."""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from inspect import signature
from random import Random
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from affinity.errors import InputError, RunError
from cputrain.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from cputrain.comm.buckets import bucket_bytes, measure_alpha_beta
from cputrain.comm.group import gather, total
from cputrain.comm.hooks import HOOKS, CommClock
from cputrain.data.augment import augment, changes
from cputrain.data.blocks import BlockReader, block_order
from cputrain.data.decode import Pixels
from cputrain.data.loader import Batch, batches
from cputrain.data.order import epoch_order, rank_share, sample_generator
from cputrain.data.shards import Shards
from cputrain.data.views import Look, plain_look, training_look
from cputrain.engine import prepare_model
from cputrain.evaluate import Accuracy, average_batchnorm, evaluate, in_top
from cputrain.events import Events
from cputrain.models.build import build_model
from cputrain.notice import Notice
from cputrain.optim.build import build_optimizer, set_rate
from cputrain.optim.schedules import rate_at
from cputrain.progress import Progress
from cputrain.recipe import CommSection
from cputrain.run_folder import CHECKPOINTS
from cputrain.session import Session

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


@dataclass(slots=True, kw_only=True)
class Training:
    """All that changes while training; `step` counts the updates done."""

    session: Session
    network: nn.Module
    model: DistributedDataParallel
    optimizer: Optimizer
    clock: CommClock
    progress: Progress
    events: Events | None
    notice: Notice
    step: int
    best_top1: float
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a training ended: `trained_s` counts updates only, `total_s` also evaluations and checkpoints.

    `accuracy` is None where a notice has stopped it.
    """

    accuracy: Accuracy | None
    step: int
    trained_s: float
    total_s: float


def train(session: Session, events: Events | None, *, resume: bool) -> Outcome:
    """Train as the recipe says. `events` is rank 0's alone.

    Raises RunError when the loss is no longer finite, or at a damaged image where the recipe wants that.
    """
    recipe, numbers = session.recipe, session.numbers
    last_step = min(numbers.total_steps, recipe.max_steps or numbers.total_steps)
    training = _start(session, events, last_step, resume=resume)
    gc.freeze()  # what the libraries have made stays: looking through it again and again takes the loader's time
    started, trained_s, accuracy = time.perf_counter(), 0.0, None
    for epoch in range(training.step // numbers.steps_per_epoch, recipe.epochs):
        if training.step >= last_step:
            break
        epoch_started, first = time.perf_counter(), training.step
        sums = _train_epoch(training, epoch, min(last_step, (epoch + 1) * numbers.steps_per_epoch))
        seconds = time.perf_counter() - epoch_started
        trained_s += seconds
        average_batchnorm(training.network)
        if training.stopped:
            if session.leads:
                _save(training, best=False)
            dist.barrier()
            break
        ends = training.step >= last_step
        accuracy = evaluate(training.network, session) if ends or due(epoch, recipe.evaluate.every_epochs) else None
        _report_epoch(
            training, epoch, sums, accuracy, seconds, numbers.images_until(training.step) - numbers.images_until(first)
        )
        better = accuracy is not None and not accuracy.top1 <= training.best_top1
        if accuracy is not None and better:
            training.best_top1 = accuracy.top1
        if session.leads and (ends or better or due(epoch, recipe.checkpoint.every_epochs)):
            _save(training, best=better)
        dist.barrier()  # nobody runs ahead of rank 0's writing
    training.progress.close()
    if training.stopped:
        accuracy = None
    elif accuracy is None:  # resumed where nothing was left to do
        accuracy = evaluate(training.network, session)
    return Outcome(accuracy=accuracy, step=training.step, trained_s=trained_s, total_s=time.perf_counter() - started)


def due(epoch: int, every: int | None) -> bool:
    """Whether something that happens after every so many epochs happens after this one (counted from 0)."""
    return every is not None and (epoch + 1) % every == 0


def _start(session: Session, events: Events | None, last_step: int, *, resume: bool) -> Training:
    recipe, numbers = session.recipe, session.numbers
    network = prepare_model(build_model(recipe.model, len(session.dataset.classes)), recipe.engine)
    optimizer = build_optimizer(network, recipe.optim)
    saved = list_checkpoints(recipe.folder / CHECKPOINTS) if resume else []
    done: dict[str, Any] = load_checkpoint(saved[-1], network, optimizer) if saved else {"step": 0, "top1": math.nan}
    if len(set(gather(done["step"]))) > 1:
        raise InputError(
            f"--resume: ranks find different checkpoints in {recipe.folder}: put it where all hosts see it"
        )
    # DDP sends rank 0's weights to all. Running statistics stay each rank's own until they are averaged to evaluate.
    keep_buffers: dict[str, Any] = {SYNC_BUFFERS: False}
    model = DistributedDataParallel(
        network, gradient_as_bucket_view=True, bucket_cap_mb=_bucket_mb(recipe.comm, network), **keep_buffers
    )
    clock = HOOKS[recipe.comm.compression]()
    model.register_comm_hook(None, clock.hook)
    return Training(
        session=session,
        network=network,
        model=model,
        optimizer=optimizer,
        clock=clock,
        progress=Progress(numbers.images_until(done["step"]), numbers.images_until(last_step), shown=session.leads),
        events=events,
        notice=Notice(session.group.store, leads=session.leads),
        step=done["step"],
        best_top1=done["top1"],
    )


def _bucket_mb(comm: CommSection, network: nn.Module) -> float:
    """MiB of a bucket of gradients; measured where the recipe leaves it open."""
    if comm.bucket_mb != "auto":
        return comm.bucket_mb
    gradients = sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad)
    return bucket_bytes(gradients, *measure_alpha_beta()) / (1 << 20)


def _train_epoch(training: Training, epoch: int, stop: int) -> Sums:
    """Update until step `stop`, all of it inside one epoch's permutation, or until a notice."""
    recipe, numbers = training.session.recipe, training.session.numbers
    loaded = _batches(training.session, epoch, training.step, stop)
    sums = Sums()
    while training.step < stop:
        started = time.perf_counter()
        rate = rate_at(training.step, recipe.schedule, numbers)
        loss, data_wait_s, comm_wait_s = _update(training, loaded, rate, sums)
        images = numbers.images_until(training.step + 1) - numbers.images_until(training.step)
        training.step += 1
        seconds = time.perf_counter() - started
        training.progress.step(f"epoch {epoch + 1}/{recipe.epochs}", images, loss=loss, rate=rate)
        if training.events:
            training.events.write(
                "step",
                step=training.step,
                epoch=training.step / numbers.steps_per_epoch,
                loss=loss,
                rate=rate,
                images_per_s=images / seconds,
                data_wait_s=data_wait_s,
                comm_wait_s=comm_wait_s,
            )
        if training.notice.is_last(training.step) and training.step < stop:
            training.stopped = True
            break
    return sums


def _update(training: Training, loaded: Iterator[Batch], rate: float, sums: Sums) -> tuple[float, float, float]:
    """One optimizer update; returns this rank's loss and its seconds of waiting for images and for gradients."""
    recipe, rank, numbers = training.session.recipe, training.session.rank.rank, training.session.numbers
    passes = recipe.batch.accumulation
    images = numbers.images_until(training.step + 1) - numbers.images_until(training.step)
    loss, data_wait_s, comm_wait_s = 0.0, 0.0, 0.0
    for number in range(passes):
        asked = time.perf_counter()
        batch = next(loaded)
        data_wait_s += time.perf_counter() - asked
        if batch.damaged and recipe.data.on_error == "raise":
            raise RunError(f"rank {rank}: {batch.damaged[0]}: mend it, take it out, or set data.on_error=skip")
        with nullcontext() if number == passes - 1 else training.model.no_sync():
            logits = training.model(training.session.normalize(batch.images))
            losses = functional.cross_entropy(logits, batch.labels, reduction="none") * batch.weights
            # Divided by the mean of the ranks' images in this step: after DDP's averaging every image weighs the same,
            # whatever its rank's batch; a damaged one adds nothing.
            share = losses.sum() / (images / training.session.rank.world_size)
            share.backward()  # type: ignore[no-untyped-call]
        comm_wait_s = time.perf_counter() - training.clock.last_ready_s
        loss += float(losses.detach().sum()) / (len(batch.labels) * passes)
        sums.loss += float(losses.detach().sum())
        sums.hits += float((in_top(logits.detach(), batch.labels, 1) * batch.weights).sum())
        sums.images += float(batch.weights.sum())
        sums.damaged += batch.damaged
    if not math.isfinite(loss):
        raise RunError(f"rank {rank}: loss {loss} at step {training.step}, learning rate {rate:g}: lower the peak rate")
    set_rate(training.optimizer, rate)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return loss, data_wait_s, comm_wait_s


def _batches(session: Session, epoch: int, first: int, stop: int) -> Iterator[Batch]:
    """This rank's batches for the updates from `first` to before `stop`, which lie in one epoch."""
    recipe, numbers, rank = session.recipe, session.numbers, session.rank
    data, seed = recipe.data, recipe.seed
    images, steps = session.dataset.train, numbers.steps_per_epoch
    length = session.block_length
    if length:
        order = block_order(len(images), seed, epoch, length=length, used=numbers.used, steps=steps)
    else:
        order = epoch_order(len(images), seed, epoch)[: numbers.used]
    shares = [rank_share(order, step % steps, steps, session.batches, rank.rank) for step in range(first, stop)]
    if length and isinstance(images, Shards):
        images = BlockReader(images, length, np.concatenate(shares))

    def look(image: int) -> Look:
        def draw() -> Random:
            return sample_generator(seed, epoch, image)

        if data.part == "plain":
            return plain_look(data.short_side, data.crop, draw, flip=data.flip)
        return training_look(data.crop, draw, min_area=data.min_area, max_aspect=data.max_aspect, flip=data.flip)

    def decode(encoded: Sequence[bytes], numbers: Sequence[int], places: Pixels) -> list[str | None]:
        problems = session.decode(encoded, [look(image) for image in numbers], places)
        if changes(data.augment):
            for image, place, problem in zip(numbers, places, problems, strict=True):
                if problem is None:
                    augment(place, data.augment, sample_generator(seed, epoch, image, 1))
        return problems

    return batches(
        images,
        (part for share in shares for part in np.array_split(share, recipe.batch.accumulation)),
        decode,
        crop=data.crop,
        threads=session.loader_threads,
        pus=session.loader_pus,
    )


def _report_epoch(
    training: Training, epoch: int, sums: Sums, accuracy: Accuracy | None, seconds: float, images: int
) -> None:
    """Add up over the ranks, then one line for people and one event for machines."""
    loss, hits, readable, skipped = total(sums.loss, sums.hits, sums.images, len(sums.damaged))
    if skipped or (accuracy and accuracy.images < len(training.session.dataset.val)):
        mine = sums.damaged + list(accuracy.damaged if accuracy else ())
        names = sorted(name for rank_names in gather(mine) for name in rank_names)
        training.progress.line(f"warning: {len(names)} damaged image(s) left out: {'; '.join(names[:3])}")
        if training.events:
            training.events.write("warning", step=training.step, what="damaged images", images=names)
    train_loss, train_top1 = loss / max(readable, 1.0), 100 * hits / max(readable, 1.0)
    val = "" if accuracy is None else f"  val loss {accuracy.loss:.4f}  val acc {accuracy.top1:.2f}"
    training.progress.line(
        f"epoch {epoch + 1}/{training.session.recipe.epochs}  loss {train_loss:.4f}  acc {train_top1:.2f}{val}"
        f"  {seconds:.1f} s  ({images / seconds:.1f} img/s)"
    )
    if training.events:
        training.events.write(
            "epoch",
            step=training.step,
            epoch=epoch + 1,
            train_loss=train_loss,
            train_top1=train_top1,
            val_loss=accuracy.loss if accuracy else None,
            val_top1=accuracy.top1 if accuracy else None,
            val_top5=accuracy.top5 if accuracy else None,
            seconds=seconds,
            images_per_s=images / seconds,
        )


def _save(training: Training, *, best: bool) -> None:
    recipe, epoch = training.session.recipe, training.step / training.session.numbers.steps_per_epoch
    path = save_checkpoint(
        recipe.folder / CHECKPOINTS,
        training.network,
        training.optimizer,
        step=training.step,
        top1=training.best_top1,
        keep=recipe.checkpoint.keep,
        best=best,
    )
    if training.events:
        training.events.write("checkpoint", step=training.step, epoch=epoch, path=str(path), best=best)
