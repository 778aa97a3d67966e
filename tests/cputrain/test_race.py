"""The race of a tuning, over costs that are known and noisy: what it finds, in how many trials, how surely."""

import math
import random
from functools import cache

import pytest

from cputrain.studies.tune import Race, Ratio, run_race

CANDIDATES = 200


class NoisyCost:
    """Known costs, with noise on each trial and a drift of the machine that all trials share."""

    def __init__(self, true: list[float], *, noise: float, seed: int) -> None:
        self.true, self.noise, self.rng = true, noise, random.Random(seed)
        self.trials, self.drift = 0, 0.0

    def __call__(self, candidate: int) -> float:
        self.trials += 1
        self.drift += self.rng.gauss(0, 0.005)
        return self.true[candidate] * math.exp(self.drift + self.rng.gauss(0, self.noise))


def costs(seed: int, *, gap: float) -> list[float]:
    """The best one is `gap` faster than the second; the others take up to twice as long."""
    rng = random.Random(seed)
    true = [1.0, *(math.exp(rng.uniform(gap, 0.7)) for _ in range(CANDIDATES - 1))]
    rng.shuffle(true)
    return true


@cache
def races(noise: float) -> list[tuple[list[float], NoisyCost, Race]]:
    """Ten races: the true costs, what was measured, the race."""
    found = []
    for seed in range(10):
        true = costs(seed, gap=0.06)
        cost = NoisyCost(true, noise=noise, seed=seed)
        found.append((true, cost, run_race(CANDIDATES, cost, seed=seed, resolution=0.02)))
    return found


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_the_best_of_200_is_found_in_fewer_trials_than_a_grid_of_three_repeats(noise: float) -> None:
    for true, cost, race in races(noise):
        assert true[race.winner()] == 1.0
        assert cost.trials < 3 * CANDIDATES and len(race.running) == 1


def test_a_grid_of_as_many_trials_is_deceived_by_the_noise() -> None:
    """The comparison that justifies the race: the same trials spread evenly over all candidates."""
    right = 0
    for seed, (true, _, race) in enumerate(races(0.05)):
        grid, repeats = NoisyCost(true, noise=0.05, seed=seed), race.trials // CANDIDATES
        means = [sum(math.log(grid(i)) for _ in range(repeats)) for i in range(CANDIDATES)]
        right += true[means.index(min(means))] == 1.0
    assert right < 8


def test_five_races_on_a_noisy_machine_pick_the_same_winner() -> None:
    true = [1.0, 1.31, 1.08, 1.4]
    winners = {
        run_race(4, NoisyCost(true, noise=0.06, seed=seed), seed=seed, resolution=0.02).winner() for seed in range(5)
    }
    assert winners == {0}


def test_the_same_seed_makes_the_same_race() -> None:
    def race(seed: int) -> Race:
        return run_race(20, NoisyCost(costs(1, gap=0.1)[:20], noise=0.05, seed=3), seed=seed, resolution=0.02)

    assert race(1).costs == race(1).costs != race(2).costs


def test_of_equally_fast_candidates_the_first_wins() -> None:
    race = run_race(3, lambda i: (1.004, 1.0, 1.5)[i], seed=1, resolution=0.02)
    assert race.winner() == 0


def test_failed_candidates_are_left_out() -> None:
    race = run_race(3, lambda i: (None, 2.0, 3.0)[i], seed=1, resolution=0.02)
    assert race.winner() == 1 and race.failed == [0] and race.costs[0] == []
    assert not run_race(2, lambda i: None, seed=1, resolution=0.02).running


def test_a_race_ends_when_its_time_is_over_and_a_round_that_is_cut_does_not_count() -> None:
    left = iter([False] * 5)
    race = run_race(3, lambda i: 1.0 + i / 100, seed=1, resolution=0.001, stop=lambda: next(left, True))
    assert [len(each) for each in race.costs] == [1, 1, 1] and len(race.running) > 1


