"""A training in one rank, from top to bottom: start, build or restore, epochs and steps, evaluate, save, end."""

import gc
import resource
import time
from contextlib import closing
from dataclasses import replace

import torch.distributed as dist

from cputrain.comm.group import all_gather, all_reduce_sum, end_group
from cputrain.launch.rank_process import StartOptions
from cputrain.runs.events import timestamps
from cputrain.schedule import lr_at
from cputrain.training.batches import training_batches
from cputrain.training.building import build_state
from cputrain.training.corrupt_images import CorruptImageCheck
from cputrain.training.evaluation import evaluate
from cputrain.training.run_folder import RunFolder
from cputrain.training.saving import Saver, newest_checkpoint
from cputrain.training.session import Session
from cputrain.training.signals import Preemption, end_as_signaled, ignore_preemption
from cputrain.training.snapshot import TrainProgress, rename_damaged
from cputrain.training.step import Accuracy, StepSettings, TrainResult, train_step
from cputrain.training.watchers.log import open_log
from cputrain.training.watchers.order import make_watchers


def train_rank(session: Session, options: StartOptions, *, restores_finished: bool = False) -> TrainResult | None:
    """Train as one rank. Return the result, or None if the run in the recipe's folder is already finished; with
    `restores_finished` it is restored, for a caller who expects trained weights."""
    # After a restart, `resume` depends on the run folder, which another host's file system may show later.
    options = replace(options, resume=all_gather(options.resume)[0])
    run = RunFolder(session, options)
    with run.trackers:
        with run.opened(ends=options.resume and not restores_finished) as unfinished:
            if not unfinished:
                end_group(session.group)
                return None
            result = Trainer(session, options, run).train()
            run.end(result)
        peaks = all_gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        ignore_preemption()
        end_group(session.group)
        run.print_summary(result, max(peaks))
    end_as_signaled(result.ends_by)
    return result


