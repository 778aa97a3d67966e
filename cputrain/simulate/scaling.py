"""Predictions from 1 to thousands of hosts, and the search for a plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.request import PROFILES, is_phi
from cputrain.affinity.planner.rules import MOST_COMM_CORES
from cputrain.affinity.wording import either
from cputrain.models.sizes import COPIES
from cputrain.recipe.derivation import TrainingSizes, derive
from cputrain.recipe.schema import LINE, Recipe
from cputrain.simulate.assumptions import Constants, constants_of
from cputrain.simulate.network import BYTES, Setup, Speed
from cputrain.simulate.predict import Scenario, core_flops_of, scenario_setup, speed_at
from cputrain.simulate.step import ALGORITHMS, Step, seconds_at, step_of, work_of

IMAGENET_TRAIN, IMAGENET_VAL, POINTS = 1_281_167, 50_000, 100
SECONDS_PER_HOUR, JOULES_PER_KWH = 3600.0, 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A scenario on `nodes` hosts with `workers` ranks together.

    `low` and `high` bound images/s; `efficiency` is relative to as many single hosts, under their own plan or under
    this one, whichever is faster there. `time_to_train_s`, `node_hours` and `energy_kwh` are None where images or watts
    are not known.
    """

    nodes: int
    workers: int
    images_per_s: float
    low: float
    high: float
    efficiency: float
    step_s: float
    exposed_s: float
    time_to_train_s: float | None
    straggler_s: float
    global_batch: int
    node_hours: float | None
    energy_kwh: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A scenario's machine under one set of assumptions."""

    scenario: Scenario
    constants: Constants
    speed: Speed

    def step(self, setup: Setup) -> Step:
        """The step of a setup of this scenario."""
        return step_of(setup, self.speed, self.constants)

    def images_per_s(self, setup: Setup) -> float:
        """Images/s of all hosts."""
        return setup.global_batch / seconds_at(setup, self.constants)(self.speed)


def model_of(scenario: Scenario, constants: Constants | None = None) -> Model:
    """The scenario's machine, as fast as its reference says under these assumptions; None: the scenario's own."""
    constants = constants or constants_of(scenario.assumptions)
    flops = core_flops_of(scenario.reference, constants)
    return Model(
        scenario=scenario,
        constants=constants,
        speed=speed_at(
            flops,
            machine=scenario.machine,
            measured=scenario.measured,
            precision=scenario.recipe.precision,
            constants=constants,
        ),
    )


def rows_of(scenario: Scenario, nodes: Sequence[int], *, watts: float | None = None) -> tuple[Row, ...]:
    """A row for each number of hosts, with the range of its images/s. Raises InputError where one does not fit."""
    model, setups = model_of(scenario), [scenario_setup(scenario, count) for count in nodes]
    single = model.images_per_s(scenario_setup(scenario, 1))
    rates = [model.images_per_s(setup) for setup in setups]
    deviations = _deviations(scenario, setups, rates)
    return tuple(
        _row(model, setup, rate, (low, high), single, watts)
        for setup, rate, (low, high) in zip(setups, rates, deviations, strict=True)
    )


def _row(
    model: Model, setup: Setup, rate: float, deviation: tuple[float, float], single: float, watts: float | None
) -> Row:
    step = model.step(setup)
    seconds = time_to_train(model, setup, step.step_s)
    return Row(
        nodes=setup.hosts,
        workers=setup.ranks,
        images_per_s=rate,
        low=rate - deviation[0],
        high=rate + deviation[1],
        efficiency=rate / (setup.hosts * max(single, model.images_per_s(replace(setup, hosts=1, link=None)))),
        step_s=step.step_s,
        exposed_s=step.exposed_s,
        straggler_s=step.straggler_s,
        global_batch=setup.global_batch,
        time_to_train_s=seconds,
        node_hours=None if seconds is None else setup.hosts * seconds / SECONDS_PER_HOUR,
        energy_kwh=None if seconds is None or watts is None else watts * setup.hosts * seconds / JOULES_PER_KWH,
    )


def _deviations(scenario: Scenario, setups: list[Setup], rates: list[float]) -> list[tuple[float, float]]:
    """How far images/s may fall and rise: each assumption at both ends of its range, alone, and the squares added."""
    falls, rises = [0.0] * len(rates), [0.0] * len(rates)
    for changed, constants in _alternatives(scenario):
        try:
            other = model_of(changed, constants)
        except InputError:  # the reference's rate is out of reach with this value: it cannot be the true one
            continue
        for i, setup in enumerate(setups):
            linked = replace(setup, link=changed.link) if setup.link is not None else setup
            change = other.images_per_s(linked) - rates[i]
            (rises if change > 0 else falls)[i] += change * change
    return [(fall**0.5, rise**0.5) for fall, rise in zip(falls, rises, strict=True)]


def _alternatives(scenario: Scenario) -> list[tuple[Scenario, Constants]]:
    found, usual = [], constants_of(scenario.assumptions)
    for assumption in scenario.assumptions:
        if assumption.name in _unused(scenario):
            continue
        for value in (assumption.low, assumption.high):
            found.append((scenario, replace(usual, **{assumption.name: value})))
    for latency in scenario.link.latency_range_s:
        found.append((replace(scenario, link=replace(scenario.link, latency_s=latency)), usual))
    for rate in scenario.reference.bounds:
        reference = replace(scenario.reference, images_per_s=rate)
        found.append((replace(scenario, reference=reference), usual))
    return found


