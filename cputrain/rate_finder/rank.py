"""A rank of a range test: training steps with a growing rate, of which nothing is saved."""

import gc
import math
from collections.abc import Iterator, Mapping
from itertools import count

from cputrain.affinity.kernel.observe import Observed
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.ranks.rank import Rank
from cputrain.comm.group import all_reduce_sum, end_group
from cputrain.data.loader import Batch
from cputrain.launch.rank_process import Startup
from cputrain.rate_finder.curve import RangeTest, rate_at
from cputrain.recipe.derivation import settings_at
from cputrain.recipe.schema import Recipe
from cputrain.training.entry import build_state
from cputrain.training.feed import feed_of, training_batches
from cputrain.training.session import Session, start_session
from cputrain.training.step import StepSettings, train_step


def range_test(
    recipe: Recipe,
    rank: Rank,
    worker: WorkerPlan,
    observed: Observed,
    env: Mapping[str, str],
    *,
    steps: int,
    low: float,
    high: float,
    check: bool,
    startup: Startup,
) -> tuple[RangeTest, int]:
    """Train up to `steps` steps with rates from `low` to `high`; ends where the loss diverges. The mean losses of all
    ranks, and the global batch; the same on all ranks. Raises InputError where the recipe does not fit."""
    session = start_session(recipe, rank, worker, observed, env, check=check, phase=startup.phase)
    startup.phase("building the network and the optimizer")
    state, _ = build_state(session, None)
    startup.done()
    gc.freeze()
    batches, sizes = _batches(session), session.sizes
    rates: list[float] = []
    losses: list[float] = []
    for step in range(steps):
        images = sizes.images_until(step + 1) - sizes.images_until(step)
        settings = StepSettings(
            images=images,
            passes=sizes.accumulation_steps,
            lr=rate_at(step, steps, low, high),
            weight_decay=settings_at(recipe, 0).weight_decay,
            key=(step, rank.rank),
        )
        result = train_step(state, batches, settings, recipe, session.task)
        share = session.ranks.local_batches[rank.rank] / sum(session.ranks.local_batches)
        (loss,) = all_reduce_sum(result.loss * share)
        rates.append(settings.lr)
        losses.append(loss if result.finite else math.nan)
        if RangeTest(rates=tuple(rates), losses=tuple(losses)).diverged:
            break
    end_group(session.ranks.group)
    return RangeTest(rates=tuple(rates), losses=tuple(losses)), sizes.global_batch


def _batches(session: Session) -> Iterator[Batch]:
    """This rank's batches, epoch after epoch."""
    feed, steps = feed_of(session), session.sizes.steps_per_epoch
    for epoch in count():
        yield from training_batches(feed, epoch % session.recipe.epochs, 0, steps)
