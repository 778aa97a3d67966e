"""How much the slowest of many workers is behind the mean."""

import math
from functools import lru_cache

LARGEST, STEPS = 10.0, 2000  # of the numerical integration, in standard deviations


@lru_cache(maxsize=256)
def expected_maximum(draws: int) -> float:
    """The mean of the largest of `draws` independent standard normal values: 0 for 1, 1.03 for 4, 3.04 for 512.

    The integral of 1 - F(x)^n over positive x minus that of F(x)^n over negative x, by the midpoint rule.
    """
    width = LARGEST / STEPS
    total = 0.0
    for i in range(STEPS):
        x = (i + 0.5) * width
        tail = 0.5 * math.erfc(x / math.sqrt(2))
        total += -math.expm1(draws * math.log1p(-tail)) - tail**draws
    return total * width


def slowest(hosts: int, workers: int, *, lasting: float, passing: float) -> float:
    """The step of the slowest worker of `hosts` with `workers` each, relative to that of the median one.

    A host is slower or faster than others in every step, a worker in this one; both are lognormal, `lasting` and
    `passing` the standard deviations of the logarithms. Exact for one host and for one worker on each; between, the
    slowest worker of a host is taken to vary as much as any.
    """
    across = math.sqrt(lasting**2 + passing**2)
    return math.exp(across * expected_maximum(hosts) + passing * expected_maximum(workers))
