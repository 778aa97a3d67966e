"""The training loop: every rank its share of each global batch, gradients averaged by DDP while they are computed."""

import gc
import math
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import nn

from affinity.errors import InputError, RunError
from cputrain.comm.group import gather, on_rank_0, total
from cputrain.models.build import build_model
from cputrain.models.weights import start_from
from cputrain.optim.build import build_optimizer
from cputrain.optim.schedules import lr_at
from cputrain.recipe.phases import settings_at
from cputrain.recipe.rates import rate_warning
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import Events
from cputrain.runs.folder import CHECKPOINTS, list_checkpoints
from cputrain.training.checkpoint import Progressed, load_checkpoint, save_checkpoint
from cputrain.training.engine import bf16_speedup, prepare_model
from cputrain.training.evaluation import Accuracy, average_batchnorm, evaluate
from cputrain.training.feed import training_batches
from cputrain.training.preemption import Notice
from cputrain.training.progress import Progress
from cputrain.training.session import Session
from cputrain.training.step import Learner, Step, Sums, make_learner, update

EXPLODED = 10  # times the first loss
MOST_ROLLBACKS = 3  # to one checkpoint


@dataclass(slots=True, kw_only=True)
class Training:
    """All that changes while training; `step` counts the updates done, `best_top1` is the best Accuracy.score."""

    session: Session
    learner: Learner
    progress: Progress
    events: Events | None
    notice: Notice
    step: int
    best_top1: float
    stopped: bool = False
    first_loss: float | None = None
    exploded: bool = False
    rollbacks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a training ended: `trained_s` counts the updates since its start only; `accuracy` is None where a notice has
    stopped it, `test` also where the data has no test images. `ended` is when it did, in unix seconds, before the test
    images were evaluated.
    """

    accuracy: Accuracy | None
    test: Accuracy | None
    step: int
    trained_s: float
    ended: float


def train(training: Training) -> Outcome:
    """Train as the recipe says.

    Raises RunError when the loss is no longer finite, or at a damaged image where the recipe wants that.
    """
    session = training.session
    if warning := rate_warning(session.recipe, global_batch=session.numbers.global_batch):
        _warn(training, warning)
    if session.recipe.precision == "bf16" and session.leads and (speedup := bf16_speedup()) < 1:
        _warn(training, f"a convolution takes {1 / speedup:.1f} times longer in bf16 than in float32 on this CPU")
    gc.freeze()  # what the libraries have made stays: looking through it again and again takes the loader's time
    with closing(training.progress):
        accuracy, trained_s = _train_epochs(training, session.numbers.last_step(session.recipe.max_steps))
    if training.stopped:
        accuracy = None
    elif accuracy is None:  # resumed where nothing was left to do
        accuracy = evaluate(training.learner.judged(), session)
    ended = time.time()
    test = _evaluate_test(training) if accuracy is not None and session.dataset.test is not None else None
    return Outcome(accuracy=accuracy, test=test, step=training.step, trained_s=trained_s, ended=ended)


def _evaluate_test(training: Training) -> Accuracy:
    """The test images are looked at this once, with the last weights: nothing has been chosen by them."""
    accuracy = evaluate(training.learner.judged(), training.session, "test")
    names = sorted(name for rank_names in gather(accuracy.damaged) for name in rank_names)
    if names:
        _warn_of_damaged(training, names)
    return accuracy


def _train_epochs(training: Training, last_step: int) -> tuple[Accuracy | None, float]:
    """Train to the last step or a notice; the last evaluation, and the seconds of updates."""
    session, recipe, numbers = training.session, training.session.recipe, training.session.numbers
    trained_s, accuracy = 0.0, None
    for epoch in range(training.step // numbers.steps_per_epoch, recipe.epochs):
        if training.step >= last_step:
            break
        epoch_started, first = time.perf_counter(), training.step
        sums = _train_epoch(training, epoch, min(last_step, (epoch + 1) * numbers.steps_per_epoch))
        seconds = time.perf_counter() - epoch_started
        trained_s += seconds
        average_batchnorm(training.learner.network)
        if training.stopped:
            if session.leads:
                _save(training, best=False)
            dist.barrier()
            break
        ends = training.step >= last_step
        accuracy = (
            evaluate(training.learner.judged(), session) if ends or due(epoch, recipe.evaluate.every_epochs) else None
        )
        _report_epoch(
            training, epoch, sums, accuracy, seconds, numbers.images_until(training.step) - numbers.images_until(first)
        )
        better = accuracy is not None and accuracy.images > 0 and not accuracy.score <= training.best_top1
        if accuracy is not None and better:
            training.best_top1 = accuracy.score
        training.stopped = not ends and training.notice.is_last(training.step)
        if session.leads and (ends or better or training.stopped or due(epoch, recipe.checkpoint.every_epochs)):
            _save(training, best=better)
        dist.barrier()  # nobody runs ahead of rank 0's writing
        if training.stopped:
            break
    return accuracy, trained_s


def due(epoch: int, every: int | None) -> bool:
    """Whether something that happens after every so many epochs happens after this one (counted from 0)."""
    return every is not None and (epoch + 1) % every == 0


def begin(session: Session, events: Events | None, *, resume: bool) -> Training:
    """The network and all that changes with it, from the run's last checkpoint or anew. `events` is rank 0's alone."""
    recipe, numbers = session.recipe, session.numbers
    saved = list_checkpoints(recipe.folder / CHECKPOINTS) if resume else []
    network = build_model(recipe.model, len(session.dataset.classes), recipe.data.crop, session.features)
    if recipe.model.weights is not None and not saved:
        _start_from(network, Path(recipe.model.weights), session)
    prepare_model(network, recipe.engine, recipe.precision)
    learner = make_learner(session, network, build_optimizer(network, recipe.optim))
    done = load_checkpoint(saved[-1], learner) if saved else Progressed(step=0, top1=math.nan)
    if len(set(gather(done.step))) > 1:
        raise InputError(
            f"--resume: ranks find different checkpoints in {recipe.folder}: put it where all hosts see it"
        )
    last_step = numbers.last_step(recipe.max_steps)
    return Training(
        session=session,
        learner=learner,
        progress=Progress(
            numbers.images_until(done.step),
            numbers.images_until(last_step),
            unit="points" if recipe.data.unit == "points" else "img",
            shown=session.leads,
        ),
        events=events,
        notice=Notice(session.group.store, leads=session.leads),
        step=done.step,
        best_top1=done.top1,
    )


def _start_from(network: nn.Module, path: Path, session: Session) -> None:
    """Weights of a file, read by rank 0 alone: DDP sends its weights to all."""
    anew = on_rank_0(lambda: start_from(network, path))
    if session.leads:
        told = f"; new: {', '.join(anew)}" if anew else ""
        print(f"weights of {path}{told}", flush=True)


def _train_epoch(training: Training, epoch: int, stop: int) -> Sums:
    """Update until step `stop`, all of it inside one epoch's permutation, or until a notice."""
    session = training.session
    recipe, numbers, decay = session.recipe, session.numbers, settings_at(session.recipe, epoch).weight_decay
    loaded = training_batches(session, epoch, training.step, stop)
    sums = Sums()
    while training.step < stop:
        started = time.perf_counter()
        rate = lr_at(training.step, recipe, numbers)
        done = update(training.learner, session, loaded, sums, step=training.step, rate=rate, decay=decay)
        if not done.finite:
            _lost_numbers(training, done, rate)
        images = numbers.images_until(training.step + 1) - numbers.images_until(training.step)
        training.step += 1
        seconds = time.perf_counter() - started
        training.progress.step(f"epoch {epoch + 1}/{recipe.epochs}", images, loss=done.loss, rate=rate)
        if training.events:
            training.events.write(
                "step",
                step=training.step,
                epoch=training.step / numbers.steps_per_epoch,
                loss=done.loss,
                rate=rate,
                images_per_s=images / seconds,
                data_wait_s=done.data_wait_s,
                comm_wait_s=done.comm_wait_s,
            )
            if done.ratios:
                training.events.write("ratios", step=training.step, rate=rate, layers=done.ratios)
        _watch_loss(training, done.loss, rate)
        if training.notice.is_last(training.step) and training.step < stop:
            training.stopped = True
            break
    return sums


