"""Batches decoded ahead of time by threads (the decoder releases the GIL; a communication library forbids forks)."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cputrain.data.decode import Pixels
from cputrain.data.images import Images
from cputrain.data.order import Order

AHEAD_BYTES = 32 << 20  # of decoded images that wait
MOST_AHEAD = 8  # batches
TOGETHER = 8  # images that one thread decodes at a time: handing each over costs as much as a tenth of decoding it
GREY = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """images (N, crop, crop, 3) uint8, good until the next batch is asked for; labels (N,) int64; weights (N,) float32,
    0 where the image is damaged.

    `damaged` names those, each with what is wrong.
    """

    images: Tensor
    labels: Tensor
    weights: Tensor
    damaged: tuple[str, ...]


DecodeImages = Callable[[Sequence[bytes], Sequence[int], Pixels], list[str | None]]
"""Encoded images, their numbers and the (n, crop, crop, 3) places for their pixels; of each what is wrong with it."""


def batches(
    images: Images, shares: Iterable[Order], decode: DecodeImages, *, crop: int, threads: int, pus: tuple[int, ...]
) -> Iterator[Batch]:
    """One batch per share of image numbers, in order, decoded by `threads` threads on these PUs (() = anywhere).

    A damaged image leaves its place in the batch grey, with weight 0. Any other failure in a thread is raised here.
    """
    labels = images.labels
    free: list[Pixels] = []

    def bind() -> None:
        if pus:
            os.sched_setaffinity(0, pus)

    def place_for(count: int) -> Pixels:
        """Memory that a batch has left, which the system need not clear again, or new."""
        while free:
            place = free.pop()
            if len(place) >= count:
                return place
        return np.empty((count, crop, crop, 3), dtype=np.uint8)

    with ThreadPoolExecutor(threads, thread_name_prefix="loader", initializer=bind) as pool:
        waiting: deque[tuple[Order, Pixels, list[Future[list[str | None]]]]] = deque()

        def start(share: Order) -> None:
            place = place_for(len(share))
            done = [
                pool.submit(_decode_into, images, share[first : first + TOGETHER], decode, place[first:])
                for first in range(0, len(share), TOGETHER)
            ]
            waiting.append((share, place, done))

        def finish() -> tuple[Batch, Pixels]:
            share, place, done = waiting.popleft()
            problems = [problem for future in done for problem in future.result()]
            batch = Batch(
                images=torch.from_numpy(place[: len(share)]),
                labels=torch.from_numpy(labels[share]),
                weights=torch.tensor([0.0 if problem else 1.0 for problem in problems]),
                damaged=tuple(problem for problem in problems if problem),
            )
            return batch, place

        try:
            for share in shares:
                start(share)
                if len(waiting) > ahead(len(share) * crop * crop * 3):
                    batch, place = finish()
                    yield batch
                    free.append(place)
            while waiting:
                batch, _ = finish()
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)


def ahead(batch_bytes: int) -> int:
    """How many batches of that size are decoded before they are asked for."""
    return min(MOST_AHEAD, max(2, AHEAD_BYTES // batch_bytes))


def _decode_into(images: Images, share: Order, decode: DecodeImages, places: Pixels) -> list[str | None]:
    """Decode images into their places in the batch; of each what is wrong with it, if anything."""
    numbers = share.tolist()
    encoded, unread = [], {}
    for i in numbers:
        try:
            encoded.append(images.read(i))
        except OSError as error:
            encoded.append(b"")
            unread[i] = str(error)
    problems = decode(encoded, numbers, places[: len(numbers)])
    for k, i in enumerate(numbers):
        if wrong := unread.get(i) or problems[k]:
            places[k] = GREY
            problems[k] = f"{images.name(i)}: {wrong}"
    return problems
