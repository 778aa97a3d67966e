"""Image pipeline from a folder of images to batches of tensors, for any PyTorch training loop on CPUs.

    import torch
    from cputrain import ImageLoader

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

Threads rather than processes decode ahead, because the decoder releases the GIL and communication libraries do not
survive a fork. cputrain's trainer uses the same class (training/batches.py).
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

from cputrain.affinity.binding import DATA_THREAD, bind_thread, name_thread
from cputrain.affinity.bound_plan import bound_worker
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.rank import rank_from_env
from cputrain.affinity.terminal import printable
from cputrain.affinity.wording import plural
from cputrain.data.formats.dataset import (
    Dataset,
    Images,
    PiecewiseImages,
    Points,
    UserSamples,
    check_labels,
    summarize_corrupt,
)
from cputrain.data.formats.open import open_dataset
from cputrain.data.formats.shards import BlockReader, images_per_block
from cputrain.data.order import BatchSampler, Indices, SequentialSampler, ShuffledSampler
from cputrain.data.pixels import Decode, Pixels, Transform, choose_decoder, ensure_decoder

logger = logging.getLogger(__name__)


Color = tuple[float, float, float]
"""Red, green and blue values."""

IMAGENET_MEAN: Color = (0.485, 0.456, 0.406)
IMAGENET_STD: Color = (0.229, 0.224, 0.225)

AHEAD_BYTES = 32 << 20  # of images decoded ahead
MAX_BATCHES_AHEAD = 8  # batches decoded ahead
IMAGES_PER_CALL = 8  # decoded in one task of a thread; a task per image would cost 10 % of the decoding time
OWN_AHEAD = 2  # batches of user samples collated ahead
GRAY = 128

DecodeImages = Callable[[Sequence[bytes], Sequence[int], Pixels], list[str | None]]
"""Decodes encoded images with these numbers into an (n, side, side, 3) output; returns each image's error, or None."""


class Normalize:
    """Compute (x / 255 - mean) / std per color channel: one pass in the library `native`, or three passes in torch."""

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
            for image, square in zip(images, out, strict=True):  # one by one, so that all three passes hit the cache
                square.copy_(image).sub_(self._shift).mul_(self._scale)
        return out.permute(0, 3, 1, 2)


def choose_normalize(mean: Color, std: Color, decoder: str, env: Mapping[str, str]) -> Normalize:
    """Return native normalization, or torch's if data.decoder is "pillow" or the native library cannot be compiled."""
    try:
        native = None if decoder == "pillow" else ensure_decoder(env)
    except (InputError, RunError):  # choose_decoder reports the reason
        native = None
    return Normalize(mean, std, native)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch: images (N, side, side, 3) uint8, labels (N,) int64 and weights (N,) float32, 0 for damaged images; or
    the collated inputs and targets of user samples, with weights of 1.

    The buffer of `images` may be reused once the next batch is requested. `damaged` lists the damaged images with their
    errors.
    """

    images: Any
    labels: Any
    weights: Tensor
    damaged: tuple[str, ...]


def decoded_batches(
    images: Images, batches: Iterable[Indices], decode: DecodeImages, *, side: int, threads: int, cpus: tuple[int, ...]
) -> Iterator[Batch]:
    """Yield one batch per share of image numbers, in order, decoded by `threads` threads bound to `cpus` (()=unbound).

    A damaged image is gray and has weight 0. Any other failure in a thread is raised here.
    """
    labels = images.labels
    free: list[Pixels] = []

    def buffer_for(count: int) -> Pixels:
        """Reuse the memory of an earlier batch, which the kernel need not zero again, or allocate new memory."""
        while free:
            buffer = free.pop()
            if len(buffer) >= count:
                return buffer
        return np.empty((count, side, side, 3), dtype=np.uint8)

    with _threads("loader", threads, cpus) as pool:
        waiting: deque[tuple[Indices, Pixels, list[Future[list[str | None]]]]] = deque()

        def start(indices: Indices) -> None:
            buffer = buffer_for(len(indices))
            futures = [
                pool.submit(read_and_decode, images, indices[first : first + IMAGES_PER_CALL], decode, buffer[first:])
                for first in range(0, len(indices), IMAGES_PER_CALL)
            ]
            waiting.append((indices, buffer, futures))

        def finish() -> tuple[Batch, Pixels]:
            indices, buffer, futures = waiting.popleft()
            problems = [problem for future in futures for problem in future.result()]
            batch = Batch(
                images=torch.from_numpy(buffer[: len(indices)]),
                labels=torch.from_numpy(labels[indices]),
                weights=torch.tensor([0.0 if problem else 1.0 for problem in problems]),
                damaged=tuple(problem for problem in problems if problem),
            )
            return batch, buffer

        try:
            for indices in batches:
                start(indices)
                if len(waiting) > batches_ahead(len(indices) * side * side * 3):
                    batch, buffer = finish()
                    yield batch
                    free.append(buffer)
            while waiting:
                batch, _ = finish()
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)


def _threads(name: str, count: int, cpus: tuple[int, ...]) -> ThreadPoolExecutor:
    """Create a pool of threads of this name, bound to these CPUs (() = unbound)."""
    numbers = count_up()

    def bind() -> None:
        name_thread(name)
        if cpus:
            bind_thread(cpus, next(numbers))

    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=bind)


def batches_ahead(batch_bytes: int) -> int:
    """Return the number of batches of this size to decode ahead."""
    return min(MAX_BATCHES_AHEAD, max(2, AHEAD_BYTES // batch_bytes))


def read_and_decode(images: Images, indices: Indices, decode: DecodeImages, out: Pixels) -> list[str | None]:
    """Read and decode images into the start of `out`; return each image's error with its name, or None."""
    numbers = indices.tolist()
    encoded, unreadable = [], {}
    for i in numbers:
        try:
            encoded.append(images.read(i))
        except OSError as error:
            encoded.append(b"")
            unreadable[i] = error.strerror or str(error)  # strerror lacks the path, which the image's name has
    problems = decode(encoded, numbers, out[: len(numbers)])
    for k, i in enumerate(numbers):
        if problem := unreadable.get(i) or problems[k]:
            out[k] = GRAY
            problems[k] = f"{images.name(i)}: {problem}"
    return problems