def _lost_numbers(training: Training, done: Step, rate: float) -> None:
    """A step's gradients are no numbers: do as the recipe says. Raises RunError on the rank where it began."""
    session, recipe = training.session, training.session.recipe
    where = gather((done.loss, done.lost))
    rank, (loss, lost) = next(((r, w) for r, w in enumerate(where) if w[1]), (0, where[0]))
    what = f"loss {loss:g} at step {training.step}{lost or ', its gradients are no numbers'}"
    told = f"rank {rank}: {what}, learning rate {rate:g}"
    saved = list_checkpoints(recipe.folder / CHECKPOINTS)
    if recipe.on_nan == "skip":
        _warn(training, f"{told}: the step is left out")
        return
    if recipe.on_nan == "rollback" and saved and training.rollbacks.get(saved[-1].name, 0) < MOST_ROLLBACKS:
        load_checkpoint(saved[-1], training.learner)
        training.rollbacks[saved[-1].name] = training.rollbacks.get(saved[-1].name, 0) + 1
        _warn(training, f"{told}: back to the weights of {saved[-1].name}, on with the next images")
        return
    if session.rank.rank == rank:
        kept = f"; {saved[-1]} is kept" if saved else ""
        raise RunError(f"{told}: lower the peak rate, or see on_nan{kept}")
    dist.barrier()  # the rank that has told of it ends, and with it this wait


