"""Learning rates as pure functions of the step: a gradual warm-up, then one of several decays.

Step n is the n-th update, counted from 0. Sources: linear: the 256-node ResNet-50 run (0.1 -> 4.8 in 260 steps, 0 at
4,680); poly: MLPerf's ResNet-50 (power 2, end rate 1e-4); poly_from_start: Intel Caffe, whose polynomial counts the
warm-up's steps too; steps: Goyal et al. 2017, arXiv:1706.02677; cosine: Loshchilov and Hutter 2017, arXiv:1608.03983.
"""

import math

from cputrain.recipe.derivation import TrainingSizes
from cputrain.recipe.schema import Recipe, ScheduleSection


def lr_at(step: int, recipe: Recipe, sizes: TrainingSizes) -> float:
    """The learning rate of a step: the schedule's, or that of the last phase so far that restarts it."""
    rate = scheduled_lr(step, recipe.schedule, sizes)
    for phase in recipe.phases:
        first = phase.from_epoch * sizes.steps_per_epoch
        if phase.restart_rate is not None and step >= first:
            remaining = max(sizes.total_steps - step, 0) / (sizes.total_steps - first)
            rate = float(phase.restart_rate * remaining**phase.restart_power)
    return rate


def scheduled_lr(step: int, schedule: ScheduleSection, sizes: TrainingSizes) -> float:
    """The schedule's learning rate of a step: linear from start_rate to the peak during the warm-up, then its decay."""
    warmup, total, peak = sizes.warmup_steps, sizes.total_steps, sizes.peak_rate
    if step < warmup:
        return schedule.start_rate + (peak - schedule.start_rate) * step / warmup
    if schedule.name == "constant":
        return peak
    if schedule.name == "steps":
        passed = sum(step >= round(epoch * sizes.steps_per_epoch) for epoch in schedule.milestones)
        return peak * schedule.milestone_factor**passed
    end = schedule.end_rate
    if step >= total:
        return end
    first = 0 if schedule.name == "poly_from_start" else warmup
    remaining = (total - step) / (total - first)
    if schedule.name == "cosine":
        return end + (peak - end) * (1 + math.cos(math.pi * (1 - remaining))) / 2
    return end + (peak - end) * (remaining if schedule.name == "linear" else remaining**schedule.power)
