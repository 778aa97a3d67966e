"""The image pipeline: a folder of images -> batches of tensors for any PyTorch training loop on CPUs.

    import torch
    from cputrain.data import ImageLoader

    train = ImageLoader.open("data/photos", batch_size=8, image_size=64, threads=2)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, len(train.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        train.set_epoch(epoch)
        for images, labels in train:  # (8, 3, 64, 64) float32, channels-last; (8,) int64
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    val = ImageLoader.open("data/photos", split="val", batch_size=8, image_size=64)
    correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in val)

cputrain's trainer uses the same class (cputrain.training.feed).
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np
from torch import Tensor

from affinity.errors import InputError, RunError
from affinity.kernel.bound_plan import bound_worker
from affinity.ranks.rank import discover
from affinity.wording import counted
from cputrain.data.batches import Batch, decoded_batches
from cputrain.data.damage import causes
from cputrain.data.formats.block_reader import BlockReader, images_per_block
from cputrain.data.formats.dataset import Dataset, Images, PiecewiseImages, check_labels
from cputrain.data.formats.open import open_dataset
from cputrain.data.order.permutations import image_rng
from cputrain.data.order.samplers import BatchSampler, SequentialSampler, ShuffledSampler
from cputrain.data.pixels.decode import Decode, Pixels, choose_decoder
from cputrain.data.pixels.normalize import IMAGENET_MEAN, IMAGENET_STD, Color, choose_normalize
from cputrain.data.pixels.transform import Transform

logger = logging.getLogger(__name__)


class ImageLoader:
    """Batches of one split. Threads read, decode and augment them while the caller computes.

    `ImageLoader.open` makes one from a folder. It may be iterated any number of times. In memory are a few decoded
    batches: at most 8, and no more than 32 MiB of them unless two are larger.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        sampler: BatchSampler,
        transform: Transform,
        decode: Decode,
        normalize: Callable[[Tensor], Tensor],
        seed: int,
        threads: int = 1,
        cpus: Sequence[int] = (),
        on_error: Literal["skip", "raise"] = "skip",
    ) -> None:
        """Put a loader together from its parts, as the trainer does."""
        self.classes = dataset.classes
        self.epoch = 0
        self._images = dataset.splits[split]
        self._sampler, self._transform, self._seed = sampler, transform, seed
        self._decode, self._normalize = decode, normalize
        self.threads, self.cpus = threads, tuple(cpus)
        self._on_error = on_error

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        batch_size: int,
        split: str = "train",
        val_fraction: float | None = None,
        image_size: int = 224,
        shuffle: bool | None = None,
        drop_last: bool = True,
        augment: bool | None = None,
        transform: Transform | None = None,
        mean: Color = IMAGENET_MEAN,
        std: Color = IMAGENET_STD,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        threads: int | None = None,
        cpus: Sequence[int] | None = None,
        block_mib: float = 0.0,
        decoder: Literal["auto", "turbo", "pillow"] = "auto",
        on_error: Literal["skip", "raise"] = "skip",
    ) -> "ImageLoader":
        """Open a split of a folder: train/CLASS/* and val/CLASS/*, CLASS/*, Parquet, TFRecords, tar files or shards.

        batch_size, image_size: images in a batch of this rank, and their side in pixels. split: "train", "val", "test".
        val_fraction: the share of the training images that is drawn for validation, the same for every seed.
            None: the folder's own validation images, or 0.2 where it has none.
        shuffle: a new permutation each epoch, and equally many batches on all ranks; otherwise each image is used once,
            on one of the ranks, and the last batch may be smaller. None: shuffle the split "train".
        drop_last: skip images that do not fill the last batches of all ranks; otherwise an epoch has one batch more,
            and all are a little smaller. Only with shuffle.
        augment: crops of random area, shape and place, half of them mirrored; otherwise center crops. None: as shuffle.
        transform: crop and augmentation in detail, instead of image_size and augment.
        mean, std: of red, green and blue (0 to 1).
        seed: of the order and of the crops; the same on all ranks.
        rank, world_size: None takes those of the launcher (torchrun, srun, mpirun, cputrain launch), else 0 of 1.
        threads, cpus: how many decode, and where (empty: anywhere). None: one on each loader CPU of the plan that
            bound this process; without a plan, one anywhere.
        block_mib: read shards in pieces of so many MiB, for parallel file systems; 0 reads image by image.
        decoder: "turbo" (libjpeg-turbo 3), "pillow", or "auto": turbo where it is available.
        on_error: "skip" removes damaged images from their batch and logs a warning; "raise" raises RunError.

        Raises InputError where the folder, the split or an argument does not fit.
        """
        _check_sizes(batch_size, image_size)
        env, dataset = os.environ, _open_with_split(os.fspath(path), split, val_fraction)  # called by users
        shuffle = split == "train" if shuffle is None else shuffle
        shuffling = _Shuffling(seed=seed, drop_last=drop_last, block_mib=block_mib) if shuffle else None
        planned_threads, planned_cpus = _planned(env)
        return cls(
            dataset,
            split,
            sampler=_sampler(dataset.splits[split], batch_size, *_rank_of(rank, world_size, env), shuffling),
            transform=transform or _transform(image_size, augment=shuffle if augment is None else augment),
            decode=choose_decoder(decoder, env)[0],
            normalize=choose_normalize(mean, std, decoder, env),
            seed=seed,
            threads=planned_threads if threads is None else threads,
            cpus=planned_cpus if cpus is None else cpus,
            on_error=on_error,
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, that determines order and augmentation when the loader is iterated next."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many batches an epoch has on this rank."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This epoch's batches: images (N, 3, side, side) float32, normalized, channels-last; labels (N,) int64.

        Raises RunError where all images of a batch are damaged, or, with on_error="raise", one of them.
        """
        for batch in self.raw_batches(self.epoch):
            images, labels = batch.images, batch.labels
            if batch.damaged:
                count = counted(len(batch.damaged), "damaged image")
                if self._on_error == "raise" or len(batch.damaged) == len(labels):
                    raise RunError(f"{count} in a batch: {causes(batch.damaged)}")
                logger.warning("%s skipped: %s", count, causes(batch.damaged))
                undamaged = batch.weights > 0
                images, labels = images[undamaged], labels[undamaged]
            yield self._normalize(images), labels

    def raw_batches(self, epoch: int, first: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """The batches, as bytes, of the steps from `first` to before `stop` (None: to the end) of an epoch."""
        shares = self._sampler.batches(epoch, first, stop)
        images = self._images
        if self._sampler.block_length and isinstance(images, PiecewiseImages) and shares:
            images = BlockReader(images, self._sampler.block_length, np.concatenate(shares))

        def rng(image: int, stream: int) -> Random:
            return image_rng(self._seed, epoch, image, stream)

        def decode(encoded: Sequence[bytes], numbers: Sequence[int], out: Pixels) -> list[str | None]:
            problems = self._decode(encoded, [self._transform.crop_of(image, rng) for image in numbers], out)
            self._transform.augment(numbers, out, problems, rng)
            return problems

        side = self._transform.image_size
        return decoded_batches(images, shares, decode, side=side, threads=self.threads, cpus=self.cpus)


def _rank_of(rank: int | None, world_size: int | None, env: Mapping[str, str]) -> tuple[int, int]:
    """Rank and world size: those given, or those of the launcher. Raises InputError where they make no sense."""
    if (rank is None) != (world_size is None):
        raise InputError("rank and world_size belong together: give both, or none to take the launcher's")
    if rank is None or world_size is None:
        found = discover(env)
        return (found.rank, found.world_size) if found else (0, 1)
    if not 0 <= rank < world_size:
        raise InputError(f"rank={rank} is not between 0 and world_size-1={world_size - 1}")
    return rank, world_size


def _planned(env: Mapping[str, str]) -> tuple[int, tuple[int, ...]]:
    """Threads and CPUs for decoding by the plan that bound this process: its loader CPUs, else its compute CPUs."""
    worker = bound_worker(env)
    if worker is None:
        return 1, ()
    return len(worker.loader_pus) or 1, worker.loader_pus or worker.compute_pus


def _check_sizes(batch_size: int, image_size: int) -> None:
    if batch_size < 1 or image_size < 1:
        raise InputError(f"batch_size={batch_size}, image_size={image_size}: both must be at least 1")


def _open_with_split(path: str, split: str, val_fraction: float | None) -> Dataset:
    """The data set of a folder. Raises InputError where it does not fit or has no such split."""
    dataset = open_dataset(path, val_fraction=val_fraction)
    check_labels(dataset)
    if split not in dataset.splits:
        raise InputError(f"{path} has no split {split!r}: use one of {', '.join(dataset.splits)}")
    return dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shuffling:
    """How a split is shuffled: the arguments of these names of `ImageLoader.open`."""

    seed: int
    drop_last: bool
    block_mib: float


def _sampler(images: Images, batch_size: int, rank: int, world_size: int, shuffling: _Shuffling | None) -> BatchSampler:
    """The sampler of a split. Raises InputError where there are too few images to shuffle."""
    if shuffling is None:
        return SequentialSampler(images=len(images), batch_size=batch_size, rank=rank, world_size=world_size)
    global_batch = batch_size * world_size
    steps = len(images) // global_batch
    used = steps * global_batch
    if not shuffling.drop_last and used < len(images):
        steps, used = steps + 1, len(images)
    if steps == 0 or used // steps < world_size:
        raise InputError(
            f"batch_size={batch_size} on {counted(world_size, 'rank')} needs {global_batch:,} images, and there are "
            f"{len(images):,}: use a smaller batch_size"
        )
    return ShuffledSampler(
        images=len(images),
        used=used,
        steps=steps,
        seed=shuffling.seed,
        shares=(1,) * world_size,
        rank=rank,
        block_length=images_per_block(images, shuffling.block_mib, steps),
    )


def _transform(image_size: int, *, augment: bool) -> Transform:
    """The usual crops of ImageNet's training and evaluation."""
    crop: Literal["random_resized", "center"] = "random_resized" if augment else "center"
    return Transform(image_size=image_size, short_side=round(image_size * 256 / 224), crop=crop)
