"""The trainer's image pipelines: one rank's training batches step by step, and its share of an evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass

from cputrain.affinity.errors import RunError
from cputrain.affinity.ranks.rank import Rank
from cputrain.data.formats.dataset import OwnSamples, Points, SyntheticImages
from cputrain.data.from_recipe import training_transform
from cputrain.data.loader import Batch, ImageLoader, own_batches, point_batches
from cputrain.data.order import BatchSampler, Indices, SequentialSampler, ShuffledSampler
from cputrain.data.pixels.transform import Transform
from cputrain.recipe.derivation import TrainingSizes
from cputrain.recipe.schema import Recipe
from cputrain.training.session import Session, SessionData


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What a rank's batches depend on; `local_batches` are every rank's, `loader_pus` and `loader_threads` decode."""

    recipe: Recipe
    sizes: TrainingSizes
    rank: Rank
    local_batches: tuple[int, ...]
    data: SessionData
    loader_pus: tuple[int, ...]
    loader_threads: int


def feed_of(session: Session) -> Feed:
    """The feed of a session's rank."""
    return Feed(
        recipe=session.recipe,
        sizes=session.sizes,
        rank=session.ranks.this,
        local_batches=session.ranks.local_batches,
        data=session.data,
        loader_pus=session.binding.loader_pus,
        loader_threads=session.binding.loader_threads,
    )


def training_batches(feed: Feed, epoch: int, first: int, stop: int) -> Iterator[Batch]:
    """This rank's batches for the steps from `first` to before `stop`, all of one epoch.

    The iterator raises RunError at a damaged image with data.on_error=raise.
    """
    sizes = feed.sizes
    sampler = ShuffledSampler(
        images=len(feed.data.dataset.train),
        used=sizes.used_images_per_epoch,
        steps=sizes.steps_per_epoch,
        seed=feed.recipe.seed,
        shares=feed.local_batches,
        rank=feed.rank.rank,
        passes=sizes.accumulation_steps,
        block_length=feed.data.block_length,
    )
    begin = first % sizes.steps_per_epoch
    steps = begin, begin + stop - first
    if isinstance(feed.data.dataset.train, Points):
        return point_batches(feed.data.dataset.train, sampler.batches(epoch, *steps))
    if isinstance(feed.data.dataset.train, OwnSamples):
        feed.data.dataset.train.set_epoch(epoch)
        shares = sampler.batches(epoch, *steps)
        return own_batches(feed.data.dataset.train, shares, cpus=feed.loader_pus)
    transform = training_transform(feed.recipe, epoch)
    batches = _loader(feed, "train", sampler, transform).raw_batches(epoch, *steps)
    return _refuse_damaged(batches, feed.rank.rank) if feed.recipe.data.on_error == "raise" else batches


def _refuse_damaged(batches: Iterator[Batch], rank: int) -> Iterator[Batch]:
    for batch in batches:
        if batch.damaged:
            raise RunError(
                f"rank {rank}: damaged image {batch.damaged[0]}: repair it, remove it, or set data.on_error=skip"
            )
        yield batch


def evaluation_batch(recipe: Recipe) -> int:
    """Images of one forward pass of an evaluation."""
    return recipe.evaluate.batch or recipe.batch.local


def evaluation_steps(feed: Feed, split: str = "val") -> int:
    """The number of batches that this rank evaluates; no rank has more than rank 0."""
    return len(_evaluation_sampler(feed, split))


def evaluation_shares(feed: Feed, split: str) -> list[Indices]:
    """The numbers of the images of each of this rank's batches."""
    return _evaluation_sampler(feed, split).batches()


def evaluation_batches(feed: Feed, split: str) -> Iterator[Batch]:
    """This rank's share of a split, each image on one rank, without padding."""
    images, sampler = feed.data.dataset.splits[split], _evaluation_sampler(feed, split)
    if isinstance(images, Points):
        return point_batches(images, sampler.batches())
    if isinstance(images, OwnSamples):
        return own_batches(images, sampler.batches(), cpus=feed.loader_pus)
    data = feed.recipe.data
    transform = Transform(image_size=data.crop, short_side=data.short_side, crop="center")
    return _loader(feed, split, sampler, transform).raw_batches(epoch=0)


def _evaluation_sampler(feed: Feed, split: str) -> SequentialSampler:
    return SequentialSampler(
        images=len(feed.data.dataset.splits[split]),
        batch_size=evaluation_batch(feed.recipe),
        rank=feed.rank.rank,
        world_size=feed.rank.world_size,
    )


def _loader(feed: Feed, split: str, sampler: BatchSampler, transform: Transform) -> ImageLoader:
    images = feed.data.dataset.splits[split]
    return ImageLoader(
        feed.data.dataset,
        split,
        sampler=sampler,
        transform=transform,
        decode=images.decode if isinstance(images, SyntheticImages) else feed.data.decode,
        normalize=feed.data.normalize,
        seed=feed.recipe.seed,
        threads=feed.loader_threads,
        cpus=feed.loader_pus,
    )
