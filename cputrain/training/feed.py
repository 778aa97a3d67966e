"""The batches of a rank: its share of each global batch, and of an evaluation's images."""

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from affinity.errors import RunError
from cputrain.data.augment import augment, changes
from cputrain.data.blocks import BlockReader, block_order
from cputrain.data.decode import Pixels
from cputrain.data.generated import Points, SyntheticImages
from cputrain.data.loader import Batch, batches
from cputrain.data.order import Order, epoch_order, evaluation_share, rank_share, sample_generator
from cputrain.data.shards import Shards
from cputrain.data.views import Look, evaluation_look, plain_look, training_look
from cputrain.recipe.phases import now_at
from cputrain.training.session import Session


def training_batches(session: Session, epoch: int, first: int, stop: int) -> Iterator[Batch]:
    """This rank's batches for the steps from `first` to before `stop`, all of one epoch.

    The iterator raises RunError at a damaged image with data.on_error=raise.
    """
    batches = _training_batches(session, epoch, first, stop)
    return _refuse_damaged(batches, session.ranks.this.rank) if session.recipe.data.on_error == "raise" else batches


def _refuse_damaged(batches: Iterator[Batch], rank: int) -> Iterator[Batch]:
    for batch in batches:
        if batch.damaged:
            raise RunError(
                f"rank {rank}: damaged image {batch.damaged[0]}: repair it, remove it, or set data.on_error=skip"
            )
        yield batch


def _training_batches(session: Session, epoch: int, first: int, stop: int) -> Iterator[Batch]:
    recipe, sizes, ranks = session.recipe, session.sizes, session.ranks
    data, seed, now = recipe.data, recipe.seed, now_at(recipe, epoch)
    images, steps = session.data.dataset.train, sizes.steps_per_epoch
    length = session.data.block_length
    if length:
        order = block_order(len(images), seed, epoch, length=length, used=sizes.used, steps=steps)
    else:
        order = epoch_order(len(images), seed, epoch)[: sizes.used]
    shares = [
        rank_share(order, step % steps, steps, ranks.local_batches, ranks.this.rank) for step in range(first, stop)
    ]
    passes = (part for share in shares for part in np.array_split(share, sizes.passes))
    if isinstance(images, Points):
        return images.batches(passes)
    if length and isinstance(images, Shards):
        images = BlockReader(images, length, np.concatenate(shares))
    short_side = round(data.short_side * now.crop / data.crop)

    def look(image: int) -> Look:
        def draw() -> Random:
            return sample_generator(seed, epoch, image)

        if now.part == "plain":
            return plain_look(short_side, now.crop, draw, flip=data.flip)
        return training_look(now.crop, draw, min_area=data.min_area, max_aspect=data.max_aspect, flip=data.flip)

    def decode(encoded: Sequence[bytes], numbers: Sequence[int], places: Pixels) -> list[str | None]:
        if isinstance(images, SyntheticImages):
            problems = images.fill(numbers, places)
        else:
            problems = session.data.decode(encoded, [look(image) for image in numbers], places)
        if changes(data.augment):
            for image, place, problem in zip(numbers, places, problems, strict=True):
                if problem is None:
                    augment(place, data.augment, sample_generator(seed, epoch, image, 1))
        return problems

    return batches(
        images,
        passes,
        decode,
        crop=now.crop,
        threads=session.binding.loader_threads,
        pus=session.binding.loader_pus,
    )


def evaluation_batch(session: Session) -> int:
    """Images of one forward pass of an evaluation."""
    return session.recipe.evaluate.batch or session.recipe.batch.local


def evaluation_steps(session: Session, split: str = "val") -> int:
    """The number of batches that this rank evaluates; no rank has more than rank 0."""
    return -(-len(_evaluation_share(session, split)) // evaluation_batch(session))


def _evaluation_share(session: Session, split: str) -> Order:
    rank = session.ranks.this
    return evaluation_share(len(session.data.dataset.splits[split]), rank.rank, rank.world_size)


def evaluation_batches(session: Session, split: str) -> Iterator[Batch]:
    """This rank's share of a split, each image on one rank, without padding."""
    data, images = session.recipe.data, session.data.dataset.splits[split]
    look = evaluation_look(data.short_side, data.crop)
    share, size = _evaluation_share(session, split), evaluation_batch(session)
    parts = (share[i : i + size] for i in range(0, len(share), size))
    if isinstance(images, Points):
        return images.batches(parts)

    def decode(encoded: Sequence[bytes], _numbers: Sequence[int], places: Pixels) -> list[str | None]:
        return session.data.decode(encoded, [look] * len(encoded), places)

    return batches(
        images,
        parts,
        decode,
        crop=data.crop,
        threads=session.binding.loader_threads,
        pus=session.binding.loader_pus,
    )
