"""Training loop: steps, evaluations and checkpoints, until the last step or a preemption."""

import gc
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median

import torch.distributed as dist

from cputrain.affinity.wording import first_named, plural
from cputrain.comm.group import all_gather, all_reduce_sum
from cputrain.data.formats.dataset import causes
from cputrain.data.loader import Batch
from cputrain.recipe.derivation import rate_warning, settings_at, step_lr
from cputrain.runs.events import timestamps
from cputrain.runs.folder import wording_for
from cputrain.training.engine import bf16_speedups
from cputrain.training.evaluation import evaluate
from cputrain.training.log import TrainingLog
from cputrain.training.saving import Position, Saver
from cputrain.training.session import Session, training_batches
from cputrain.training.signals import Preemption
from cputrain.training.state import TrainState, average_batchnorm
from cputrain.training.step import (
    Accuracy,
    StepSettings,
    TrainResult,
    Watcher,
    train_step,
)
from cputrain.training.watchers import (
    DamageCheck,
    DivergenceCheck,
    NonFiniteHandler,
    RankTimes,
    ReplicaCheck,
    StragglerWatch,
)


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """A training in progress; `preempted` is set when all ranks must stop before the last step, `names_unused` once the
    warning of parameters without a gradient is logged."""

    session: Session
    state: TrainState
    log: TrainingLog
    preemption: Preemption
    position: Position
    preempted: bool = False
    names_unused: bool = False
    told_damaged: set[str] = field(default_factory=set)
    saver: Saver = field(init=False)
    damage: DamageCheck = field(init=False)
    watchers: list[Watcher] = field(init=False)

    def __post_init__(self) -> None:
        session, state, position, warn = self.session, self.state, self.position, self.log.warn
        recipe, rank = session.recipe, session.rank.rank
        self.saver = Saver(session=session, state=state, log=self.log)
        wait, splits = self.saver.wait, session.data.dataset.splits
        self.damage = DamageCheck(splits=splits, share=recipe.data.max_damaged, wait=wait)
        replicas = ReplicaCheck(
            network=state.learner,
            optimizer=state.optimizer,
            every=recipe.compare_weights_every_steps,
            warn=warn,
            wait=wait,
            same_after=position.step,
            wording=wording_for(recipe),
        )
        self.watchers = [  # called in this order after each step
            NonFiniteHandler(recipe=recipe, rank=rank, state=state, warn=warn, position=position, wait=wait),
            self.log,
            RankTimes(
                log=self.log,
                position=position,
                damage=self.damage,
                set_pace=self.preemption.set_pace,
            ),
            DivergenceCheck(warn=warn, position=position),
            replicas,
            StragglerWatch(
                hosts=replicas.hosts,
                warn=warn,
                pus=session.context.worker.pus,
                read_s=lambda: replicas.read_s,
            ),
        ]

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.position.step

    def run(self) -> TrainResult:
        """Train to the last step or a preemption, then evaluate the test images.

        Raises RunError for NaN or Inf with on_nan=stop and for a damaged image with data.on_error=raise; InputError
        if more images are damaged than data.max_damaged allows.
        """
        self._warn_of_settings()
        gc.freeze()  # collections skip the libraries' objects, which are never freed; scanning them delays the loader
        with closing(self.log.progress):
            accuracy, trained_s = self._run_epochs()
        for watcher in self.watchers:
            watcher.after_last_step(self.step)
        self.saver.wait()
        dist.barrier()  # no rank leaves before the last checkpoint is complete
        if self.preempted:
            accuracy = None
        elif accuracy is None:  # resumed after the last step
            accuracy = self._evaluate()
        ended = timestamps()
        test = None
        if accuracy is not None and self.session.data.dataset.test is not None:
            test = self._evaluate("test")  # once, with the last weights, so that nothing is selected by test images
            self._warn_of_damaged(test.damaged)
        ends_by = self.preemption.ends_by if self.preempted else 0
        return TrainResult(
            accuracy=accuracy, test=test, step=self.step, trained_s=trained_s, ended=ended, ends_by=ends_by
        )

    def _warn_of_settings(self) -> None:
        recipe = self.session.recipe
        if warning := rate_warning(recipe, global_batch=self.session.sizes.global_batch):
            self.log.warn(self.step, warning)
        if recipe.precision == "bf16" and self.session.is_main_rank and (speedup := median(bf16_speedups())) < 1:
            slower = f"convolutions in bf16 take {1 / speedup:.1f} times as long as in float32 on this CPU"
            self.log.warn(self.step, f"{slower}: set precision=float32")

    def _run_epochs(self) -> tuple[Accuracy | None, float]:
        """Train all epochs; return the last epoch's accuracy, None if not evaluated, and the seconds of all steps."""
        recipe, sizes = self.session.recipe, self.session.sizes
        last_step = sizes.last_step(recipe.max_steps)
        trained_s, accuracy = 0.0, None
        at_end = self.step > 0 and self.step % sizes.steps_per_epoch == 0 and not self.position.epoch_done
        for epoch in range(self.step // sizes.steps_per_epoch - at_end, recipe.epochs):
            if self.preempted or (self.step >= last_step and self.position.epoch_done):
                break
            accuracy, seconds = self._run_epoch(epoch, last_step)
            trained_s += seconds
        return accuracy, trained_s

    def _run_epoch(self, epoch: int, last_step: int) -> tuple[Accuracy | None, float]:
        """Train, save, evaluate and log one epoch, counted from 0; return its accuracy if evaluated, and the seconds of
        its steps.

        The checkpoint is written while the epoch is evaluated, so a crash in the evaluation loses no steps.
        """
        recipe, position = self.session.recipe, self.position
        seconds = self._run_steps(epoch, min(last_step, (epoch + 1) * self.session.sizes.steps_per_epoch))
        sums = self._sum_up()
        if self.preempted:
            self._save()
            return None, seconds
        ends = self.step >= last_step
        evaluates = ends or is_due(epoch, recipe.evaluate.every_epochs)
        saves = evaluates or is_due(epoch, recipe.checkpoint.every_epochs) or self._saves_after_step()
        if saves:
            self._save()
        average_batchnorm(self.state.learner)
        accuracy = self._evaluate() if evaluates else None
        self._log_epoch(epoch, sums, accuracy)
        best = accuracy is not None and accuracy.images > 0 and not accuracy.score <= position.best_score
        if accuracy is not None and best:
            position.best_score = accuracy.score
        position.end_epoch()
        self.preemption.agree(self.step, ends_epoch=True)
        self.preempted = not ends and self.preemption.should_stop_after(self.step)
        if saves:
            self.saver.finish(position, best=best)
        elif self.preempted:
            self._save()
        return accuracy, seconds

    def _run_steps(self, epoch: int, stop: int) -> float:
        """Train until step `stop` of this epoch or a preemption; return the seconds it took."""
        recipe, position = self.session.recipe, self.position
        weight_decay = settings_at(recipe, epoch).weight_decay
        batches = training_batches(self.session, epoch, self.step, stop)
        begun, before = time.perf_counter(), position.epoch_s
        while self.step < stop and not self.preempted:
            self._run_step(batches, weight_decay)
            position.epoch_s = before + time.perf_counter() - begun
            self.preemption.agree(self.step, save_due=self.saver.is_due)
            self.preempted = self.preemption.should_stop_after(self.step)
            self.saver.check()
            if self.step < stop and not self.preempted and self._saves_after_step():
                self._save()
        return time.perf_counter() - begun

    def _run_step(self, batches: Iterator[Batch], weight_decay: float) -> None:
        """Train one step and notify the watchers."""
        session, sizes, position = self.session, self.session.sizes, self.position
        started = time.perf_counter()
        settings = StepSettings(
            images=sizes.images_until(self.step + 1) - sizes.images_until(self.step),
            passes=sizes.accumulation_steps,
            lr=step_lr(self.step, session.recipe, sizes),
            weight_decay=weight_decay,
            measure_layers=session.is_main_rank and is_due(self.step, session.recipe.log_norms_every_steps),
            key=(self.step, session.rank.rank),
        )
        result = train_step(self.state, batches, settings, session.recipe, session.task)
        if self.state.unused and not self.names_unused:
            self.names_unused = True
            count, names = plural(len(self.state.unused), "parameter"), first_named(list(self.state.unused))
            self.log.warn(self.step, f"{count} without a gradient, on which the loss does not depend: {names}")
        position.epoch.add(result.metrics)
        position.step += 1
        position.epoch_done = False
        seconds = time.perf_counter() - started
        for watcher in self.watchers:
            watcher.after_step(position.step, settings, result, seconds)

    def _save(self) -> None:
        """Save the state after this step. All ranks must call this after the same step."""
        for watcher in self.watchers:
            watcher.before_save(self.step)
        self.saver.save(self.position)

    def _saves_after_step(self) -> bool:
        every = self.session.recipe.checkpoint.every_steps
        return self.preemption.should_save_after(self.step) if every is None else self.step % every == 0

    def _sum_up(self) -> list[float]:
        """Sum the epoch's losses, correct predictions, readable and damaged images so far over all ranks. Raises
        InputError if too many are damaged, before anything is saved."""
        metrics = self.position.epoch
        sums = all_reduce_sum(metrics.loss, metrics.correct, metrics.images, len(metrics.damaged))
        self.damage.epoch(metrics, damaged=sums[3], readable=sums[2], ended=True)
        return sums

    def _log_epoch(self, epoch: int, sums: list[float], accuracy: Accuracy | None) -> None:
        """Log an epoch, given the sums from _sum_up."""
        data, sizes, metrics = self.session.data, self.session.sizes, self.position.epoch
        loss, correct, readable, damaged = sums
        if damaged or (accuracy and accuracy.images < len(data.dataset.val)):
            self._warn_of_damaged([*metrics.damaged, *(accuracy.damaged if accuracy else ())])
        self.log.epoch(
            step=self.step,
            epoch=epoch + 1,
            train_loss=loss / max(readable, 1.0),
            train_top1=100 * correct / max(readable, 1.0) if self.session.task.classifies else None,
            accuracy=accuracy,
            seconds=self.position.epoch_s,
            images=sizes.images_until(self.step) - sizes.images_until(epoch * sizes.steps_per_epoch),
        )

    def _evaluate(self, split: str = "val") -> Accuracy:
        with self.state.averaged() as network:
            accuracy = evaluate(network, self.session, split)
        self.damage.evaluation(split, accuracy)
        return accuracy

    def _warn_of_damaged(self, names: list[str] | tuple[str, ...]) -> None:
        """Warn of the damaged images that no earlier warning has named."""
        if found := sorted({name for of_rank in all_gather(names) for name in of_rank} - self.told_damaged):
            self.told_damaged.update(found)
            line = f"{plural(len(found), 'damaged image')} skipped: {causes(found)}"
            self.log.warn(self.step, "damaged images", line=line, images=found)


def is_due(number: int, every: int | None) -> bool:
    """Return whether an action that is due every `every` steps or epochs is due after `number`, counted from 0."""
    return every is not None and (number + 1) % every == 0
