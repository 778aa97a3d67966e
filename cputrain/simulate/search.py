"""The plan with the least time to train, under a limit of the global batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from affinity.errors import InputError
from affinity.planner.profiles import PROFILES
from affinity.planner.rules import MOST_COMM_CORES
from cputrain.recipe.schema import Recipe
from cputrain.simulate.all_reduce import ALGORITHMS
from cputrain.simulate.predict import Scenario, scenario_setup
from cputrain.simulate.scaling import Model, model_of, time_to_train
from cputrain.simulate.setup import Setup

BATCHES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan for a scenario: what it is called, its setup and its time to train in seconds."""

    name: str
    setup: Setup
    images_per_s: float
    time_to_train_s: float


def best_plan(scenario: Scenario, hosts: int, most_images: int | None) -> tuple[Candidate, ...]:
    """The recipe as it is, the published profiles with its batch, and the best plan found, in this order.

    The best plan's global batch is `most_images` at most; None: the recipe's own. Raises InputError where the time to
    train is unknown.
    """
    model = model_of(scenario)
    own = _candidate(model, scenario, hosts, "the recipe")
    others = []
    for name in PROFILES:
        changed = _with_plan(scenario, profile=name)
        if name not in ("auto", scenario.recipe.plan.profile) and (setup := _fitting(changed, hosts)) is not None:
            others.append(_timed(model, changed, setup, f"profile {name}"))
    limit = most_images or own.setup.global_batch
    found = [
        _timed(model, candidate, replace(setup, algorithm=algorithm), "best")
        for candidate, setup in _candidates(scenario, hosts, limit)
        for algorithm in ((scenario.algorithm,) if scenario.algorithm else ALGORITHMS)
    ]
    if not found:
        raise InputError(
            f"--batch-limit {limit:,} leaves less than an image for each worker of {hosts} hosts: raise it"
        )
    allowed = [each for each in (own, *others) if each.setup.global_batch <= limit]
    return (own, *others, replace(min((*allowed, *found), key=lambda each: each.time_to_train_s), name="best"))


def _candidates(scenario: Scenario, hosts: int, limit: int) -> Iterator[tuple[Scenario, Setup]]:
    """Every number of workers, comm cores and local batch that fits the host and the limit."""
    cores, packages = len(scenario.machine.allowed_cores), len(scenario.machine.packages)
    counts = sorted({count for count in (1, 2, 4, 8, 16, packages, 2 * packages, 4 * packages) if count <= cores})
    own = scenario.recipe.batch.local
    for workers in counts:
        most = limit // (hosts * workers)
        batches = sorted({batch for batch in (*BATCHES, own, most) if 1 <= batch <= most})[-3:]
        for comm_cores in range(MOST_COMM_CORES + 1):
            for batch in batches:
                changed = _with_plan(scenario, ppn=workers, comm_cores=comm_cores, batch=batch)
                setup = _fitting(changed, hosts)
                if setup is not None:
                    yield changed, setup


def _with_plan(
    scenario: Scenario,
    *,
    profile: str = "auto",
    ppn: int | None = None,
    comm_cores: int | None = None,
    batch: int | None = None,
) -> Scenario:
    """The scenario with another plan; `ppn` None: the recipe's. Fixed global batches stay so without `batch`."""
    recipe: Recipe = scenario.recipe
    plan: dict[str, object] = {"profile": profile}
    if ppn is not None:
        plan |= {"ppn": ppn, "comm_cores": comm_cores}
    changes: dict[str, object] = {"plan": recipe.plan.model_copy(update=plan)}
    if batch is not None:
        changes["batch"] = recipe.batch.model_copy(update={"local": batch, "accumulation": 1, "global_": None})
    return replace(scenario, recipe=recipe.model_copy(update=changes))


def _fitting(scenario: Scenario, hosts: int) -> Setup | None:
    """The scenario's setup; None where the host refuses it."""
    try:
        return scenario_setup(scenario, hosts)
    except InputError:
        return None


def _candidate(model: Model, scenario: Scenario, hosts: int, name: str) -> Candidate:
    return _timed(model, scenario, scenario_setup(scenario, hosts), name)


def _timed(model: Model, scenario: Scenario, setup: Setup, name: str) -> Candidate:
    step = model.step(setup)
    seconds = time_to_train(replace(model, scenario=scenario), setup, step.step_s)
    if seconds is None:
        raise InputError("--best needs the number of training images: set data.train_images=N")
    return Candidate(name=name, setup=setup, images_per_s=setup.global_batch / step.step_s, time_to_train_s=seconds)
