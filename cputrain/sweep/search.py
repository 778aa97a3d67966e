"""The order in which local batches are tried, in search of the largest that trains."""

from collections.abc import Mapping

CLOSE = 8  # the search ends where the largest that trains and the smallest that fails differ by 1/CLOSE


def next_batch(tried: Mapping[int, bool], start: int, most: int | None) -> int | None:
    """The local batch to try after those in `tried` (batch -> whether it trained); None at the end of the search.

    Doubles from `start` up to `most`, the largest that is possible at all (None: no bound), then halves the distance
    between the largest that trained and the smallest that did not.
    """
    good = max((batch for batch, trained in tried.items() if trained), default=0)
    bad = min((batch for batch, trained in tried.items() if not trained), default=None)
    if bad is None:
        larger = 2 * good or start
        larger = larger if most is None else min(larger, most)
        return larger if larger > good else None
    return None if bad - good <= max(1, good // CLOSE) else (good + bad) // 2