def _watch_loss(training: Training, loss: float, rate: float) -> None:
    """Warn once of a loss that explodes: a learning rate is too high long before numbers end."""
    if training.first_loss is None:
        training.first_loss = loss
    elif loss > EXPLODED * training.first_loss and not training.exploded:
        training.exploded = True
        _warn(
            training,
            f"the loss is {loss:.3g} at step {training.step}, {loss / training.first_loss:.0f} times the first step's, "
            f"learning rate {rate:g}: lower the peak rate, or warm up for longer",
        )


def _warn(training: Training, what: str) -> None:
    training.progress.line(f"warning: {what}")
    if training.events:
        training.events.write("warning", step=training.step, what=what)


def _warn_of_damaged(training: Training, names: list[str]) -> None:
    training.progress.line(f"warning: {len(names)} damaged image(s) left out: {'; '.join(names[:3])}")
    if training.events:
        training.events.write("warning", step=training.step, what="damaged images", images=names)


def _report_epoch(
    training: Training, epoch: int, sums: Sums, accuracy: Accuracy | None, seconds: float, images: int
) -> None:
    """Add up over the ranks, then one line for people and one event for machines."""
    loss, hits, readable, skipped = total(sums.loss, sums.hits, sums.images, len(sums.damaged))
    if skipped or (accuracy and accuracy.images < len(training.session.dataset.val)):
        mine = sums.damaged + list(accuracy.damaged if accuracy else ())
        names = sorted(name for rank_names in gather(mine) for name in rank_names)
        _warn_of_damaged(training, names)
    train_loss = loss / max(readable, 1.0)
    train_top1 = 100 * hits / max(readable, 1.0) if training.session.features is None else None
    val_loss, val_top1 = (accuracy.loss, accuracy.top1) if accuracy and accuracy.images else (None, None)
    told = {"loss": (train_loss, 4), "acc": (train_top1, 2), "val loss": (val_loss, 4), "val acc": (val_top1, 2)}
    figures = [f"{name} {value:.{digits}f}" for name, (value, digits) in told.items() if value is not None]
    training.progress.line(
        f"epoch {epoch + 1}/{training.session.recipe.epochs}  {'  '.join(figures)}"
        f"  {seconds:.1f} s  ({_speed(training.session.recipe, images / seconds)})"
    )
    if training.events:
        training.events.write(
            "epoch",
            step=training.step,
            epoch=epoch + 1,
            train_loss=train_loss,
            train_top1=train_top1,
            val_loss=val_loss,
            val_top1=val_top1,
            val_top5=accuracy.top5 if accuracy else None,
            seconds=seconds,
            images_per_s=images / seconds,
        )


def _speed(recipe: Recipe, per_s: float) -> str:
    """Samples per second, and of what where they are not images that were read."""
    unit = {"images": "img/s", "points": "points/s"}.get(recipe.data.kind, f"img/s, {recipe.data.kind}")
    return f"{per_s:.1f} {unit}"


def _save(training: Training, *, best: bool) -> None:
    recipe, epoch = training.session.recipe, training.step / training.session.numbers.steps_per_epoch
    path = save_checkpoint(
        recipe.folder / CHECKPOINTS,
        training.learner,
        step=training.step,
        top1=training.best_top1,
        keep=recipe.checkpoint.keep,
        best=best,
    )
    if training.events:
        here = str(path.relative_to(recipe.folder))  # good wherever the run is moved
        training.events.write("checkpoint", step=training.step, epoch=epoch, path=here, best=best)