def own_batch(samples: UserSamples, numbers: Sequence[int]) -> Batch:
    """Collate these user samples into a batch."""
    inputs, targets = samples.collated(numbers)
    return Batch(images=inputs, labels=targets, weights=torch.ones(len(numbers)), damaged=())


def own_batches(samples: UserSamples, batches: Iterable[Indices], *, cpus: tuple[int, ...]) -> Iterator[Batch]:
    """Yield one batch per share of user samples, in order. A thread on `cpus` collates ahead; its errors are raised
    here."""
    with _threads(DATA_THREAD, 1, cpus) as pool:
        waiting: deque[Future[Batch]] = deque()
        try:
            for indices in batches:
                waiting.append(pool.submit(own_batch, samples, indices.tolist()))
                if len(waiting) > OWN_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def point_batches(points: Points, batches: Iterable[Indices]) -> Iterator[Batch]:
    """Yield one batch per share of points: `images` has x (N, 1), `labels` has y (N, 1), both float32."""
    for indices in batches:
        x, y = torch.from_numpy(points.x[indices]), torch.from_numpy(points.y[indices])
        yield Batch(images=x, labels=y, weights=torch.ones(len(indices)), damaged=())


class ImageLoader:
    """Iterable over the batches of one split. Threads read, decode and augment images while the caller computes.

    Create it with `ImageLoader.open`; it can be iterated repeatedly. It keeps at most 8 decoded batches in memory, and
    at most 32 MiB of them unless two batches are larger.
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
        """Build a loader from its parts, as the trainer does."""
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
        label_column: str | None = None,
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

        batch_size, image_size: images per batch of this rank, and their side in pixels. split: "train", "val", "test".
        val_fraction: fraction of the training images to use for validation, the same images for every seed.
            None: use the folder's validation images, or 0.2 if it has none, with a warning. 0: draw none.
        label_column: the column of Parquet or Arrow files with the labels, if there are several.
        shuffle: use a new permutation each epoch, with the same number of batches on all ranks; otherwise use each
            image once, on one of the ranks, with a smaller last batch if need be. None: shuffle only the split "train".
        drop_last: skip the images that do not fill a last batch on all ranks; otherwise add one batch to the epoch and
            make all batches slightly smaller. Only with shuffle.
        augment: take crops of random area, aspect ratio and position, half of them mirrored; otherwise center crops.
            None: as shuffle.
        transform: crop and augmentation in detail, in place of image_size and augment.
        mean, std: of the red, green and blue channels (0 to 1).
        seed: for the order and the crops; it must be the same on all ranks.
        rank, world_size: None takes the launcher's (torchrun, srun, mpirun, cputrain launch), or 0 of 1 without one.
        threads, cpus: number of decoding threads, and the CPUs to bind them to (empty: unbound). None: one thread per
            loader CPU of the plan that bound this process; without a plan, one unbound thread.
        block_mib: read shards in blocks of this many MiB, for parallel file systems; 0 reads image by image.
        decoder: "turbo" (libjpeg-turbo 3), "pillow", or "auto": turbo if it is available.
        on_error: "skip" removes damaged images from their batch and logs a warning; "raise" raises RunError.

        Raises InputError if the folder, the split or an argument is invalid.
        """
        if batch_size < 1 or image_size < 1:
            raise InputError(f"batch_size={batch_size}, image_size={image_size}: both must be at least 1")
        if val_fraction is not None and not 0 <= val_fraction < 1:
            raise InputError(f"val_fraction={val_fraction:g}: it must be at least 0 and less than 1")
        env = os.environ  # called by users
        dataset = open_dataset(os.fspath(path), val_fraction=val_fraction, label_column=label_column)
        check_labels(dataset)
        filled = [name for name, images in dataset.splits.items() if len(images)]
        if split not in filled:
            raise InputError(f"{os.fspath(path)} has no split {split!r}: use one of {', '.join(filled)}")
        shuffle = split == "train" if shuffle is None else shuffle
        images, ranks = dataset.splits[split], _rank_of(rank, world_size, env)
        for note in dataset.notes if ranks[0] == 0 else ():
            logger.warning("%s", printable(note))
        planned_threads, planned_cpus = _planned_threads(env)
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
        """Set the epoch, counted from 0, which determines order and augmentation of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches per epoch on this rank."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this epoch's batches: images (N, 3, side, side) float32, normalized, channels-last; labels (N,) int64.

        Raises RunError if all images of a batch are damaged, or with on_error="raise" if any of them is.
        """
        for batch in self.raw_batches(self.epoch):
            images, labels = batch.images, batch.labels
            if batch.damaged:
                count = plural(len(batch.damaged), "damaged image")
                if self._on_error == "raise" or len(batch.damaged) == len(labels):
                    raise RunError(f"{count} in a batch: {summarize_corrupt(batch.damaged)}")
                logger.warning("%s skipped: %s", count, summarize_corrupt(batch.damaged))
                undamaged = batch.weights > 0
                images, labels = images[undamaged], labels[undamaged]
            yield self._normalize(images), labels

    def raw_batches(self, epoch: int, first: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yield the batches of an epoch's steps [first, stop) as bytes, not normalized; stop=None: to the end."""
        batches = self._sampler.batches(epoch, first, stop)
        images = self._images
        if self._sampler.block_length and isinstance(images, PiecewiseImages) and batches:
            images = BlockReader(images, self._sampler.block_length, np.concatenate(batches))

        def decode(encoded: Sequence[bytes], numbers: Sequence[int], out: Pixels) -> list[str | None]:
            problems = self._decode(encoded, self._transform.crops(numbers, self._seed, epoch), out)
            self._transform.augment(numbers, out, problems, self._seed, epoch)
            return problems

        side = self._transform.image_size
        return decoded_batches(images, batches, decode, side=side, threads=self.threads, cpus=self.cpus)


def _rank_of(rank: int | None, world_size: int | None, env: Mapping[str, str]) -> tuple[int, int]:
    """Return the given rank and world size, or the launcher's. Raises InputError if they are inconsistent."""
    if (rank is None) != (world_size is None):
        raise InputError("rank and world_size belong together: give both, or neither to take the launcher's")
    if rank is None or world_size is None:
        launched = rank_from_env(env)
        return (launched.rank, launched.world_size) if launched else (0, 1)
    if not 0 <= rank < world_size:
        raise InputError(f"rank={rank} is not between 0 and world_size-1={world_size - 1}")
    return rank, world_size


def _planned_threads(env: Mapping[str, str]) -> tuple[int, tuple[int, ...]]:
    """Return decoding threads and CPUs from the plan that bound this process: loader CPUs, else compute CPUs."""
    worker = bound_worker(env)
    if worker is None:
        return 1, ()
    return len(worker.loader_pus) or 1, worker.loader_pus or worker.compute_pus


def _shuffled(
    images: Images, batch_size: int, rank: int, world_size: int, seed: int, block_mib: float, *, drop_last: bool
) -> ShuffledSampler:
    """Return the sampler of a shuffled split. Raises InputError if it has too few images."""
    global_batch = batch_size * world_size
    steps = len(images) // global_batch
    used = steps * global_batch
    if not drop_last and used < len(images):
        steps, used = steps + 1, len(images)
    if steps == 0 or used // steps < world_size:
        raise InputError(
            f"batch_size={batch_size} on {plural(world_size, 'rank')} needs {global_batch:,} images, but there are "
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
    """Return the usual ImageNet crop for training (`augment`) or evaluation."""
    crop: Literal["random_resized", "center"] = "random_resized" if augment else "center"
    return Transform(image_size=image_size, short_side=round(image_size * 256 / 224), crop=crop)
