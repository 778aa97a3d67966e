"""Learning-rate range test (Smith 2017, arXiv:1506.01186, 3.3): loss over an exponentially growing learning rate.

The suggestion is the learning rate at which the smoothed loss falls fastest over the logarithm of the rate, as in
fastai and Lightning.
"""

import gc
import json
import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from cputrain.affinity.wording import plural
from cputrain.comm.group import all_reduce_sum, end_group
from cputrain.files import write_text
from cputrain.measurements import auto_line
from cputrain.studies.svg import plot_svg
from cputrain.training.batches import endless_batches
from cputrain.training.building import build_state
from cputrain.training.session import Session
from cputrain.training.step import StepSettings, train_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING = 0.9  # weight of earlier losses in the moving average
DIVERGED = 4.0  # times the lowest smoothed loss, at which the test ends (fastai)
MIN_FALL = 0.02  # of the first smoothed loss; a smaller fall is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTest:
    """Learning rates of a test and the loss of each step; the last loss may be NaN or infinite, which ends the test."""

    lrs: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def smoothed(self) -> tuple[float, ...]:
        """Bias-corrected moving average of the losses (Kingma and Ba 2015, 3)."""
        sums = accumulate(self.losses, lambda mean, loss: SMOOTHING * mean + (1 - SMOOTHING) * loss, initial=0.0)
        return tuple(mean / (1 - SMOOTHING**step) for step, mean in enumerate(sums) if step > 0)

    @property
    def diverged(self) -> bool:
        """Whether the loss is not finite, or far above its minimum."""
        smoothed = self.smoothed
        return not math.isfinite(smoothed[-1]) or smoothed[-1] > DIVERGED * min(smoothed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A learning rate, or None if the test shows none, and the reason."""

    lr: float | None
    why: str


def lr_of_step(step: int, steps: int, low: float, high: float) -> float:
    """Return the learning rate of a step, counted from 0: from `low` to `high` in equal factors."""
    return float(low * (high / low) ** (step / (steps - 1)))


def suggest(test: RangeTest) -> Suggestion:
    """Suggest the learning rate at which the smoothed loss falls fastest before its minimum."""
    smoothed = [loss for loss in test.smoothed if math.isfinite(loss)]
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__) if smoothed else 0
    if lowest < 2 or smoothed[0] - smoothed[lowest] < MIN_FALL * abs(smoothed[0]):
        why = "the loss does not fall: start with a lower rate (--from), or run more steps (--steps)"
        if not test.diverged and lowest >= 2:
            why = "the loss hardly falls up to the highest rate: raise --to, or run more steps (--steps)"
        return Suggestion(lr=None, why=why)
    logs = [math.log(lr) for lr in test.lrs[: lowest + 1]]
    slopes = [
        (smoothed[step + 1] - smoothed[step - 1]) / (logs[step + 1] - logs[step - 1]) for step in range(1, lowest)
    ]
    steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__)
    end = "diverges after that" if test.diverged else "does not diverge up to the highest learning rate"
    return Suggestion(
        lr=test.lrs[steepest],
        why=f"the loss falls fastest here; its minimum is at {test.lrs[lowest]:.3g}, and it {end}",
    )


def range_test_svg(title: str, test: RangeTest, suggestion: Suggestion) -> str:
    """Plot as SVG the loss of each step and its moving average over the learning rate, and the suggested rate."""

    def draw(axes: "Axes") -> None:
        points = [(lr, loss) for lr, loss in zip(test.lrs, test.losses, strict=True) if math.isfinite(loss)]
        smoothed = [(lr, loss) for lr, loss in zip(test.lrs, test.smoothed, strict=True) if math.isfinite(loss)]
        axes.plot(*zip(*points, strict=True), ".", color="0.7", label="loss of a step")
        axes.plot(*zip(*smoothed, strict=True), color="C0", label="moving average")
        if suggestion.lr is not None:
            axes.axvline(suggestion.lr, color="C3", linestyle="--", label=f"suggested: {suggestion.lr:.3g}")
        axes.set_xscale("log")
        later = [loss for _, loss in smoothed[: max(2, len(smoothed) // 2)]]
        axes.set_ylim(top=max(1.3 * smoothed[0][1], 1.05 * max(later)))

    return plot_svg(draw, (7, 4.5), xlabel="learning rate", ylabel="training loss", title=title)


def range_test(session: Session, *, steps: int, low: float, high: float) -> RangeTest:
    """Train up to `steps` steps with learning rates from `low` to `high`, ending when the loss diverges. Returns the
    mean losses of all ranks, equal on all ranks."""
    recipe, rank, startup = session.recipe, session.rank, session.context.startup
    startup.phase("building the network and the optimizer")
    state, _ = build_state(session, None)
    startup.done()
    gc.freeze()
    batches, sizes = endless_batches(session), session.sizes
    lrs: list[float] = []
    losses: list[float] = []
    for step in range(steps):
        images = sizes.images_until(step + 1) - sizes.images_until(step)
        settings = StepSettings(
            images=images,
            passes=sizes.accumulation_steps,
            lr=lr_of_step(step, steps, low, high),
            weight_decay=recipe.at_epoch(0).weight_decay,
            clip_norm=recipe.optim.clip_norm,
            skips_non_finite=recipe.on_nan == "skip",
            key=(step, rank.rank),
        )
        result = train_step(state, batches, settings, session.task)
        fraction = session.local_batches[rank.rank] / sum(session.local_batches)
        (loss,) = all_reduce_sum(result.loss * fraction)
        lrs.append(settings.lr)
        losses.append(loss if result.finite else math.nan)
        if RangeTest(lrs=tuple(lrs), losses=tuple(losses)).diverged:
            break
    end_group(session.group)
    return RangeTest(lrs=tuple(lrs), losses=tuple(losses))


def find_lr(session: Session, steps: int, *, low: float, high: float, picture: Path | None, as_json: bool) -> None:
    """Run a range test as one rank; rank 0 prints the suggestion, and writes the picture if one is named."""
    recipe, batch = session.recipe, session.sizes.global_batch
    test = range_test(session, steps=steps, low=low, high=high)
    if not session.is_main_rank:
        return
    suggestion = suggest(test)
    if picture is not None:
        title = f"{recipe.name}: {recipe.optim.name}, global batch {batch:,}"
        write_text(picture, range_test_svg(title, test, suggestion))
    if as_json:
        losses, smoothed = ([x if math.isfinite(x) else None for x in curve] for curve in (test.losses, test.smoothed))
        points = zip(test.lrs, losses, smoothed, strict=True)
        values = {"recipe": recipe.name, "optimizer": recipe.optim.name, "global_batch": batch, "rate": suggestion.lr}
        rows = [{"rate": lr, "loss": loss, "smoothed": mean} for lr, loss, mean in points]
        print(json.dumps({**values, "why": suggestion.why, "steps": rows}, indent=1), flush=True)
        return
    suggested = "no learning rate" if suggestion.lr is None else f"schedule.peak_rate={suggestion.lr:.3g}"
    if session.precision_why:
        print(auto_line(recipe.precision, session.precision_why), flush=True)
    print(f"{suggested}: {suggestion.why}", flush=True)
    print(f"{plural(len(test.lrs), 'step')} with a global batch of {batch:,}, {recipe.optim.name}", flush=True)
    if picture is not None:
        print(picture, flush=True)
