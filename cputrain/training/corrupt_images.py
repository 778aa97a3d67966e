"""Images that cannot be read: a sample before the first step, and the images of each epoch and evaluation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cputrain.affinity.rank import Rank
from cputrain.affinity.wording import plural
from cputrain.comm.group import all_gather
from cputrain.data.formats.dataset import (
    Images,
    PiecewiseImages,
    is_too_damaged,
    summarize_corrupt,
    too_many_corrupt_error,
)
from cputrain.data.loader import read_and_decode
from cputrain.data.order import Indices
from cputrain.data.pixels import Decode, Pixels, center_crop
from cputrain.training.step import Accuracy, EpochMetrics

SAMPLE_IMAGES, SAMPLE_BLOCKS = 32, 4  # images of a split to try before the first step, in 4 blocks if read in blocks
SIGMAS = 6  # standard deviations above data.max_damaged


def check_sample(splits: Mapping[str, Images], decode: Decode, side: int, share: float, rank: Rank) -> None:
    """Try to decode a sample of each split's images, divided over the ranks. All ranks must call this.

    Raises InputError on every rank if the sample shows that more than `share` of the split is damaged.
    """
    tried = {split: _spread(images) for split, images in splits.items() if len(images)}
    mine = {
        split: _problems(splits[split], numbers[rank.rank :: rank.world_size], decode, side)
        for split, numbers in tried.items()
    }
    of_ranks = all_gather(mine)
    for split, numbers in tried.items():
        damaged = sorted(problem for of_rank in of_ranks for problem in of_rank[split])
        count, images = len(numbers), len(splits[split])
        expected = count * share + SIGMAS * math.sqrt(count * share * (1 - share))
        if is_too_damaged(len(damaged), images, share) or len(damaged) > max(expected, 1) or len(damaged) == count:
            raise too_many_corrupt_error(split, damaged, count, images, share)


def _spread(images: Images) -> Indices:
    """Return up to SAMPLE_IMAGES image indices, spread evenly over a split."""
    blocks = isinstance(images, PiecewiseImages) and images.usual_block
    run = SAMPLE_IMAGES // SAMPLE_BLOCKS if blocks else 1
    starts = np.linspace(0, max(0, len(images) - run), SAMPLE_IMAGES // run).astype(np.int64)
    return np.unique((starts[:, None] + np.arange(min(run, len(images)))).ravel())


def _problems(images: Images, numbers: Indices, decode: Decode, side: int) -> list[str]:
    def middle(encoded: Sequence[bytes], _numbers: Sequence[int], out: Pixels) -> list[str | None]:
        return decode(encoded, center_crop(side, side), out)

    out = np.empty((len(numbers), side, side, 3), dtype=np.uint8)
    return [problem for problem in read_and_decode(images, numbers, middle, out) if problem]


@dataclass(slots=True, kw_only=True)
class CorruptImageCheck:
    """Ends the training on all ranks if too many images are damaged, and warns of each that is skipped.

    `share` is data.max_damaged; `wait` waits for the pending checkpoint; `reported` are the images of earlier warnings.
    """

    splits: Mapping[str, Images]
    share: float
    wait: Callable[[], None]
    reported: set[str] = field(default_factory=set)

    def epoch(self, own: EpochMetrics, *, damaged: float, readable: float, ended: bool) -> None:
        """Check an epoch so far, given this rank's metrics and the sums over all ranks. Raises InputError if too many
        images are damaged, or if the epoch has `ended` without a readable image."""
        self._check("train", own.damaged, damaged, readable, ended=ended)

    def evaluation(self, split: str, accuracy: Accuracy) -> None:
        """Check a complete evaluation of a split. Raises InputError if too many images are damaged."""
        damaged = len(self.splits[split]) - accuracy.images
        self._check(split, accuracy.damaged, damaged, accuracy.images, ended=True)

    def _check(self, split: str, own: Sequence[str], damaged: float, readable: float, *, ended: bool) -> None:
        images = len(self.splits[split])
        if is_too_damaged(damaged, images, self.share) or (ended and damaged and not readable):
            lines = sorted(line for of_rank in all_gather(own) for line in of_rank)
            self.wait()
            raise too_many_corrupt_error(split, lines, int(damaged + readable), images, self.share)

    def report(self, names: Sequence[str], step: int, warn: Callable[..., None]) -> None:
        """Warn of the damaged images, `names` on this rank, that no earlier warning has named. All ranks must call
        this."""
        if new := sorted({name for of_rank in all_gather(names) for name in of_rank} - self.reported):
            self.reported.update(new)
            line = f"{plural(len(new), 'damaged image')} skipped: {summarize_corrupt(new)}"
            warn(step, "damaged images", line=line, images=new)
