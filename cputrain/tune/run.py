"""Tune: engines, trials, rounds."""

import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.openmp import installed_allocators, target_of
from cputrain.affinity.planner.records import ENGINE, Record
from cputrain.affinity.planner.request import tuning_name
from cputrain.affinity.wording import counted
from cputrain.bench.model import Spec, measure_training, precisions
from cputrain.launch.local import PlannedTraining
from cputrain.measurements import new_record
from cputrain.native_build import compiler
from cputrain.recipe.loading import load_recipe
from cputrain.recipe.schema import SYNTHETIC, EvaluateSection, Recipe, SweepSection
from cputrain.training.ipex import has_ipex
from cputrain.tune.candidates import CHANGING, Choices, PlanCandidate, Values, choices_of, plan_candidates, with_output
from cputrain.tune.result import Cost, Race, Result, plan_values, run_race


def engines_here(precision: str, axes: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The engines to try, native first if it can be: torch.compile only where nothing else is varied, because it takes
    a minute to compile in each trial."""
    can_compile = compiler(env) is not None
    known = {
        "native": can_compile and precision != "float64",
        "eager": True,
        "compile": can_compile and tuple(axes) == ("engine",),
        "ipex": has_ipex() and precision != "float64",
    }
    return tuple(name for name, usable in known.items() if usable)


def engine_record(result: Result, command: str) -> Record | None:
    """The engine of the fastest plan, and by how much it is faster than the first one with this plan; None where
    engines were not compared, or the network's size is not known."""
    winner = result.winner
    plan = winner.planned.plan
    name, tried = tuning_name(plan.request), _tried(result)
    if name is None or len(tried) < 2:
        return None
    first, best = next(iter(tried.items())), dict(winner.values)["engine"]
    why = f"measured: {best} is the fastest of {', '.join(tried)}"
    if first[0] != best:
        why = f"measured: {best} is {result.race.ratio(result.race.winner(), first[1])} times as fast as {first[0]}"
    return new_record(plan.machine, ENGINE, name, {"engine": best, "why": why}, command=command)


def _tried(result: Result) -> dict[str, int]:
    """The engines that were measured with the winner's plan, and their candidates."""
    own = plan_values(result.winner)
    return {
        dict(result.candidates[i].values)["engine"]: i
        for i in result.race.tried
        if plan_values(result.candidates[i]) == own and "engine" in dict(result.candidates[i].values)
    }


logger = logging.getLogger(__name__)
WARM_UP = 2  # steps that do not count: the first ones allocate memory and make oneDNN's code


def trial_cost(candidates: Sequence[PlanCandidate], steps: int, env: Mapping[str, str]) -> Cost:
    """The cost of a candidate: its median step's seconds for each image. A failure is logged once and costs None.

    Raises KeyboardInterrupt where SIGINT or SIGTERM has stopped the trial.
    """
    spec = Spec(warm_up=WARM_UP, steps=steps, profiled=0, limits=(), quick=False)

    def cost(index: int) -> float | None:
        candidate = candidates[index]
        with tempfile.TemporaryDirectory() as folder:
            planned = with_output(candidate, str(Path(folder) / "run"))
            try:
                first, *_ = measure_training(planned, spec, env, what=candidate.name)
            except (InputError, RunError) as error:
                logger.warning("%s", error)
                return None
        seconds: list[float] = [step["seconds"] for step in first["steps"]]
        return median(seconds) / float(first["images"])

    return cost


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
    measured = trial_cost(candidates.tried, settings.steps, env)
    done, left, longest_s = 0, len(candidates.tried), 0.0

    def cost(index: int) -> float | None:
        nonlocal done, left, longest_s
        started = time.monotonic()
        found = measured(index)
        longest_s = max(longest_s, time.monotonic() - started)
        done, left = done + 1, max(left - 1, 0)
        progress(done, left)
        return found

    def is_over() -> bool:
        """Whether another trial, as long as the longest so far, ends too late."""
        return settings.deadline is not None and time.monotonic() + longest_s > settings.deadline

    def watch(race: Race) -> None:
        nonlocal left
        left = len(race.running) if len(race.running) > 1 else 0  # one more round at least
        progress(done, left)

    race = run_race(
        len(candidates.tried), cost, seed=settings.seed, resolution=settings.resolution, stop=is_over, watch=watch
    )
    if not race.running:
        raise RunError("no plan runs: the reasons are above")
    if not race.trials:
        raise RunError(
            f"the time is over before {counted(len(candidates.tried), 'plan')} were tried once: a trial takes up to "
            f"{longest_s:.0f} s; give more --time, or fewer --axes"
        )
    return Result(candidates=candidates.tried, race=race)
