"""Learning rates of large-batch training: a linear warm-up (Goyal et al. 2017, arXiv:1706.02677, 2.2), then a decay.

They are pure functions of the step, for any loop: `from cputrain.schedule import Schedule, lr_at`. Sources of the
decays: linear: the 256-node ResNet-50 run (0.1 -> 4.8 in 260 steps, 0 at 4,680); poly: MLPerf's ResNet-50 (power 2, end
rate 1e-4); poly_from_start: Intel Caffe, whose polynomial also counts the warm-up steps; steps: Goyal et al. 2017;
cosine: Loshchilov and Hutter 2017, arXiv:1608.03983.
"""

from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import Literal, get_args

__all__ = ["Decay", "Schedule", "lr_at"]

Decay = Literal["linear", "poly", "poly_from_start", "steps", "cosine", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate of each step: a linear warm-up from start_lr to peak_lr, then a decay.

    total_steps: steps (updates of the weights) of the training. peak_lr: the rate at the end of the warm-up.
    warmup_steps: 0 begins at peak_lr. start_lr: the rate of step 0 if there is a warm-up.
    end_lr: the rate from step total_steps on, except for steps and constant.
    decay: linear: a straight line to end_lr; poly: end_lr + (peak_lr - end_lr) x (remaining part of the steps after the
        warm-up)^power; poly_from_start: the same, but of all steps; cosine: half a cosine; steps: peak_lr x
        milestone_factor for each milestone passed; constant: peak_lr.
    milestones: steps, for decay="steps".
    restarts: (step, lr, power) of each restart, in the order of the steps: from that step on, the rate decays from this
        lr to 0 at total_steps, as a polynomial of this power.
    Raises ValueError if a number does not fit.
    """

    total_steps: int
    peak_lr: float
    warmup_steps: int = 0
    start_lr: float = 0.0
    end_lr: float = 0.0
    decay: Decay = "linear"
    power: float = 2.0
    milestones: tuple[int, ...] = ()
    milestone_factor: float = 0.1
    restarts: tuple[tuple[int, float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.decay not in get_args(Decay):
            raise ValueError(f"decay={self.decay!r} is none of {', '.join(get_args(Decay))}")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is not between 0 and total_steps={self.total_steps}")
        for name in ("peak_lr", "start_lr", "end_lr", "power", "milestone_factor"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} is not a number of 0 or more")
        if any(step >= self.total_steps or not (isfinite(lr) and lr >= 0) for step, lr, _ in self.restarts):
            raise ValueError(f"restarts={self.restarts} have a step after the last one, or an lr below 0")


def lr_at(step: int, schedule: Schedule) -> float:
    """Return the learning rate of a step, counted from 0."""
    for first, lr, power in reversed(schedule.restarts):
        if step >= first:
            return float(lr * (max(schedule.total_steps - step, 0) / (schedule.total_steps - first)) ** power)
    warmup, total, peak, end = schedule.warmup_steps, schedule.total_steps, schedule.peak_lr, schedule.end_lr
    if step < warmup:
        return schedule.start_lr + (peak - schedule.start_lr) * step / warmup
    if schedule.decay == "constant":
        return peak
    if schedule.decay == "steps":
        return float(peak * schedule.milestone_factor ** sum(step >= milestone for milestone in schedule.milestones))
    if step >= total:
        return end
    first = 0 if schedule.decay == "poly_from_start" else warmup
    remaining = (total - step) / (total - first)
    if schedule.decay == "cosine":
        return end + (peak - end) * (1 + cos(pi * (1 - remaining))) / 2
    return float(end + (peak - end) * (remaining if schedule.decay == "linear" else remaining**schedule.power))
