"""Batches that threads decode ahead of time.

Threads, because the decoder releases the GIL, and because communication libraries do not survive a fork.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count as count_up
from typing import Any

import numpy as np
import torch
from torch import Tensor

from affinity.kernel.binding import bind_thread
from cputrain.data.formats.dataset import Images
from cputrain.data.formats.generated import Points
from cputrain.data.formats.own_samples import OwnSamples
from cputrain.data.order.permutations import Indices
from cputrain.data.pixels.decode import Pixels

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