class Trainer:
    """A training in progress; `preempted` is set when all ranks must stop before the last step."""

    def __init__(self, session: Session, options: StartOptions, run: RunFolder) -> None:
        """Build the training, restored from the newest checkpoint with options.resume. Raises InputError if the
        checkpoint does not fit."""
        checkpoint = newest_checkpoint(session, resume=options.resume)
        self.session, self.run = session, run
        self.state, notes = build_state(session, checkpoint)
        self.progress = checkpoint.progress if checkpoint else TrainProgress()
        self.log = open_log(session, run.events, self.step, quiet=options.quiet)
        for note in notes:
            self.log.bar.line(note)
        if checkpoint:
            rename_damaged(checkpoint, self.log.warn, self.step, session.rank.rank)
        self.preemption = Preemption(session.group.keys, is_main_rank=session.is_main_rank, prepared=options.prepared)
        self.preempted = False
        self.saver = Saver(session=session, state=self.state, log=self.log)
        self.corrupt_images = CorruptImageCheck(
            splits=session.dataset.splits, share=session.recipe.data.max_damaged, wait=self.saver.wait
        )
        self.watchers = make_watchers(
            session,
            self.state,
            self.progress,
            self.log,
            self.corrupt_images,
            trackers=run.trackers,
            wait=self.saver.wait,
            set_step_time=self.preemption.set_step_time,
        )

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.progress.step

    def train(self) -> TrainResult:
        """Train to the last step or a preemption, then evaluate the test images.

        Raises RunError for NaN or Inf with on_nan=stop and for a damaged image with data.on_error=raise; InputError if
        the state cannot be saved, or if more images are damaged than data.max_damaged allows.
        """
        with closing(self.log.bar):
            self.saver.try_out(self.progress)
            self.run.begin(self.log, self.step, self.state)
            gc.freeze()  # collections skip libraries' objects, which are never freed; scanning them delays the loader
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
        if accuracy is not None and self.session.dataset.test is not None:
            test = self._evaluate("test")  # once, with the last weights, so that nothing is selected by test images
            self.corrupt_images.report(test.damaged, self.step, self.log.warn)
        ends_by = self.preemption.ends_by if self.preempted else 0
        return TrainResult(
            accuracy=accuracy, test=test, step=self.step, trained_s=trained_s, ended=ended, ends_by=ends_by
        )

    def _run_epochs(self) -> tuple[Accuracy | None, float]:
        """Train all epochs; return the last epoch's accuracy, None if not evaluated, and the seconds of all steps."""
        recipe, sizes = self.session.recipe, self.session.sizes
        last_step = sizes.last_step(recipe.max_steps)
        trained_s, accuracy = 0.0, None
        first = self.step // sizes.steps_per_epoch
        if self.step > 0 and self.step % sizes.steps_per_epoch == 0 and not self.progress.epoch_done:
            first -= 1  # resumed after an epoch's last step, before its evaluation
        for epoch in range(first, recipe.epochs):
            if self.preempted or (self.step >= last_step and self.progress.epoch_done):
                break
            accuracy, seconds = self._run_epoch(epoch, last_step)
            trained_s += seconds
        return accuracy, trained_s

    def _run_epoch(self, epoch: int, last_step: int) -> tuple[Accuracy | None, float]:
        """Train, save, evaluate and log one epoch, counted from 0; return its accuracy if evaluated, and the seconds of
        its steps.

        The checkpoint is written while the epoch is evaluated, so a crash in the evaluation loses no steps.
        """
        recipe, progress = self.session.recipe, self.progress
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
        self.state.average_batchnorm()
        accuracy = self._evaluate() if evaluates else None
        self._log_epoch(epoch, sums, accuracy)
        best = False
        if accuracy is not None and accuracy.images > 0 and progress.improves(accuracy.score):
            progress.best_score, best = accuracy.score, True
        progress.end_epoch()
        self.preemption.agree(self.step, ends_epoch=True)
        self.preempted = not ends and self.preemption.should_stop_after(self.step)
        if saves:
            self.saver.finish(progress, best=best)
        elif self.preempted:
            self._save()
        return accuracy, seconds

    def _run_steps(self, epoch: int, stop: int) -> float:
        """Train until step `stop` of this epoch or a preemption; return the seconds it took."""
        session, recipe, sizes, progress = self.session, self.session.recipe, self.session.sizes, self.progress
        weight_decay = recipe.at_epoch(epoch).weight_decay
        batches = training_batches(session, epoch, self.step, stop)
        begun, before = time.perf_counter(), progress.epoch_s
        while self.step < stop and not self.preempted:
            started = time.perf_counter()
            settings = StepSettings(
                images=sizes.images_until(self.step + 1) - sizes.images_until(self.step),
                passes=sizes.accumulation_steps,
                lr=lr_at(self.step, session.schedule),
                weight_decay=weight_decay,
                clip_norm=recipe.optim.clip_norm,
                skips_non_finite=recipe.on_nan == "skip",
                measure_layers=session.is_main_rank and is_due(self.step, recipe.log_norms_every_steps),
                key=(self.step, session.rank.rank),
            )
            result = train_step(self.state, batches, settings, session.task)
            progress.add_step(result.metrics)
            seconds = time.perf_counter() - started
            for watcher in self.watchers:
                watcher.after_step(self.step, settings, result, seconds)
            progress.epoch_s = before + time.perf_counter() - begun
            self.preemption.agree(self.step, save_due=self.saver.is_due)
            self.preempted = self.preemption.should_stop_after(self.step)
            self.saver.check()
            if self.step < stop and not self.preempted and self._saves_after_step():
                self._save()
        return time.perf_counter() - begun

    def _save(self) -> None:
        """Save the state after this step. All ranks must call this after the same step."""
        for watcher in self.watchers:
            watcher.before_save(self.step)
        self.saver.save(self.progress)

    def _saves_after_step(self) -> bool:
        every = self.session.recipe.checkpoint.every_steps
        return self.preemption.should_save_after(self.step) if every is None else self.step % every == 0

    def _sum_up(self) -> list[float]:
        """Sum the epoch's losses, correct predictions, readable and damaged images so far over all ranks. Raises
        InputError if too many are damaged, before anything is saved."""
        metrics = self.progress.epoch
        sums = all_reduce_sum(metrics.loss, metrics.correct, metrics.images, len(metrics.damaged))
        self.corrupt_images.epoch(metrics, damaged=sums[3], readable=sums[2], ended=True)
        return sums

    def _log_epoch(self, epoch: int, sums: list[float], accuracy: Accuracy | None) -> None:
        """Log an epoch, given the sums from _sum_up."""
        session, sizes, metrics = self.session, self.session.sizes, self.progress.epoch
        loss, correct, readable, damaged = sums
        if damaged or (accuracy and accuracy.images < len(session.dataset.val)):
            names = [*metrics.damaged, *(accuracy.damaged if accuracy else ())]
            self.corrupt_images.report(names, self.step, self.log.warn)
        self.log.epoch(
            step=self.step,
            epoch=epoch + 1,
            train_loss=loss / max(readable, 1.0),
            train_top1=100 * correct / max(readable, 1.0) if session.task.classifies else None,
            accuracy=accuracy,
            seconds=self.progress.epoch_s,
            images=sizes.images_until(self.step) - sizes.images_until(epoch * sizes.steps_per_epoch),
        )

    def _evaluate(self, split: str = "val") -> Accuracy:
        with self.state.averaged() as network:
            accuracy = evaluate(network, self.session, split)
        self.corrupt_images.evaluation(split, accuracy)
        return accuracy


def is_due(number: int, every: int | None) -> bool:
    """Return whether an action that is due every `every` steps or epochs is due after `number`, counted from 0."""
    return every is not None and (number + 1) % every == 0
