"""Batches decoded ahead of time by threads (the decoder releases the GIL; a communication library forbids forks)."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cputrain.data.decode import ImageError, Pixels
from cputrain.data.order import Order
from cputrain.data.source import Images

AHEAD = 2  # batches in flight: one being decoded, one waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """images (N, crop, crop, 3) uint8; labels (N,) int64; weights (N,) float32, 0 where the image is damaged.

    `damaged` names those, each with what is wrong.
    """

    images: Tensor
    labels: Tensor
    weights: Tensor
    damaged: tuple[str, ...]


Decode = Callable[[bytes, int], Pixels]
"""Encoded bytes and the image's number -> (crop, crop, 3) uint8, or ImageError."""


def batches(
    images: Images, shares: Iterable[Order], decode: Decode, *, crop: int, threads: int, pus: tuple[int, ...]
) -> Iterator[Batch]:
    """One batch per share of image numbers, in order, decoded by `threads` threads on these PUs (() = anywhere).

    A damaged image leaves its place in the batch grey, with weight 0. Any other failure in a thread is raised here.
    """
    labels = images.labels

    def bind() -> None:
        if pus:
            os.sched_setaffinity(0, pus)

    with ThreadPoolExecutor(threads, thread_name_prefix="loader", initializer=bind) as pool:
        waiting: deque[tuple[Order, NDArray[np.uint8], list[Future[str | None]]]] = deque()

        def start(share: Order) -> None:
            pixels = np.full((len(share), crop, crop, 3), 128, dtype=np.uint8)
            done = [pool.submit(_decode_into, images, int(i), decode, pixels[k]) for k, i in enumerate(share)]
            waiting.append((share, pixels, done))

        def finish() -> Batch:
            share, pixels, done = waiting.popleft()
            problems = [future.result() for future in done]
            return Batch(
                images=torch.from_numpy(pixels),
                labels=torch.from_numpy(labels[share]),
                weights=torch.tensor([0.0 if problem else 1.0 for problem in problems]),
                damaged=tuple(problem for problem in problems if problem),
            )

        try:
            for share in shares:
                start(share)
                if len(waiting) > AHEAD:
                    yield finish()
            while waiting:
                yield finish()
        finally:
            pool.shutdown(cancel_futures=True)


def _decode_into(images: Images, i: int, decode: Decode, place: NDArray[np.uint8]) -> str | None:
    """Decode image i into its place in the batch; what is wrong with it, if anything."""
    try:
        place[:] = decode(images.read(i), i)
    except (ImageError, OSError) as error:
        return f"{images.name(i)}: {error}"
    return None
