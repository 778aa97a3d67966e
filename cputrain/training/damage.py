"""Images that cannot be read, counted over all ranks: before the first step, in steps and in evaluations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cputrain.affinity.ranks.rank import Rank
from cputrain.comm.group import all_gather
from cputrain.data.formats.dataset import Images, PiecewiseImages, is_too_damaged, refusal
from cputrain.data.loader import read_and_decode
from cputrain.data.order import Indices
from cputrain.data.pixels.decode import Decode, Pixels
from cputrain.data.pixels.transform import center_crop
from cputrain.training.metrics import Accuracy, EpochMetrics

TRIED, PLACES = 32, 4  # images of a split, before the first step; in so many places where neighbors are read together
SURE = 6  # standard deviations above the share that is allowed


def check_sample(splits: Mapping[str, Images], decode: Decode, side: int, share: float, rank: Rank) -> None:
    """Try to decode some images of each split, divided over the ranks, all of which call this.

    Raises InputError on all ranks where so many are damaged that more than `share` of the split must be.
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
        expected = count * share + SURE * math.sqrt(count * share * (1 - share))
        if is_too_damaged(len(damaged), images, share) or len(damaged) > max(expected, 1) or len(damaged) == count:
            raise refusal(split, damaged, count, images, share)


def _spread(images: Images) -> Indices:
    """The numbers of up to TRIED images from all over a split."""
    blocks = isinstance(images, PiecewiseImages) and images.usual_block
    run = TRIED // PLACES if blocks else 1
    starts = np.linspace(0, max(0, len(images) - run), TRIED // run).astype(np.int64)
    return np.unique((starts[:, None] + np.arange(min(run, len(images)))).ravel())


def _problems(images: Images, numbers: Indices, decode: Decode, side: int) -> list[str]:
    def middle(encoded: Sequence[bytes], _numbers: Sequence[int], out: Pixels) -> list[str | None]:
        return decode(encoded, center_crop(side, side), out)

    out = np.empty((len(numbers), side, side, 3), dtype=np.uint8)
    return [problem for problem in read_and_decode(images, numbers, middle, out) if problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageCheck:
    """Ends a training with too many damaged images, on all ranks after the same step or evaluation.

    `share` is data.max_damaged; `wait` waits until the last checkpoint is written.
    """

    splits: Mapping[str, Images]
    share: float
    wait: Callable[[], None]

    def epoch(self, own: EpochMetrics, *, damaged: float, readable: float, ended: bool) -> None:
        """Check an epoch so far, by this rank's metrics and the sums over all ranks; in one that has `ended` some image
        must have been readable. Raises InputError."""
        self._check("train", own.damaged, damaged, readable, ended=ended)

    def evaluation(self, split: str, accuracy: Accuracy) -> None:
        """Check a whole evaluation of a split. Raises InputError."""
        damaged = len(self.splits[split]) - accuracy.images
        self._check(split, accuracy.damaged, damaged, accuracy.images, ended=True)

    def _check(self, split: str, own: Sequence[str], damaged: float, readable: float, *, ended: bool) -> None:
        images = len(self.splits[split])
        if is_too_damaged(damaged, images, self.share) or (ended and damaged and not readable):
            lines = sorted(line for of_rank in all_gather(own) for line in of_rank)
            self.wait()
            raise refusal(split, lines, int(damaged + readable), images, self.share)
