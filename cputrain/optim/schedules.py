"""Learning rates as pure functions of the step: a gradual warm-up, then one of several ways down.

Step n is the n-th update, counted from 0. Sources: linear: the 256-node ResNet-50 run (0.1 -> 4.8 in 260 steps, 0 at
4,680); poly: MLPerf's ResNet-50 (power 2, end rate 1e-4); poly_of_all: Intel Caffe, whose polynomial counts the
warm-up's steps too; steps: Goyal et al. 2017, arXiv:1706.02677; cosine: Loshchilov and Hutter 2017, arXiv:1608.03983.
"""

import math

from cputrain.recipe.derivation import Numbers
from cputrain.recipe.schema import Recipe, ScheduleSection


def rate_of(step: int, recipe: Recipe, numbers: Numbers) -> float:
    """The learning rate of a step: the schedule's, or that of the last phase with a rate of its own."""
    begun = [p for p in recipe.phases if p.rate is not None and step >= p.from_epoch * numbers.steps_per_epoch]
    if not begun or begun[-1].rate is None:
        return rate_at(step, recipe.schedule, numbers)
    first = begun[-1].from_epoch * numbers.steps_per_epoch
    left = max(numbers.total_steps - step, 0) / (numbers.total_steps - first)
    return float(begun[-1].rate * left ** begun[-1].power)


def rate_at(step: int, schedule: ScheduleSection, numbers: Numbers) -> float:
    """The learning rate of a step: linear from start_rate to the peak during warm-up, then the schedule's own."""
    warmup, total, peak = numbers.warmup_steps, numbers.total_steps, numbers.peak_rate
    if step < warmup:
        return schedule.start_rate + (peak - schedule.start_rate) * step / warmup
    if schedule.name == "constant":
        return peak
    if schedule.name == "steps":
        passed = sum(step >= round(epoch * numbers.steps_per_epoch) for epoch in schedule.milestones)
        return peak * schedule.factor**passed
    end = schedule.end_rate
    if step >= total:
        return end
    begin = 0 if schedule.name == "poly_of_all" else warmup
    left = (total - step) / (total - begin)
    if schedule.name == "cosine":
        return end + (peak - end) * (1 + math.cos(math.pi * (1 - left))) / 2
    return end + (peak - end) * (left if schedule.name == "linear" else left**schedule.power)
