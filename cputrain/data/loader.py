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

Threads decode ahead: the decoder releases the GIL, and communication libraries do not survive a fork. cputrain's
trainer uses the same class (training/session.py).
"""

import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_size_t, c_void_p
from dataclasses import dataclass
from itertools import count as count_up
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.kernel.binding import bind_thread
from cputrain.affinity.kernel.bound_plan import bound_worker
from cputrain.affinity.ranks.rank import discover
from cputrain.affinity.wording import counted
from cputrain.data.formats.dataset import Dataset, Images, OwnSamples, PiecewiseImages, Points, causes, check_labels
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.shards import BlockReader, images_per_block
from cputrain.data.order import BatchSampler, Indices, SequentialSampler, ShuffledSampler
from cputrain.data.pixels import Decode, Pixels, Transform, choose_decoder, ensure_built

Color = tuple[float, float, float]
"""A value for each of red, green and blue."""

IMAGENET_MEAN: Color = (0.485, 0.456, 0.406)
IMAGENET_STD: Color = (0.229, 0.224, 0.225)


class Normalize:
    """(x / 255 - mean) / std of each color: in one pass by the library `native`, without it in three by torch."""

    def __init__(self, mean: Color, std: Color, native: Path | None) -> None:
        self._shift = torch.tensor(mean).mul(255)
        self._scale = torch.tensor(std).mul(255).reciprocal()
        self._native = ctypes.CDLL(str(native)).pixels_normalize if native else None
        if self._native:
            self._native.argtypes = (c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)

    def __call__(self, images: Tensor) -> Tensor:
        """(N, H, W, 3) uint8 -> (N, 3, H, W) float32, channels-last in memory."""
        out = torch.empty(images.shape, dtype=torch.float32)
        if self._native:
            assert images.is_contiguous()
            constants = self._shift.data_ptr(), self._scale.data_ptr()
            self._native(images.data_ptr(), out.data_ptr(), images.numel() // 3, *constants)
        else:
            for image, square in zip(images, out, strict=True):  # each stays in the cache through its three passes
                square.copy_(image).sub_(self._shift).mul_(self._scale)
        return out.permute(0, 3, 1, 2)


def choose_normalize(mean: Color, std: Color, decoder: str, env: Mapping[str, str]) -> Normalize:
    """Native normalization, or torch's where data.decoder is "pillow" or the native library cannot be compiled."""
    try:
        native = None if decoder == "pillow" else ensure_built(env)
    except (InputError, RunError):  # choose_decoder has reported it
        native = None
    return Normalize(mean, std, native)


AHEAD_BYTES = 32 << 20  # of decoded images that wait
MOST_AHEAD = 8  # batches
IMAGES_PER_CALL = 8  # decoded by one thread at a time: one call for each image would cost a tenth of decoding it
OWN_AHEAD = 2  # batches of a user's own samples
GRAY = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Images (N, side, side, 3) uint8, labels (N,) int64 and weights (N,) float32, which are 0 for damaged images; or
    inputs and targets of a user's own samples.

    `images` may be overwritten when the next batch is taken. `damaged` names the damaged images with their errors.
    """

    images: Any
    labels: Any
    weights: Tensor
    damaged: tuple[str, ...]


DecodeImages = Callable[[Sequence[bytes], Sequence[int], Pixels], list[str | None]]
"""Encoded images, their numbers and an (n, side, side, 3) output; returns each image's error, or None."""


def decoded_batches(
    images: Images, shares: Iterable[Indices], decode: DecodeImages, *, side: int, threads: int, cpus: tuple[int, ...]
) -> Iterator[Batch]:
    """One batch for each share of image numbers, in order, decoded by `threads` threads on these CPUs (() = anywhere).

    A damaged image is gray and has weight 0. Any other failure in a thread is raised here.
    """
    labels = images.labels
    free: list[Pixels] = []

    def buffer_for(count: int) -> Pixels:
        """The memory of an earlier batch, which the system need not clear again, or new memory."""
        while free:
            buffer = free.pop()
            if len(buffer) >= count:
                return buffer
        return np.empty((count, side, side, 3), dtype=np.uint8)

    with _loader_threads(threads, cpus) as pool:
        waiting: deque[tuple[Indices, Pixels, list[Future[list[str | None]]]]] = deque()

        def start(share: Indices) -> None:
            buffer = buffer_for(len(share))
            futures = [
                pool.submit(read_and_decode, images, share[first : first + IMAGES_PER_CALL], decode, buffer[first:])
                for first in range(0, len(share), IMAGES_PER_CALL)
            ]
            waiting.append((share, buffer, futures))

        def finish() -> tuple[Batch, Pixels]:
            share, buffer, futures = waiting.popleft()
            problems = [problem for future in futures for problem in future.result()]
            batch = Batch(
                images=torch.from_numpy(buffer[: len(share)]),
                labels=torch.from_numpy(labels[share]),
                weights=torch.tensor([0.0 if problem else 1.0 for problem in problems]),
                damaged=tuple(problem for problem in problems if problem),
            )
            return batch, buffer

        try:
            for share in shares:
                start(share)
                if len(waiting) > batches_ahead(len(share) * side * side * 3):
                    batch, buffer = finish()
                    yield batch
                    free.append(buffer)
            while waiting:
                batch, _ = finish()
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)


