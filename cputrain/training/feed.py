"""Which images a rank gets, step by step, and how each is looked at."""

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from cputrain.data.augment import augment, changes
from cputrain.data.blocks import BlockReader, block_order
from cputrain.data.decode import Pixels
from cputrain.data.generated import Points, SyntheticImages
from cputrain.data.loader import Batch, batches
from cputrain.data.order import Order, epoch_order, evaluation_share, rank_share, sample_generator
from cputrain.data.shards import Shards
from cputrain.data.views import Look, evaluation_look, plain_look, training_look
from cputrain.recipe.phases import settings_at
from cputrain.training.session import Session


def training_batches(session: Session, epoch: int, first: int, stop: int) -> Iterator[Batch]:
    """This rank's batches for the updates from `first` to before `stop`, which lie in one epoch."""
    recipe, numbers, rank = session.recipe, session.numbers, session.rank
    data, seed, now = recipe.data, recipe.seed, settings_at(recipe, epoch)
    images, steps = session.dataset.train, numbers.steps_per_epoch
    length = session.block_length
    if length:
        order = block_order(len(images), seed, epoch, length=length, used=numbers.used_images_per_epoch, steps=steps)
    else:
        order = epoch_order(len(images), seed, epoch)[: numbers.used_images_per_epoch]
    shares = [rank_share(order, step % steps, steps, session.batches, rank.rank) for step in range(first, stop)]
    passes = (part for share in shares for part in np.array_split(share, numbers.accumulation_steps))
    if isinstance(images, Points):
        return images.batches(passes)
    if length and isinstance(images, Shards):
        images = BlockReader(images, length, np.concatenate(shares))
    short_side = round(data.short_side * now.crop / data.crop)

    def look(image: int) -> Look:
        def draw() -> Random:
            return sample_generator(seed, epoch, image)

        if now.train_crop == "random":
            return plain_look(short_side, now.crop, draw, flip=data.flip)
        return training_look(
            now.crop, draw, min_area=data.min_crop_area, max_aspect=data.max_crop_aspect, flip=data.flip
        )

    def decode(encoded: Sequence[bytes], numbers: Sequence[int], places: Pixels) -> list[str | None]:
        if isinstance(images, SyntheticImages):
            problems = images.fill(numbers, places)
        else:
            problems = session.decode(encoded, [look(image) for image in numbers], places)
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
        threads=session.loader_threads,
        pus=session.loader_pus,
    )


def evaluation_batch(session: Session) -> int:
    """Images of one of a rank's forward passes in an evaluation."""
    return session.recipe.evaluate.batch or session.recipe.batch.local


def evaluation_steps(session: Session, split: str = "val") -> int:
    """How many batches this rank evaluates; rank 0 has no fewer than any other."""
    return -(-len(_evaluation_share(session, split)) // evaluation_batch(session))


def _evaluation_share(session: Session, split: str) -> Order:
    return evaluation_share(len(session.dataset.splits[split]), session.rank.rank, session.rank.world_size)


def evaluation_batches(session: Session, split: str) -> Iterator[Batch]:
    """This rank's share of a split, cut over the ranks, nothing padded and nothing twice."""
    data, images = session.recipe.data, session.dataset.splits[split]
    look = evaluation_look(data.short_side, data.crop)
    share, size = _evaluation_share(session, split), evaluation_batch(session)
    parts = (share[i : i + size] for i in range(0, len(share), size))
    if isinstance(images, Points):
        return images.batches(parts)

    def decode(encoded: Sequence[bytes], _numbers: Sequence[int], places: Pixels) -> list[str | None]:
        return session.decode(encoded, [look] * len(encoded), places)

    return batches(
        images,
        parts,
        decode,
        crop=data.crop,
        threads=session.loader_threads,
        pus=session.loader_pus,
    )
