"""The trainer's image pipelines: one rank's training batches step by step, and its share of an evaluation."""

from collections.abc import Iterator

from affinity.errors import RunError
from cputrain.data.batches import Batch, point_batches
from cputrain.data.formats.generated import Points, SyntheticImages
from cputrain.data.loader import ImageLoader
from cputrain.data.order.samplers import BatchSampler, SequentialSampler, ShuffledSampler
from cputrain.data.pixels.augment import Augmentation
from cputrain.data.pixels.transform import Transform
from cputrain.recipe.phases import settings_at
from cputrain.recipe.schema import Recipe
from cputrain.training.session import Session


def training_batches(session: Session, epoch: int, first: int, stop: int) -> Iterator[Batch]:
    """This rank's batches for the steps from `first` to before `stop`, all of one epoch.

    The iterator raises RunError at a damaged image with data.on_error=raise.
    """
    sizes = session.sizes
    sampler = ShuffledSampler(
        images=len(session.data.dataset.train),
        used=sizes.used_images_per_epoch,
        steps=sizes.steps_per_epoch,
        seed=session.recipe.seed,
        shares=session.ranks.local_batches,
        rank=session.ranks.this.rank,
        passes=sizes.accumulation_steps,
        block_length=session.data.block_length,
    )
    begin = first % sizes.steps_per_epoch
    steps = begin, begin + stop - first
    if isinstance(session.data.dataset.train, Points):
        return point_batches(session.data.dataset.train, sampler.batches(epoch, *steps))
    transform = training_transform(session.recipe, epoch)
    batches = _loader(session, "train", sampler, transform).raw_batches(epoch, *steps)
    return _refuse_damaged(batches, session.ranks.this.rank) if session.recipe.data.on_error == "raise" else batches


def _refuse_damaged(batches: Iterator[Batch], rank: int) -> Iterator[Batch]:
    for batch in batches:
        if batch.damaged:
            raise RunError(
                f"rank {rank}: damaged image {batch.damaged[0]}: repair it, remove it, or set data.on_error=skip"
            )
        yield batch


def training_transform(recipe: Recipe, epoch: int) -> Transform:
    """The crops and augmentation of the training images in an epoch."""
    data, now = recipe.data, settings_at(recipe, epoch)
    return Transform(
        image_size=now.crop,
        short_side=round(data.short_side * now.crop / data.crop),
        crop=now.train_crop,
        min_area=data.min_crop_area,
        max_aspect=data.max_crop_aspect,
        flip=data.flip,
        augmentation=Augmentation(**data.augment.model_dump()),
    )


def evaluation_batch(session: Session) -> int:
    """Images of one forward pass of an evaluation."""
    return session.recipe.evaluate.batch or session.recipe.batch.local


def evaluation_steps(session: Session, split: str = "val") -> int:
    """The number of batches that this rank evaluates; no rank has more than rank 0."""
    return len(_evaluation_sampler(session, split))


def evaluation_batches(session: Session, split: str) -> Iterator[Batch]:
    """This rank's share of a split, each image on one rank, without padding."""
    images, sampler = session.data.dataset.splits[split], _evaluation_sampler(session, split)
    if isinstance(images, Points):
        return point_batches(images, sampler.batches())
    data = session.recipe.data
    transform = Transform(image_size=data.crop, short_side=data.short_side, crop="center")
    return _loader(session, split, sampler, transform).raw_batches(epoch=0)


def _evaluation_sampler(session: Session, split: str) -> SequentialSampler:
    return SequentialSampler(
        images=len(session.data.dataset.splits[split]),
        batch_size=evaluation_batch(session),
        rank=session.ranks.this.rank,
        world_size=session.ranks.this.world_size,
    )


def _loader(session: Session, split: str, sampler: BatchSampler, transform: Transform) -> ImageLoader:
    images = session.data.dataset.splits[split]
    return ImageLoader(
        session.data.dataset,
        split,
        sampler=sampler,
        transform=transform,
        decode=images.decode if isinstance(images, SyntheticImages) else session.data.decode,
        normalize=session.data.normalize,
        seed=session.recipe.seed,
        threads=session.binding.loader_threads,
        cpus=session.binding.loader_pus,
    )
