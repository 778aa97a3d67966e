"""The training loop: steps, evaluations and checkpoints, epoch by epoch, until the last step or a preemption."""

import gc
import time
from contextlib import closing
from dataclasses import dataclass, field

import torch.distributed as dist

from cputrain.comm.group import all_gather, all_reduce_sum
from cputrain.optim.schedules import lr_at
from cputrain.recipe.phases import settings_at
from cputrain.recipe.rates import rate_warning
from cputrain.runs.folder import CHECKPOINTS
from cputrain.training.checkpoint import ResumePoint, save_checkpoint
from cputrain.training.engine import bf16_speedup
from cputrain.training.evaluation import average_batchnorm, evaluate
from cputrain.training.feed import training_batches
from cputrain.training.log import TrainingLog
from cputrain.training.metrics import Accuracy, EpochMetrics
from cputrain.training.non_finite import DivergenceCheck, NonFiniteHandler
from cputrain.training.preemption import Preemption
from cputrain.training.session import Session
from cputrain.training.state import TrainState
from cputrain.training.step import StepSettings, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The end of a training: steps done, and accuracies on validation and test images.

    `accuracy` is None after a preemption, `test` also without test images. `trained_s` are the seconds of steps since
    this start; `ended` is the unix time before the test images were evaluated.
    """

    accuracy: Accuracy | None
    test: Accuracy | None
    step: int
    trained_s: float
    ended: float


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """A training in progress: `step` counts the steps done, `best_score` is the best Accuracy.score so far.

    `preempted` is set once the ranks have to stop before the last step.
    """

    session: Session
    state: TrainState
    log: TrainingLog
    preemption: Preemption
    step: int
    best_score: float
    preempted: bool = False
    non_finite: NonFiniteHandler = field(init=False)
    divergence: DivergenceCheck = field(init=False)

    def __post_init__(self) -> None:
        rank = self.session.ranks.this.rank
        self.non_finite = NonFiniteHandler(recipe=self.session.recipe, rank=rank, state=self.state, log=self.log)
        self.divergence = DivergenceCheck(log=self.log)

    def run(self) -> TrainResult:
        """Train to the last step or a preemption, then evaluate the test images.

        Raises RunError for NaN or Inf with on_nan=stop, and for a damaged image with data.on_error=raise.
        """
        self._warn_of_settings()
        gc.freeze()  # objects of the libraries stay: scanning them at every collection takes time from the loader
        with closing(self.log.progress):
            accuracy, trained_s = self._run_epochs()
        if self.preempted:
            accuracy = None
        elif accuracy is None:  # resumed after the last step
            accuracy = self._evaluate()
        ended = time.time()
        has_test = accuracy is not None and self.session.data.dataset.test is not None
        test = self._evaluate_test() if has_test else None
        return TrainResult(accuracy=accuracy, test=test, step=self.step, trained_s=trained_s, ended=ended)

    def _warn_of_settings(self) -> None:
        recipe = self.session.recipe
        if warning := rate_warning(recipe, global_batch=self.session.sizes.global_batch):
            self.log.warn(self.step, warning)
        if recipe.precision == "bf16" and self.session.ranks.is_main_rank and (speedup := bf16_speedup()) < 1:
            slower = f"a convolution takes {1 / speedup:.1f} times as long in bf16 as in float32 on this CPU"
            self.log.warn(self.step, f"{slower}: set precision=float32")

    def _run_epochs(self) -> tuple[Accuracy | None, float]:
        """Train epoch by epoch; the last epoch's accuracy, None if not evaluated, and the seconds of all steps."""
        recipe, sizes = self.session.recipe, self.session.sizes
        last_step = sizes.last_step(recipe.max_steps)
        trained_s, accuracy = 0.0, None
        for epoch in range(self.step // sizes.steps_per_epoch, recipe.epochs):
            if self.step >= last_step or self.preempted:
                break
            accuracy, seconds = self._run_epoch(epoch, last_step)
            trained_s += seconds
        return accuracy, trained_s

    def _run_epoch(self, epoch: int, last_step: int) -> tuple[Accuracy | None, float]:
        """Train, evaluate and save one epoch, counted from 0; its accuracy if evaluated, and the seconds of steps."""
        recipe, sizes = self.session.recipe, self.session.sizes
        started, first = time.perf_counter(), self.step
        metrics = self._run_steps(epoch, min(last_step, (epoch + 1) * sizes.steps_per_epoch))
        seconds = time.perf_counter() - started
        average_batchnorm(self.state.network)
        if self.preempted:
            self._save(best=False)
            return None, seconds
        ends = self.step >= last_step
        accuracy = self._evaluate() if ends or is_due(epoch, recipe.evaluate.every_epochs) else None
        images = sizes.images_until(self.step) - sizes.images_until(first)
        self._log_epoch(epoch, metrics, accuracy, seconds, images)
        best = accuracy is not None and accuracy.images > 0 and not accuracy.score <= self.best_score
        if accuracy is not None and best:
            self.best_score = accuracy.score
        self.preempted = not ends and self.preemption.should_stop_after(self.step)
        if ends or best or self.preempted or is_due(epoch, recipe.checkpoint.every_epochs):
            self._save(best=best)
        return accuracy, seconds

    def _run_steps(self, epoch: int, stop: int) -> EpochMetrics:
        """Train until step `stop` of this epoch or a preemption."""
        session, sizes = self.session, self.session.sizes
        recipe, data = session.recipe, session.data
        weight_decay = settings_at(recipe, epoch).weight_decay
        batches = training_batches(session, epoch, self.step, stop)
        metrics = EpochMetrics()
        while self.step < stop and not self.preempted:
            started = time.perf_counter()
            lr = lr_at(self.step, recipe, sizes)
            images = sizes.images_until(self.step + 1) - sizes.images_until(self.step)
            settings = StepSettings(
                images=images,
                passes=sizes.accumulation_steps,
                lr=lr,
                weight_decay=weight_decay,
                measure_layers=session.ranks.is_main_rank and is_due(self.step, recipe.log_norms_every_steps),
            )
            result = train_step(self.state, batches, settings, recipe, data.normalize)
            metrics.add(result.metrics)
            if not result.finite:
                self.non_finite.handle(result, step=self.step, lr=lr)
            self.step += 1
            seconds, per_epoch = time.perf_counter() - started, sizes.steps_per_epoch
            self.log.step(result, step=self.step, steps_per_epoch=per_epoch, lr=lr, images=images, seconds=seconds)
            self.divergence.check(result.loss, step=self.step, lr=lr)
            self.preempted = self.preemption.should_stop_after(self.step) and self.step < stop
        return metrics

    def _log_epoch(
        self, epoch: int, metrics: EpochMetrics, accuracy: Accuracy | None, seconds: float, images: int
    ) -> None:
        """Add up an epoch's metrics over the ranks and log them."""
        data = self.session.data
        loss, correct, readable, damaged = all_reduce_sum(
            metrics.loss, metrics.correct, metrics.images, len(metrics.damaged)
        )
        if damaged or (accuracy and accuracy.images < len(data.dataset.val)):
            self._warn_of_damaged([*metrics.damaged, *(accuracy.damaged if accuracy else ())])
        self.log.epoch(
            step=self.step,
            epoch=epoch + 1,
            train_loss=loss / max(readable, 1.0),
            train_top1=100 * correct / max(readable, 1.0) if data.features is None else None,
            accuracy=accuracy,
            seconds=seconds,
            images=images,
        )

    def _evaluate(self, split: str = "val") -> Accuracy:
        return evaluate(self.state.eval_model(), self.session, split)

    def _evaluate_test(self) -> Accuracy:
        """Evaluate the test images, once and with the last weights: nothing was chosen by them."""
        accuracy = self._evaluate("test")
        self._warn_of_damaged(accuracy.damaged)
        return accuracy

    def _warn_of_damaged(self, names: list[str] | tuple[str, ...]) -> None:
        if of_all_ranks := sorted(name for of_rank in all_gather(names) for name in of_rank):
            self.log.warn_of_damaged_images(self.step, of_all_ranks)

    def _save(self, *, best: bool) -> None:
        """Save a checkpoint on rank 0, while the other ranks wait."""
        if self.session.ranks.is_main_rank:
            self._write_checkpoint(best=best)
        dist.barrier()

    def _write_checkpoint(self, *, best: bool) -> None:
        recipe = self.session.recipe
        path = save_checkpoint(
            recipe.folder / CHECKPOINTS,
            self.state,
            ResumePoint(step=self.step, best_score=self.best_score),
            keep=recipe.checkpoint.keep,
            best=best,
        )
        self.log.events.write(
            "checkpoint",
            step=self.step,
            epoch=self.step / self.session.sizes.steps_per_epoch,
            path=str(path.relative_to(recipe.folder)),  # so that a run's folder can be moved
            best=best,
        )


def is_due(number: int, every: int | None) -> bool:
    """Whether something that happens after every so many steps or epochs happens after this one, counted from 0."""
    return every is not None and (number + 1) % every == 0
