"""Which of many candidates is fastest, from noisy measurements, in as few of them as possible.

Rounds: each candidate that may still win is measured once, in a random order, so that a disturbance meets all of them.
Candidates are compared within rounds, by the logarithms of their costs; those that are surely slower than the best are
dropped, mostly all but a few after two rounds. Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943) whose
cut is a confidence interval instead of a half: racing (Maron and Moore 1993, Hoeffding races).
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist, fmean

# The noise is the standard deviation of a measurement, relative to its value, and assumed to be the same for all
# candidates. It counts as large, and nothing is dropped, until it is estimated with LEAST_FREEDOM degrees of freedom:
# two rounds of 5 or more candidates, five of 2. The estimate starts from PRIOR_WEIGHT degrees of freedom of a usual
# noise, so that a few measurements that happen to be equal do not look like no noise.
LEAST_FREEDOM, LARGE_NOISE = 4, 0.2
PRIOR_NOISE, PRIOR_WEIGHT = 0.03, 2
CONFIDENCE = 0.95
MOST_ROUNDS = 64

Cost = Callable[[int], float | None]
"""Measures a candidate, by its index: seconds an image, None where it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast one candidate is as another, with its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(slots=True, kw_only=True)
class Race:
    """The measurements so far. `costs[i]` are logarithms of candidate i's, one for each round that it was in.

    `resolution` is the relative difference that does not matter: a candidate that can be faster by less is dropped.
    """

    count: int
    resolution: float
    costs: list[list[float]] = field(init=False)
    running: list[int] = field(init=False)
    failed: list[int] = field(default_factory=list)
    _squares: float = PRIOR_WEIGHT * PRIOR_NOISE**2
    _freedom: int = PRIOR_WEIGHT

    def __post_init__(self) -> None:
        self.costs = [[] for _ in range(self.count)]
        self.running = list(range(self.count))

    @property
    def trials(self) -> int:
        """Measurements so far, without failed ones."""
        return sum(map(len, self.costs))

    @property
    def noise(self) -> float:
        """Standard deviation of a measurement, relative to its value."""
        return math.sqrt(self._squares / self._freedom) if self.knows_noise else LARGE_NOISE

    @property
    def knows_noise(self) -> bool:
        """Whether the measurements so far show their noise."""
        return self._freedom - PRIOR_WEIGHT >= LEAST_FREEDOM

    @property
    def leader(self) -> int:
        """The running candidate with the least mean."""
        return min(self.running, key=self.mean)

    def mean(self, candidate: int) -> float:
        """The mean logarithm of a candidate's costs."""
        return fmean(self.costs[candidate])

    def images_per_s(self, candidate: int) -> float:
        """The geometric mean of a candidate's images/s."""
        return math.exp(-self.mean(candidate))

    def mean_beside(self, other: int) -> Callable[[int], float]:
        """The mean logarithm of a candidate's costs relative to another's in the same rounds."""
        return lambda candidate: -self._gain(candidate, other)

    def add_round(self, measured: dict[int, float | None]) -> None:
        """Add one cost of each running candidate, and drop those that cannot win any more."""
        for candidate, cost in measured.items():
            if cost is None:
                self.failed.append(candidate)
                self.running.remove(candidate)
        logs = {candidate: math.log(measured[candidate] or 1.0) for candidate in self.running}
        self._add_noise(logs)
        for candidate, cost in logs.items():
            self.costs[candidate].append(cost)
        if self.running and self.knows_noise:
            leader = self.leader
            self.running = [each for each in self.running if each == leader or self.can_win(each, leader)]

    def _add_noise(self, logs: dict[int, float]) -> None:
        """What this round adds to the estimate of the noise: how far each candidate is from its own mean so far, beyond
        what moved all of them. These contrasts are independent of those of earlier rounds (Helmert)."""
        rounds = min((len(self.costs[each]) for each in logs), default=0)
        if rounds == 0 or len(logs) < 2:
            return
        changes = [log - self.mean(each) for each, log in logs.items()]
        common = fmean(changes)
        self._squares += sum((change - common) ** 2 for change in changes) / (1 + 1 / rounds)
        self._freedom += len(logs) - 1

    def can_win(self, candidate: int, leader: int) -> bool:
        """Whether a candidate may be faster than the leader by more than the resolution."""
        return self._gain(candidate, leader) + self._half_width(candidate, leader) > self.resolution

    def _gain(self, candidate: int, other: int) -> float:
        """How much faster a candidate is than another, over the rounds that both were in, as a logarithm."""
        rounds = min(len(self.costs[candidate]), len(self.costs[other]))
        pairs = zip(self.costs[other][:rounds], self.costs[candidate][:rounds], strict=True)
        return fmean(slow - fast for slow, fast in pairs)

    def _half_width(self, candidate: int, other: int) -> float:
        """Half of the confidence interval of a gain, wider the more candidates are compared."""
        rounds = min(len(self.costs[candidate]), len(self.costs[other]))
        return self._reach() * math.sqrt(2 / rounds)

    def _reach(self) -> float:
        """How far a measurement may be from its mean."""
        share = 1 - (1 - CONFIDENCE) / 2 / max(len(self.running) - 1, 1)
        return t_quantile(share, self._freedom) * self.noise

    def ratio(self, candidate: int, other: int) -> Ratio:
        """How many times as fast a candidate is as another."""
        rounds = min(len(self.costs[candidate]), len(self.costs[other]))
        gain = self._gain(candidate, other)
        half = t_quantile(1 - (1 - CONFIDENCE) / 2, self._freedom) * self.noise * math.sqrt(2 / rounds)
        return Ratio(value=math.exp(gain), low=math.exp(gain - half), high=math.exp(gain + half))

    def winner(self) -> int:
        """The first of those candidates that are as fast as the best one, but for the resolution."""
        best = self.leader
        tried = [each for each in range(self.count) if self.costs[each] and each not in self.failed]
        return next(each for each in tried if self._gain(best, each) <= self.resolution)

    def trials_left(self) -> int:
        """Measurements until every candidate but the leader is dropped, if their means stay as they are."""
        if len(self.running) < 2:
            return 0
        leader, left, longest, reach = self.leader, 0, 0, self._reach()
        least = 1 + math.ceil(LEAST_FREEDOM / (len(self.running) - 1))
        for candidate in self.running:
            if candidate != leader:
                behind = max(self.resolution - self._gain(candidate, leader), self.resolution / 2)
                rounds = max(least, min(math.ceil(2 * (reach / behind) ** 2), MOST_ROUNDS))
                more = max(rounds - len(self.costs[candidate]), 1)
                left, longest = left + more, max(longest, more)
        return left + longest  # the leader is in all of these rounds


def run_race(
    count: int,
    cost: Cost,
    *,
    seed: int,
    resolution: float,
    stop: Callable[[], bool] = lambda: False,
    watch: Callable[[Race], None] = lambda race: None,
) -> Race:
    """Measure candidates 0 to count - 1 until one is left, MOST_ROUNDS are over, or `stop` says so.

    `stop` is asked before each measurement; a round that it ends early does not count. `watch` sees the race after each
    round.
    """
    race, rng = Race(count=count, resolution=resolution), random.Random(seed)
    for _ in range(MOST_ROUNDS):
        order = rng.sample(race.running, len(race.running))
        measured: dict[int, float | None] = {}
        for candidate in order:
            if stop():
                return race
            measured[candidate] = cost(candidate)
        race.add_round(measured)
        watch(race)
        if len(race.running) < 2:
            break
    return race


def t_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t distribution, by the expansion of Fisher and Cornish 1960."""
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / math.pow(freedom, power) for power, term in enumerate(terms, start=1))
