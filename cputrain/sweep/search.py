"""Which local batches to try, for the largest that trains."""

from collections.abc import Mapping

CLOSE = 8  # settled where what trains and what does not differ by less than this part of it


def next_batch(tried: Mapping[int, bool], start: int, most: int | None) -> int | None:
    """The local batch to try after those in `tried` (batch -> whether it trained); None where it is settled.

    Doubles from `start` up to `most`, the largest that may be tried at all (None: no bound), then halves the distance
    between the largest that trained and the smallest that did not.
    """
    good = max((batch for batch, trained in tried.items() if trained), default=0)
    bad = min((batch for batch, trained in tried.items() if not trained), default=None)
    if bad is None:
        larger = 2 * good or start
        larger = larger if most is None else min(larger, most)
        return larger if larger > good else None
    return None if bad - good <= max(1, good // CLOSE) else (good + bad) // 2