def _unused(scenario: Scenario) -> set[str]:
    """The assumptions that the scenario's images/s do not depend on."""
    phi = set() if is_phi(scenario.machine) else {"phi_core_slowness"}
    tcp = set() if scenario.link.name == "ethernet" else {"tcp_move_bytes_per_s"}
    gloo = set() if scenario.recipe.comm.backend == "gloo" else {"gloo_move_bytes_per_s", "gloo_bf16_slowness"}
    return {"snapshot_bytes_per_s", "checkpoint_bytes_per_s", "evaluation_start_s"} | phi | tcp | gloo


def time_to_train(model: Model, setup: Setup, step_s: float) -> float | None:
    """Seconds from the first step to the last checkpoint; None where the number of training images is unknown."""
    recipe, images = model.scenario.recipe, training_images(model.scenario.recipe)
    if images is None:
        return None
    sizes = derive(recipe, ppn=setup.workers, nodes=setup.hosts, images=images)
    steps = sizes.last_step(recipe.max_steps)
    epochs = steps / sizes.steps_per_epoch
    evaluations_s = _evaluations_s(model, setup, sizes, epochs)
    return steps * step_s + evaluations_s + _checkpoints_s(model, setup, sizes, steps, step_s)


def training_images(recipe: Recipe) -> int | None:
    """Training images as far as the recipe knows them without its data."""
    if recipe.data.images_per_epoch or recipe.data.train_images:
        return recipe.data.train_images or recipe.data.images_per_epoch
    if recipe.data.generated:
        return POINTS if recipe.data.path == LINE else IMAGENET_TRAIN
    return None


def _evaluations_s(model: Model, setup: Setup, sizes: TrainingSizes, epochs: float) -> float:
    """Evaluations of as large a share of images as ImageNet's validation images are."""
    if model.scenario.recipe.data.generated:
        return 0.0
    work = work_of(setup, model.speed, model.constants)
    images = sizes.images_per_epoch * IMAGENET_VAL / IMAGENET_TRAIN
    each = model.constants.evaluation_start_s + images / setup.ranks * sum(work.forward_s) / setup.local_batch
    every = model.scenario.recipe.evaluate.every_epochs
    return each * (1 if every is None else max(1, int(epochs // every)))


def _checkpoints_s(model: Model, setup: Setup, sizes: TrainingSizes, steps: int, step_s: float) -> float:
    """What steps wait for while checkpoints are copied, and the end while the last one is written."""
    recipe = model.scenario.recipe
    weights = sum(BYTES * sum(layer.weights) for layer in setup.layers)
    size = weights * (1 + COPIES[recipe.optim.name])
    saved = checkpoints_saved(recipe, steps, sizes.steps_per_epoch, step_s)
    return saved * size / model.constants.snapshot_bytes_per_s + size / model.constants.checkpoint_bytes_per_s


def checkpoints_saved(recipe: Recipe, steps: int, steps_per_epoch: int, step_s: float) -> int:
    """How many checkpoints a training of so many steps saves: at ends of epochs, of which those with an evaluation
    count too, at its own end, and within epochs, where the minutes are counted from the one before."""
    section, epochs = recipe.checkpoint, ceil(steps / steps_per_epoch)
    every = [each for each in (section.every_epochs, recipe.evaluate.every_epochs) if each is not None]
    saving = {epoch for each in every for epoch in range(each, epochs + 1, each)} | {epochs}
    if section.every_steps is not None:
        by_steps = set(range(section.every_steps, steps + 1, section.every_steps))
        return len(by_steps | {min(epoch * steps_per_epoch, steps) for epoch in saving})
    if section.every_minutes is None:
        return len(saving)
    ends = [0, *sorted(min(epoch * steps_per_epoch, steps) for epoch in saving)]
    within = sum(int((b - a) * step_s // (60 * section.every_minutes)) for a, b in pairwise(ends))
    return len(saving) + within


def check_global_batch(scenario: Scenario, nodes: Sequence[int]) -> None:
    """Raise InputError where the workers do not divide a fixed global batch, with the nearest numbers that do."""
    batch = scenario.recipe.batch.global_
    if batch is None:
        return
    for count in nodes:
        workers = scenario_setup(scenario, count).workers
        if batch % (count * workers) == 0:
            continue
        fitting = [n for n in range(1, batch // workers + 1) if batch % (n * workers) == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - count))[:2])
        if not near:
            raise InputError(f"batch.global={batch} does not divide among {workers} workers per host: set plan.ppn")
        raise InputError(
            f"batch.global={batch} does not divide among {count} hosts of {workers} workers: the nearest numbers of "
            f"hosts are {either([str(n) for n in near])}"
        )


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
    own = _timed(model, scenario, scenario_setup(scenario, hosts), "the recipe")
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


def _timed(model: Model, scenario: Scenario, setup: Setup, name: str) -> Candidate:
    step = model.step(setup)
    seconds = time_to_train(replace(model, scenario=scenario), setup, step.step_s)
    if seconds is None:
        raise InputError("--best needs the number of training images: set data.train_images=N")
    return Candidate(name=name, setup=setup, images_per_s=setup.global_batch / step.step_s, time_to_train_s=seconds)
