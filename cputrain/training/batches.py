"""A rank's batches: of an epoch for training, and of a split for evaluation."""

from collections.abc import Iterator
from itertools import count

from cputrain.affinity.errors import RunError
from cputrain.data.formats.dataset import Points, SyntheticImages, UserSamples
from cputrain.data.from_settings import training_transform
from cputrain.data.loader import Batch, ImageLoader, own_batches, point_batches
from cputrain.data.order import BatchSampler, Indices, SequentialSampler, ShuffledSampler
from cputrain.data.pixels import Transform
from cputrain.training.session import Session


def training_batches(session: Session, epoch: int, first: int, stop: int) -> Iterator[Batch]:
    """Return this rank's batches for steps `first` to `stop` - 1, all in one epoch.

    The iterator raises RunError at a damaged image if data.on_error=raise.
    """
    sizes, images = session.sizes, session.dataset.train
    sampler = ShuffledSampler(
        images=len(images),
        used=sizes.used_images_per_epoch,
        steps=sizes.steps_per_epoch,
        seed=session.recipe.seed,
        shares=session.local_batches,
        rank=session.rank.rank,
        passes=sizes.accumulation_steps,
        block_length=session.block_length,
    )
    begin = first % sizes.steps_per_epoch
    steps = begin, begin + stop - first
    if isinstance(images, Points):
        return point_batches(images, sampler.batches(epoch, *steps))
    if isinstance(images, UserSamples):
        images.set_epoch(epoch)
        return own_batches(images, sampler.batches(epoch, *steps), cpus=session.context.loader_pus)
    now = session.recipe.at_epoch(epoch)
    transform = training_transform(session.recipe.data, now.crop, now.train_crop)
    batches = _loader(session, "train", sampler, transform).raw_batches(epoch, *steps)
    return _refuse_corrupt(batches, session.rank.rank) if session.recipe.data.on_error == "raise" else batches


def _refuse_corrupt(batches: Iterator[Batch], rank: int) -> Iterator[Batch]:
    for batch in batches:
        if batch.damaged:
            raise RunError(
                f"rank {rank} found the damaged image {batch.damaged[0]}: repair it, remove it, or set "
                "data.on_error=skip"
            )
        yield batch


def endless_batches(session: Session) -> Iterator[Batch]:
    """Yield this rank's training batches, epoch after epoch without end, for measurements."""
    for epoch in count():
        yield from training_batches(session, epoch % session.recipe.epochs, 0, session.sizes.steps_per_epoch)


def evaluation_shares(session: Session, split: str) -> list[Indices]:
    """Return the image indices of each of this rank's batches."""
    return _evaluation_sampler(session, split).batches()


def evaluation_batches(session: Session, split: str) -> Iterator[Batch]:
    """Return this rank's batches of a split; each image is on exactly one rank, without padding."""
    images, sampler = session.dataset.splits[split], _evaluation_sampler(session, split)
    if isinstance(images, Points):
        return point_batches(images, sampler.batches())
    if isinstance(images, UserSamples):
        return own_batches(images, sampler.batches(), cpus=session.context.loader_pus)
    data = session.recipe.data
    transform = Transform(image_size=data.crop, short_side=data.short_side, crop="center")
    return _loader(session, split, sampler, transform).raw_batches(epoch=0)


def _evaluation_sampler(session: Session, split: str) -> SequentialSampler:
    return SequentialSampler(
        images=len(session.dataset.splits[split]),
        batch_size=session.recipe.evaluation_batch,
        rank=session.rank.rank,
        world_size=session.rank.world_size,
    )


def _loader(session: Session, split: str, sampler: BatchSampler, transform: Transform) -> ImageLoader:
    images = session.dataset.splits[split]
    return ImageLoader(
        session.dataset,
        split,
        sampler=sampler,
        transform=transform,
        decode=images.decode if isinstance(images, SyntheticImages) else session.decode,
        normalize=session.normalize,
        seed=session.recipe.seed,
        threads=session.context.loader_threads,
        cpus=session.context.loader_pus,
    )
