"""A tuning on this machine: the present plan, what may be faster, and the race between them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from affinity.errors import RunError
from affinity.planner.runtime import installed_allocators, target_of
from affinity.wording import counted
from cputrain.bench.model_rank import precisions
from cputrain.launch.local import PlannedTraining
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import EvaluateSection, Recipe, SweepSection
from cputrain.recipe.schema.data import SYNTHETIC
from cputrain.tune.candidates import CHANGING, Choices, PlanCandidate, Values, choices_of, plan_candidates
from cputrain.tune.engines import engines_here
from cputrain.tune.race import Race, run_race
from cputrain.tune.result import Result
from cputrain.tune.trials import trial_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a tuning is done: counted steps of a trial, relative difference that does not matter, seed of the order, and
    the monotonic time at which it ends, None for no limit."""

    steps: int
    resolution: float
    seed: int
    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates that a race tries, the present plan first; and those that this host cannot run, and why."""

    tried: Sequence[PlanCandidate]
    refused: Sequence[tuple[Values, str]]


def tuned_recipe(name: str, settings: Sequence[str]) -> Recipe:
    """The recipe to tune: with generated images where its own are not here; nothing but steps."""
    recipe = load_recipe(name, settings)
    if not recipe.data.generated and (recipe.data.path is None or not Path(recipe.data.path).exists()):
        recipe = load_recipe(name, (*settings, f"data.path={SYNTHETIC}"))
    return recipe.model_copy(update={"evaluate": EvaluateSection(), "sweep": SweepSection(), "ema_decay": None})


def choices_here(own: PlannedTraining, axes: Sequence[str], env: Mapping[str, str]) -> Choices:
    """What this machine offers for a training of which these axes are varied."""
    return choices_of(
        own.plan.machine,
        own.recipe,
        own,
        allocators=installed_allocators(target_of(())),
        engines=engines_here(own.recipe.precision, axes, env),
        has_bf16="bf16" in precisions(own.plan.machine.isa),
    )


def plans(own: PlannedTraining, choices: Choices, axes: Sequence[str], env: Mapping[str, str]) -> Candidates:
    """The candidates that train what the recipe says, in other workers."""
    return _candidates(own, choices.all([axis for axis in axes if axis not in CHANGING]), env)


def changes(winner: PlanCandidate, choices: Choices, axes: Sequence[str], env: Mapping[str, str]) -> Candidates:
    """A plan, and with it other local batches and precisions, which change what is trained."""
    changing = choices.all([axis for axis in axes if axis in CHANGING])
    return _candidates(winner.planned, [(*winner.values, *values) for values in changing], env)


def _candidates(own: PlannedTraining, values: Sequence[Values], env: Mapping[str, str]) -> Candidates:
    tried, refused = plan_candidates(own, values, env)
    return Candidates(tried=tried, refused=refused)


def race_here(
    candidates: Candidates, settings: Settings, env: Mapping[str, str], progress: Callable[[int, int], None]
) -> Result:
    """Measure the candidates. `progress` gets the trials that are done and those that are left, by estimate.

    Raises RunError where not even one round was completed, or no candidate runs.
    """
    measured, clock = trial_cost(candidates.tried, settings.steps, env), _Clock(deadline=settings.deadline)
    done, left = 0, len(candidates.tried)

    def cost(index: int) -> float | None:
        nonlocal done, left
        with clock.trial():
            found = measured(index)
        done, left = done + 1, max(left - 1, 0)
        progress(done, left)
        return found

    def watch(race: Race) -> None:
        nonlocal left
        left = race.trials_left()
        progress(done, left)

    race = run_race(
        len(candidates.tried),
        cost,
        seed=settings.seed,
        resolution=settings.resolution,
        stop=clock.is_over,
        watch=watch,
    )
    if not race.running:
        raise RunError("no plan runs: the reasons are above")
    if not race.trials:
        raise RunError(
            f"the time is over before {counted(len(candidates.tried), 'plan')} were tried once: a trial takes up to "
            f"{clock.longest_s:.0f} s; give more --time, or fewer --axes"
        )
    return Result(candidates=candidates.tried, race=race)


@dataclass(slots=True, kw_only=True)
class _Clock:
    """The time of a race: until `deadline`, which no trial may exceed that takes as long as the longest so far."""

    deadline: float | None
    longest_s: float = 0.0

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Time a trial."""
        started = time.monotonic()
        yield
        self.longest_s = max(self.longest_s, time.monotonic() - started)

    def is_over(self) -> bool:
        """Whether another trial may end too late."""
        return self.deadline is not None and time.monotonic() + self.longest_s > self.deadline