def _loader_threads(count: int, cpus: tuple[int, ...]) -> ThreadPoolExecutor:
    """Threads on these CPUs (() = anywhere)."""
    numbers = count_up()

    def bind() -> None:
        if cpus:
            bind_thread(cpus, next(numbers))

    return ThreadPoolExecutor(count, thread_name_prefix="loader", initializer=bind)


def batches_ahead(batch_bytes: int) -> int:
    """How many batches of that size are decoded in advance."""
    return min(MOST_AHEAD, max(2, AHEAD_BYTES // batch_bytes))


def read_and_decode(images: Images, share: Indices, decode: DecodeImages, out: Pixels) -> list[str | None]:
    """Read and decode images into the first places of `out`; each image's error with its name, or None."""
    numbers = share.tolist()
    encoded, unreadable = [], {}
    for i in numbers:
        try:
            encoded.append(images.read(i))
        except OSError as error:
            encoded.append(b"")
            unreadable[i] = error.strerror or str(error)  # strerror: the path is in the name
    problems = decode(encoded, numbers, out[: len(numbers)])
    for k, i in enumerate(numbers):
        if problem := unreadable.get(i) or problems[k]:
            out[k] = GRAY
            problems[k] = f"{images.name(i)}: {problem}"
    return problems


def own_batch(samples: OwnSamples, numbers: Sequence[int]) -> Batch:
    """The batch of these samples of a user."""
    inputs, targets = samples.collated(numbers)
    return Batch(images=inputs, labels=targets, weights=torch.ones(len(numbers)), damaged=())


def own_batches(samples: OwnSamples, shares: Iterable[Indices], *, cpus: tuple[int, ...]) -> Iterator[Batch]:
    """One batch for each share of a user's samples, in order. A thread on these CPUs makes the next one; what fails in
    it is raised here."""
    with _loader_threads(1, cpus) as pool:
        waiting: deque[Future[Batch]] = deque()
        try:
            for share in shares:
                waiting.append(pool.submit(own_batch, samples, share.tolist()))
                if len(waiting) > OWN_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def point_batches(points: Points, shares: Iterable[Indices]) -> Iterator[Batch]:
    """One batch for each share of points: `images` (N, 1) are the x, `labels` (N, 1) the y, both float32."""
    for share in shares:
        x, y = torch.from_numpy(points.x[share]), torch.from_numpy(points.y[share])
        yield Batch(images=x, labels=y, weights=torch.ones(len(share)), damaged=())


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
        if batch_size < 1 or image_size < 1:
            raise InputError(f"batch_size={batch_size}, image_size={image_size}: both must be at least 1")
        env, dataset = os.environ, open_dataset(os.fspath(path), val_fraction=val_fraction)  # called by users
        check_labels(dataset)
        if split not in dataset.splits:
            raise InputError(f"{os.fspath(path)} has no split {split!r}: use one of {', '.join(dataset.splits)}")
        shuffle = split == "train" if shuffle is None else shuffle
        images, ranks = dataset.splits[split], _rank_of(rank, world_size, env)
        planned_threads, planned_cpus = _planned(env)
        return cls(
            dataset,
            split,
            sampler=_shuffled(images, batch_size, *ranks, seed, block_mib, drop_last=drop_last)
            if shuffle
            else SequentialSampler(images=len(images), batch_size=batch_size, rank=ranks[0], world_size=ranks[1]),
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

        def decode(encoded: Sequence[bytes], numbers: Sequence[int], out: Pixels) -> list[str | None]:
            problems = self._decode(encoded, self._transform.crops(numbers, self._seed, epoch), out)
            self._transform.augment(numbers, out, problems, self._seed, epoch)
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


def _shuffled(
    images: Images, batch_size: int, rank: int, world_size: int, seed: int, block_mib: float, *, drop_last: bool
) -> ShuffledSampler:
    """The sampler of a split that is shuffled. Raises InputError where there are too few images."""
    global_batch = batch_size * world_size
    steps = len(images) // global_batch
    used = steps * global_batch
    if not drop_last and used < len(images):
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
        seed=seed,
        shares=(1,) * world_size,
        rank=rank,
        block_length=images_per_block(images, block_mib, steps),
    )


def _transform(image_size: int, *, augment: bool) -> Transform:
    """The usual crops of ImageNet's training and evaluation."""
    crop: Literal["random_resized", "center"] = "random_resized" if augment else "center"
    return Transform(image_size=image_size, short_side=round(image_size * 256 / 224), crop=crop)
