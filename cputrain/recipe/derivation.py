"""The sizes of a training: batch, steps and peak rate of a recipe on a number of workers and images."""

from dataclasses import dataclass
from math import ceil

from affinity.errors import InputError
from affinity.planner.local_batches import most_per_pass
from affinity.wording import counted
from cputrain.recipe.rates import peak_rate
from cputrain.recipe.schema import BatchSection, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSizes:
    """Images per step, steps per epoch, steps of the warm-up and of the whole training, and the peak learning rate.

    An epoch counts `images_per_epoch` images, of which its steps use `used_images_per_epoch`. Each worker makes
    `accumulation_steps` backward passes per step.
    """

    global_batch: int
    images_per_epoch: int
    used_images_per_epoch: int
    steps_per_epoch: int
    warmup_steps: int
    total_steps: int
    peak_rate: float
    accumulation_steps: int = 1

    def last_step(self, max_steps: int | None) -> int:
        """The step at which the training ends if it may make `max_steps` at most."""
        return min(self.total_steps, max_steps or self.total_steps)

    def images_until(self, step: int) -> int:
        """Images of all steps before this one."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs * self.used_images_per_epoch + self.used_images_per_epoch * rest // self.steps_per_epoch


def derive(recipe: Recipe, *, ppn: int, nodes: int, images: int) -> TrainingSizes:
    """The sizes of a recipe's training on nodes x ppn workers with this number of training images.

    An epoch consists of whole global batches, or with data.last_batch=spread of one step more, all of them smaller.
    Raises InputError where an epoch needs more images than there are, they do not fill one global batch, a step leaves
    a worker without an image for one of its backward passes, or the optimizer has no rule for peak_rate=auto.
    """
    workers = ppn * nodes
    epoch_images = recipe.data.images_per_epoch or images
    if epoch_images > images:
        raise InputError(
            f"data.images_per_epoch={epoch_images:,} is more than the {images:,} images in train/: lower it, or remove "
            "it"
        )
    if images < workers:
        raise InputError(
            f"{counted(workers, 'worker')} need at least {counted(workers, 'image')}, but train/ has {images}: set "
            f"plan.ppn to {images} or less"
        )
    global_batch, accumulation_steps = _step(recipe.batch, workers)
    steps = epoch_images // global_batch
    if steps == 0:
        raise InputError(_too_large(recipe.batch, global_batch, workers, epoch_images))
    used = steps * global_batch
    if recipe.data.last_batch == "spread" and used < epoch_images:
        steps, used = steps + 1, epoch_images
        if used // steps < workers * accumulation_steps:
            raise InputError(
                f"data.last_batch=spread leaves {counted(used // steps, 'image')} per step, too few for "
                f"{counted(workers, 'worker')} with {counted(accumulation_steps, 'accumulation step')}: set "
                "data.last_batch=drop"
            )
    return TrainingSizes(
        global_batch=global_batch,
        images_per_epoch=epoch_images,
        used_images_per_epoch=used,
        steps_per_epoch=steps,
        warmup_steps=round(recipe.schedule.warmup_epochs * steps),
        total_steps=recipe.epochs * steps,
        peak_rate=peak_rate(recipe, global_batch=global_batch, workers=workers).rate,
        accumulation_steps=accumulation_steps,
    )


def images_per_step(batch: BatchSection, workers: int) -> int:
    """The global batch of so many workers."""
    return _step(batch, workers)[0]


def _step(batch: BatchSection, workers: int) -> tuple[int, int]:
    """Images per step, and gradient accumulation steps."""
    if batch.global_ is None:
        return batch.local * workers * batch.accumulation, batch.accumulation
    if batch.global_ < workers:
        raise InputError(
            f"batch.global={batch.global_} leaves some of {workers} workers without an image: set batch.global to "
            f"{workers} or more, or use fewer workers"
        )
    accumulation_steps = passes_per_step(batch, workers)
    if batch.global_ // workers < accumulation_steps:  # only where batch.local is 1
        raise InputError(
            f"batch.global={batch.global_} does not divide into backward passes of batch.local=1 image on {workers} "
            "workers: set batch.local to 2 or more"
        )
    return batch.global_, accumulation_steps


def passes_per_step(batch: BatchSection, workers: int) -> int:
    """Backward passes of each of this number of workers in a step."""
    return batch.accumulation if batch.global_ is None else ceil(batch.global_ / (workers * batch.local))


def largest_local_batch(batch: BatchSection, workers: int) -> int:
    """Images in the largest backward pass of a worker, of this number of workers."""
    return most_per_pass(batch.local, batch.global_, workers)


def _too_large(batch: BatchSection, global_batch: int, workers: int, epoch_images: int) -> str:
    """The error where an epoch has fewer images than a step."""
    if batch.global_ is not None:
        return (
            f"batch.global={global_batch:,} is more than the {epoch_images:,} images of an epoch: set batch.global to "
            f"{epoch_images} or less"
        )
    fitting = max(epoch_images // (workers * batch.accumulation), 1)
    return (
        f"batch.local={batch.local} on {counted(workers, 'worker')} needs {global_batch:,} images per step, but an "
        f"epoch has {epoch_images:,}: set batch.local to {fitting} or less"
    )