def test_confidence_intervals_hold_the_true_ratio_nearly_always() -> None:
    inside = 0
    for seed in range(100):
        cost = NoisyCost([1.0, 1.02], noise=0.05, seed=seed)
        race = run_race(2, cost, seed=seed, resolution=0.0, stop=lambda cost=cost: cost.trials == 12)
        ratio = race.ratio(0, 1)
        inside += ratio.low <= 1.02 <= ratio.high
    assert inside >= 90


def test_a_race_ends_soon_where_the_winner_is_far_ahead() -> None:
    cost = NoisyCost([1.0, 1.05, 1.1, 1.3, 1.6, 2.0], noise=0.005, seed=1)
    race = run_race(6, cost, seed=1, resolution=0.02)
    assert race.running == [0] and len(race.costs[5]) == 2 and cost.trials < 6 * 8


def test_a_ratio_reads_as_in_a_reason() -> None:
    assert str(Ratio(value=1.312, low=1.27, high=1.359)) == "1.31 (1.27-1.36)"


@pytest.mark.parametrize("count", [2, 3, 6, 30])
def test_a_disturbed_first_trial_neither_costs_the_best_its_place_nor_keeps_others(count: int) -> None:
    """The best candidate's first trial takes twice as long, as if something else ran meanwhile."""
    true = [1.2 + 0.02 * i for i in range(count)]
    true[1] = 1.0
    for seed in range(10):
        cost = NoisyCost(true, noise=0.01, seed=seed)
        seen: list[int] = []

        def disturbed(i: int, cost: NoisyCost = cost, seen: list[int] = seen) -> float:
            seen.append(i)
            return cost(i) * (2.0 if i == 1 and seen.count(1) == 1 else 1.0)

        race = run_race(count, disturbed, seed=seed, resolution=0.02)
        assert race.running == [1], (seed, count)
        assert race.repeated == {(1, 0)} and race.trials == len(seen)
        assert abs(math.log(race.ratio(1, 0).value / 1.2)) < 0.05
        assert len(seen) <= 4 * count + 16


def test_a_candidate_that_is_disturbed_later_is_measured_again_in_the_same_scale() -> None:
    """All become slower by 50 % from the second round on; candidate 2 is also disturbed in it."""
    slow = {0: iter([1.0, 1.5, 1.5]), 1: iter([1.1, 1.65, 1.65]), 2: iter([1.2, 5.0, 1.8]), 3: iter([1.3, 1.95, 1.95])}
    race = Race(count=4, resolution=0.02)
    for _ in range(2):
        race.add_round({i: next(slow[i]) for i in range(4)})
    assert race.disturbed() == [(2, 1)]
    race.repeat(2, 1, 1.8)
    assert race.costs[2] == pytest.approx([math.log(1.2), math.log(1.8)]) and not race.disturbed()
    race.add_round({i: next(slow[i]) for i in range(4)})
    race.repeat(0, 0, 1.5)
    assert race.costs[0][0] == pytest.approx(math.log(1.0)), "measured in the last round's conditions"
    race.drop_slower()
    assert race.running == [0]


def test_a_noisy_machine_repeats_few_trials() -> None:
    cost = NoisyCost([1.0] * 20, noise=0.1, seed=1)
    race = run_race(20, cost, seed=1, resolution=0.02, stop=lambda: cost.trials > 400)
    assert len(race.repeated) < 8


def test_without_time_to_repeat_a_disturbed_trial_nothing_is_dropped() -> None:
    seen: list[int] = []

    def cost(i: int) -> float:
        seen.append(i)
        return (1.0 + i / 5) * (2.0 if i == 0 and seen.count(0) == 1 else 1.0)

    race = run_race(6, cost, seed=1, resolution=0.02, stop=lambda: len(seen) == 12)
    assert race.running == list(range(6)) and race.disturbed() == [(0, 0)] and not race.repeated
