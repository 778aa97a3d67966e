"""Predict a training on one host, from what is measured or published, and on up to thousands; and search for a plan."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import NOTHING_MEASURED, Request, plan_machine
from cputrain.affinity.planner.request import MEMORY, PROFILES, Measured, is_phi
from cputrain.affinity.planner.rules import MOST_COMM_CORES
from cputrain.affinity.topology.catalog import named_machine, processor_facts
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.wording import either, first_named
from cputrain.launch.local import request_of
from cputrain.models.sizes import state_copies
from cputrain.recipe.derivation import TrainingSizes, derive
from cputrain.recipe.schema import (
    LINE,
    SYNTHETIC,
    BatchSection,
    DataSection,
    ModelSection,
    OptimSection,
    PlanSection,
    Recipe,
)
from cputrain.simulate.assumptions import (
    CONSTANTS,
    FLOP_PER_BYTE,
    Assumption,
    Constants,
    Link,
    PublishedRun,
    constants_of,
    link_of,
    machines_with_rates,
    measured_assumptions,
    runs_on,
    starting_run,
)
from cputrain.simulate.step import (
    ALGORITHMS,
    BYTES,
    Layer,
    MeasuredTraining,
    Measurement,
    Setup,
    Speed,
    Step,
    as_measured,
    layers_of,
    seconds_at,
    setup_of,
    slow_as,
    step_of,
    work_of,
)

SLOWEST, FASTEST = 1e7, 1e15  # FLOP/s of a core that a rate may mean
PRECISE, TRIES = 1e-6, 100
MOST_TIMES = 10  # that a network may be larger or smaller than that whose rate it is predicted from
NO_LINK = link_of("opa")  # of a single host, which uses none
RATE_RANGE = 0.03  # a published rate may be off by as much: rounded times, evaluations in them


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Where the speed of a machine is from: images/s of all hosts of a setup, and who says so.

    `host_bytes_per_s` is the memory's speed, None where it is not known; `spread` the lowest and highest images/s that
    were measured.
    """

    setup: Setup
    images_per_s: float
    cores: int
    host_bytes_per_s: float | None
    source: str
    spread: tuple[float, float] | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """What the images/s may be: as measured, else as a published rate may be off."""
        low, high = (1 - RATE_RANGE) * self.images_per_s, (1 + RATE_RANGE) * self.images_per_s
        return (low, high) if self.spread is None else (min(low, self.spread[0]), max(high, self.spread[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A recipe on a machine, between whose hosts there is a link.

    `algorithm` None: the fabric's usual one. `request`: what is requested of the planner, None: what the recipe does.
    `measured`: what the machine was measured to do.
    """

    recipe: Recipe
    machine: Machine
    link: Link
    reference: Reference
    algorithm: str | None = None
    request: Request | None = None
    measured: Measured = NOTHING_MEASURED

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What the prediction assumes, or the machine was measured to do."""
        return measured_assumptions(self.measured)


def planned_setup(
    recipe: Recipe,
    machine: Machine,
    hosts: int,
    link: Link = NO_LINK,
    *,
    algorithm: str | None = None,
    request: Request | None = None,
    measured: Measured = NOTHING_MEASURED,
) -> Setup:
    """The setup of a recipe under the plan that `cputrain plan` makes. Raises InputError where it does not fit."""
    requested = replace(request or request_of(recipe), nodes=hosts, link_gbit=link.nominal_gbit)
    return setup_of(recipe, plan_machine(machine, requested, Runtime(), measured), link, algorithm)


def scenario_setup(scenario: Scenario, hosts: int) -> Setup:
    """The setup of a scenario on `hosts` hosts."""
    setup = planned_setup(
        scenario.recipe,
        scenario.machine,
        hosts,
        scenario.link,
        algorithm=scenario.algorithm,
        request=scenario.request,
        measured=scenario.measured,
    )
    return replace(setup, layers=slow_as(setup.layers, scenario.reference.setup.layers))


def published_reference(run: PublishedRun) -> Reference:
    """A published run as the rate of its machine."""
    machine = named_machine(run.machine)
    setup = planned_setup(run_recipe(run), machine, run.hosts, link_of(run.fabric, gbit=run.gbit))
    return reference_at(setup, machine, run.images_per_s, run.source)


def measured_reference(training: MeasuredTraining, machine: Machine, rates: Measured) -> Reference:
    """A measured rate as that of its machine; generated images needed no decoding."""
    rate = training.rate
    recipe = run_recipe(rate, DataSection(crop=rate.crop, path=SYNTHETIC))
    setup = replace(
        planned_setup(recipe, machine, 1),
        threads=rate.threads,
        comm_cores=rate.comm_cores,
        loader_cores=rate.loader_cores,
        backend=rate.backend,
    )
    plain = reference_at(setup, machine, rate.images_per_s, training.source, rates)
    speed = speed_at(core_flops_of(plain, CONSTANTS), machine=plain)
    layers = as_measured(setup.layers, work_of(setup, speed, CONSTANTS), rate.layers)
    return replace(plain, setup=replace(setup, layers=layers), spread=(rate.low, rate.high))


def reference_of(
    machine: Machine,
    recipe: Recipe,
    rate: float | None = None,
    measured: MeasuredTraining | None = None,
    rates: Measured = NOTHING_MEASURED,
) -> Reference:
    """Where the machine's speed is from: `rate`, images/s of one host with this recipe; `measured` with the recipe's
    network; a published run; `measured` with another network of a size that compares.

    Raises InputError for a machine without any of them.
    """
    if rate is not None:
        return reference_at(planned_setup(recipe, machine, 1), machine, rate, "given with --rate", rates)
    run = starting_run(machine.model, recipe.precision)
    if measured is not None and (measured.rate.network == recipe.model.name or run is None):
        reference = measured_reference(measured, machine, rates)
        if comparable(reference.setup.layers, layers_of(recipe)):
            return reference
    if run is None:
        known = first_named(machines_with_rates(recipe.precision))
        raise InputError(
            f"no training rate of {machine.name} ({machine.model}) is known in {recipe.precision}: run `cputrain bench "
            f"model precision={recipe.precision}` there, or give its images/s with --rate"
            + (f"; known are those of {known}" if known else "")
        )
    return published_reference(run)


def comparable(layers: tuple[Layer, ...], others: tuple[Layer, ...]) -> bool:
    """Whether the operations of an image differ by less than MOST_TIMES."""
    flop, other = (sum(sum(layer.flop) for layer in each) for each in (layers, others))
    return max(flop, other) < MOST_TIMES * min(flop, other)


def reference_at(
    setup: Setup, machine: Machine, rate: float, source: str, measured: Measured = NOTHING_MEASURED
) -> Reference:
    """A setup's images/s on a machine as the rate of that machine."""
    return Reference(
        setup=setup,
        images_per_s=rate,
        cores=len(machine.allowed_cores),
        host_bytes_per_s=host_bytes_per_s(machine, measured),
        source=source,
    )


def host_bytes_per_s(machine: Machine, measured: Measured = NOTHING_MEASURED) -> float | None:
    """The speed of a host's memory: measured, or that of its processor; None where it is not known."""
    rate, usual = measured.rate(MEMORY), processor_facts(machine.model).memory_bytes_per_s
    if rate is not None:
        return rate.value
    return None if usual is None else len(machine.packages) * usual


def run_recipe(run: PublishedRun | Measurement, data: DataSection | None = None) -> Recipe:
    """The recipe of a run, as far as it decides the speed; its data are by default ImageNet's training images."""
    return Recipe(
        model=ModelSection(name=run.network),
        data=data or DataSection(crop=run.crop, train_images=1_281_167),
        batch=BatchSection(local=run.local_batch),
        optim=OptimSection(name=run.optimizer),  # type: ignore[arg-type]
        precision=run.precision,  # type: ignore[arg-type]
        plan=PlanSection(ppn=run.workers),
    )


def speed_at(
    core_flops: float,
    *,
    machine: Machine | Reference,
    measured: Measured = NOTHING_MEASURED,
    precision: str = "float32",
    constants: Constants = CONSTANTS,
) -> Speed:
    """The speed of a host whose cores compute so many FLOP/s in this precision."""
    if isinstance(machine, Reference):
        cores, memory, precision = machine.cores, machine.host_bytes_per_s, machine.setup.precision
    else:
        cores, memory = len(machine.allowed_cores), host_bytes_per_s(machine, measured)
    usual = memory or cores * core_flops / FLOP_PER_BYTE[precision]
    return Speed(core_flops=core_flops, host_bytes_per_s=constants.memory_share * usual)


def core_flops_of(reference: Reference, constants: Constants) -> float:
    """FLOP/s of a core at which the reference's setup reaches its images/s, by the regula falsi (Illinois).

    Raises InputError where no speed of the cores does, because memory or communication alone take longer.
    """
    wanted = reference.setup.global_batch / reference.images_per_s
    seconds = seconds_at(reference.setup, constants)

    def excess(seconds_per_flop: float) -> float:
        """Seconds of a step beyond those wanted: nearly linear."""
        return seconds(speed_at(1 / seconds_per_flop, machine=reference, constants=constants)) - wanted

    low, high = 1 / FASTEST, 1 / SLOWEST
    below, above = excess(low), excess(high)
    if not below <= 0 <= above:
        raise InputError(
            f"{reference.images_per_s:,.4g} images/s ({reference.source}) is out of reach for its "
            f"{reference.setup.ranks} workers: check the rate"
        )
    for _ in range(TRIES):
        middle = (low * above - high * below) / (above - below)
        found = excess(middle)
        if abs(found) <= PRECISE * wanted:
            return 1 / middle
        if found > 0:
            high, above, below = middle, found, below / 2
        else:
            low, below, above = middle, found, above / 2
    return 1 / middle


RATED = re.compile(r"(?P<rate>\d{1,9}(\.\d{1,9})?)@(?P<hosts>\d{1,5})x(?P<workers>\d{1,4})x(?P<batch>\d{1,6})")


def started_from(
    text: str, machine: Machine, recipe: Recipe, link: Link, rates: Measured = NOTHING_MEASURED
) -> Reference:
    """The reference of --from: the name of a published run of the machine's processor in the recipe's precision, or
    "IMG/S@HOSTSxWORKERSxBATCH", a run of the recipe's network on such machines over the link.

    Raises InputError where the text is neither, or the run does not fit the machine.
    """
    found = RATED.fullmatch(text)
    if found is None:
        runs = runs_on(machine.model, recipe.precision)
        for run in runs:
            if run.name == text:
                return published_reference(run)
        known = (
            f"known on {machine.name} in {recipe.precision}: {', '.join(run.name for run in runs)}; " if runs else ""
        )
        raise InputError(
            f"--from {text}: {known}or give a rate with hosts, workers per host and local batch, as in 6303@64x2x32"
        )
    rate, (hosts, workers, batch) = float(found["rate"]), (int(found[key]) for key in ("hosts", "workers", "batch"))
    if not (rate and hosts and workers and batch):
        raise InputError(f"--from {text}: rate, hosts, workers and local batch are above 0")
    ran = recipe.model_copy(
        update={
            "batch": BatchSection(local=batch),
            "plan": recipe.plan.model_copy(update={"ppn": workers}),
        }
    )
    setup = planned_setup(ran, machine, hosts, link, measured=rates)
    return reference_at(setup, machine, rate, "given with --from", rates)


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
    size = weights * (1 + state_copies(recipe.optim))
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
                changed = _with_plan(scenario, batch, ppn=workers, comm_cores=comm_cores)
                setup = _fitting(changed, hosts)
                if setup is not None:
                    yield changed, setup


def _with_plan(scenario: Scenario, batch: int | None = None, **plan: object) -> Scenario:
    """The scenario with these keys of its plan and this local batch; without one, fixed global batches stay so."""
    recipe = scenario.recipe
    changes: dict[str, object] = {"plan": recipe.plan.model_copy(update={"profile": "auto", **plan})}
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
