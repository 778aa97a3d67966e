"""The trainer's image pipelines: one rank's training batches step by step, and its share of an evaluation."""

from collections.abc import Iterator
from itertools import count

from cputrain.affinity.errors import RunError
from cputrain.data.formats.dataset import OwnSamples, Points, SyntheticImages
from cputrain.data.from_recipe import training_transform
from cputrain.data.loader import Batch, ImageLoader, own_batches, point_batches
from cputrain.data.order import BatchSampler, Indices, SequentialSampler, ShuffledSampler
from cputrain.data.pixels import Transform
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
        shares=session.local_batches,
        rank=session.rank.rank,
        passes=sizes.accumulation_steps,
        block_length=session.data.block_length,
    )
    begin = first % sizes.steps_per_epoch
    steps = begin, begin + stop - first
    if isinstance(session.data.dataset.train, Points):
        return point_batches(session.data.dataset.train, sampler.batches(epoch, *steps))
    if isinstance(session.data.dataset.train, OwnSamples):
        session.data.dataset.train.set_epoch(epoch)
        shares = sampler.batches(epoch, *steps)
        return own_batches(session.data.dataset.train, shares, cpus=session.context.loader_pus)
    transform = training_transform(session.recipe, epoch)
    batches = _loader(session, "train", sampler, transform).raw_batches(epoch, *steps)
    return _refuse_damaged(batches, session.rank.rank) if session.recipe.data.on_error == "raise" else batches


def _refuse_damaged(batches: Iterator[Batch], rank: int) -> Iterator[Batch]:
    for batch in batches:
        if batch.damaged:
            raise RunError(
                f"rank {rank}: damaged image {batch.damaged[0]}: repair it, remove it, or set data.on_error=skip"
            )
        yield batch


def endless_batches(session: Session) -> Iterator[Batch]:
    """This rank's training batches, epoch after epoch: for measurements, which end where they like."""
    for epoch in count():
        yield from training_batches(session, epoch % session.recipe.epochs, 0, session.sizes.steps_per_epoch)


def evaluation_batch(recipe: Recipe) -> int:
    """Images of one forward pass of an evaluation."""
    return recipe.evaluate.batch or recipe.batch.local


def evaluation_steps(session: Session, split: str = "val") -> int:
    """The number of batches that this rank evaluates; no rank has more than rank 0."""
    return len(_evaluation_sampler(session, split))


def evaluation_shares(session: Session, split: str) -> list[Indices]:
    """The numbers of the images of each of this rank's batches."""
    return _evaluation_sampler(session, split).batches()


def evaluation_batches(session: Session, split: str) -> Iterator[Batch]:
    """This rank's share of a split, each image on one rank, without padding."""
    images, sampler = session.data.dataset.splits[split], _evaluation_sampler(session, split)
    if isinstance(images, Points):
        return point_batches(images, sampler.batches())
    if isinstance(images, OwnSamples):
        return own_batches(images, sampler.batches(), cpus=session.context.loader_pus)
    data = session.recipe.data
    transform = Transform(image_size=data.crop, short_side=data.short_side, crop="center")
    return _loader(session, split, sampler, transform).raw_batches(epoch=0)


def _evaluation_sampler(session: Session, split: str) -> SequentialSampler:
    return SequentialSampler(
        images=len(session.data.dataset.splits[split]),
        batch_size=evaluation_batch(session.recipe),
        rank=session.rank.rank,
        world_size=session.rank.world_size,
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
        threads=session.context.loader_threads,
        cpus=session.context.loader_pus,
    )
