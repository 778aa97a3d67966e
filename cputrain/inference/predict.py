"""The classes of images, batch by batch: only a few batches are in memory, however many images there are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cputrain.data.batches import decoded_batches
from cputrain.data.formats.dataset import ImageFiles
from cputrain.data.order.samplers import SequentialSampler
from cputrain.inference.classifier import Classifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The likeliest classes of an image with their probabilities (0 to 1), highest first; or its error."""

    image: str
    top: tuple[tuple[str, float], ...]
    error: str | None = None


def predict(
    classifier: Classifier,
    paths: Sequence[str],
    *,
    top: int,
    batch: int,
    threads: int = 1,
    cpus: tuple[int, ...] = (),
) -> Iterator[Prediction]:
    """One prediction for each path, in order, with the `top` likeliest classes.

    `batch` images pass through the network at once; `threads` threads on `cpus` (() = anywhere) decode the next ones.
    """
    images = ImageFiles(paths, [0] * len(paths))
    shares = SequentialSampler(images=len(paths), batch_size=batch, rank=0, world_size=1).batches()
    side = classifier.record.crop
    batches = decoded_batches(images, shares, classifier.read, side=side, threads=threads, cpus=cpus)
    for share, decoded in zip(shares, batches, strict=True):
        probabilities = torch.softmax(classifier.logits(decoded.images).double(), dim=1)
        highest, outputs = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
        problems = iter(decoded.damaged)
        rows = zip(share.tolist(), decoded.weights.tolist(), outputs.tolist(), highest.tolist(), strict=True)
        for number, weight, numbers, values in rows:
            if weight:
                names = map(classifier.class_name, numbers)
                yield Prediction(image=paths[number], top=tuple(zip(names, values, strict=True)))
            else:
                problem = next(problems).removeprefix(f"{paths[number]}: ")
                yield Prediction(image=paths[number], top=(), error=problem)
