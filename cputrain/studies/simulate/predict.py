"""Predict a training on one host, from measured or published rates, and on up to thousands; and search for a plan."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from cputrain.affinity.errors import InputError, as_option, describe_error
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import NOTHING_MEASURED, Compare, Plan, Request, plan_machine
from cputrain.affinity.planner.records import read_records
from cputrain.affinity.planner.request import PROFILES, Measured, is_phi
from cputrain.affinity.planner.rules import MAX_COMM_CORES
from cputrain.affinity.planner.workload import BYTES
from cputrain.affinity.topology.catalog import named_machine
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.wording import first_named, join_or, plural
from cputrain.data.settings import LINE, SYNTHETIC, DataSettings
from cputrain.models.settings import ModelSettings
from cputrain.predict.assumptions import (
    CONSTANTS,
    Assumption,
    PublishedRun,
    constants_of,
    host_bytes_per_s,
    link_of,
    machines_with_rates,
    measured_assumptions,
    reference_run,
    runs_on,
    speed_of,
)
from cputrain.predict.collectives import ALGORITHMS, Link
from cputrain.predict.host import core_flops, setup_of_plan
from cputrain.predict.layers import Layer, layer_of
from cputrain.predict.next_best import compare_plan
from cputrain.predict.step_time import Constants, Setup, Speed, Step, predict_step, seconds_at, work_of
from cputrain.recipe.derivation import TrainingSizes, derive, largest_local_batch, passes_per_step
from cputrain.recipe.request import layer_sizes, request_of, workload_of
from cputrain.recipe.schema import (
    OWN_NETWORKS,
    BatchSection,
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimSection,
    PlanSection,
    Recipe,
)
from cputrain.studies.simulate.setup import (
    MeasuredTraining,
    Measurement,
    find_measured_rate,
    outdated_measurements,
    reuse_slowness,
    set_slowness,
)

MAX_SIZE_RATIO = 10  # largest ratio of the sizes of a network and of the one whose rate predicts it
NO_LINK = link_of("opa")  # placeholder for a single host, which uses no link
RATE_RANGE = 0.03  # assumed error of a published rate: rounded times, evaluations included
RATED = re.compile(r"(?P<rate>\d{1,9}(\.\d{1,9})?)@(?P<hosts>\d{1,5})x(?P<workers>\d{1,4})x(?P<batch>\d{1,6})")
IMAGENET_TRAIN, IMAGENET_VAL, POINTS = 1_281_167, 50_000, 100  # samples of an epoch
SECONDS_PER_HOUR, JOULES_PER_KWH = 3600.0, 3.6e6
BATCHES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The rate that sets a machine's speed: images/s of all hosts of a setup, and the source.

    `host_bytes_per_s` is the memory bandwidth, None if unknown; `spread` the lowest and highest images/s that were
    measured.
    """

    setup: Setup
    images_per_s: float
    cores: int
    host_bytes_per_s: float | None
    source: str
    spread: tuple[float, float] | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """Range of the images/s: the measured range, or the assumed error of a published rate if that is wider."""
        low, high = (1 - RATE_RANGE) * self.images_per_s, (1 + RATE_RANGE) * self.images_per_s
        return (low, high) if self.spread is None else (min(low, self.spread[0]), max(high, self.spread[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A recipe on a machine, with the link between hosts.

    `algorithm` None means the fabric's usual algorithm, `request` None the recipe's own request to the planner;
    `measured` has the machine's measured rates.
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
        """The prediction's assumptions, replaced by measurements of the machine if there are any."""
        return measured_assumptions(self.measured)


def layers_of(model: ModelSettings, data: DataSettings) -> tuple[Layer, ...]:
    """Return the layers of a network. Raises InputError if the network's sizes are unknown."""
    sizes = layer_sizes(model, data)
    if sizes is None:
        names = join_or(OWN_NETWORKS)
        raise InputError(
            f"simulate does not know the layers of model.name={model.name}; set model.name to {names}, or to "
            "another classifier of torchvision or timm"
        )
    return tuple(layer_of(size, first=number == 0) for number, size in enumerate(sizes))


def setup_of(recipe: Recipe, plan: Plan, link: Link | None, algorithm: str | None = None) -> Setup:
    """Return the setup of a recipe's training under a plan, on the number of hosts that the plan was made for."""
    ranks = plan.request.nodes * len(plan.workers)
    planned = setup_of_plan(replace(plan, request=replace(plan.request, workload=workload_of(recipe))))
    return replace(
        planned,
        layers=layers_of(recipe.model, recipe.data),
        local_batch=largest_local_batch(recipe.batch, ranks),
        accumulation=passes_per_step(recipe.batch, ranks),
        algorithm=algorithm or planned.algorithm,
        link=link if plan.request.nodes > 1 else None,
        decoded_per_core_s=None if recipe.data.generated else planned.decoded_per_core_s,
    )


def planned_setup(
    recipe: Recipe,
    machine: Machine,
    hosts: int,
    link: Link = NO_LINK,
    *,
    algorithm: str | None = None,
    request: Request | None = None,
    measured: Measured = NOTHING_MEASURED,
    compare: Compare | None = None,
) -> Setup:
    """Return a recipe's setup under a plan; `compare` as in `plan_machine`.

    Raises InputError if it does not fit the machine.
    """
    requested = replace(request or request_of(recipe), nodes=hosts, link_gbit=link.nominal_gbit, fabric=link.name)
    plan = plan_machine(machine, requested, Runtime(), measured, compare=compare)
    return setup_of(recipe, plan, link, algorithm)


def scenario_setup(scenario: Scenario, hosts: int, compare: Compare | None = compare_plan) -> Setup:
    """Return the setup of a scenario on `hosts` hosts, under the plan of `cputrain plan`, or of the rules alone if
    `compare` is None."""
    setup = planned_setup(
        scenario.recipe,
        scenario.machine,
        hosts,
        scenario.link,
        algorithm=scenario.algorithm,
        request=scenario.request,
        measured=scenario.measured,
        compare=compare,
    )
    return replace(setup, layers=reuse_slowness(setup.layers, scenario.reference.setup.layers))


def published_reference(run: PublishedRun) -> Reference:
    """Turn a published run into the reference of its machine."""
    machine = named_machine(run.machine)
    recipe = run_recipe(run)
    if run.comm_cores is not None:
        plan = recipe.plan.model_copy(update={"comm_cores": run.comm_cores})
        recipe = recipe.model_copy(update={"plan": plan})
    setup = planned_setup(recipe, machine, run.hosts, link_of(run.fabric, gbit=run.gbit))
    return reference_at(setup, machine, run.images_per_s, run.source)


def measured_reference(training: MeasuredTraining, machine: Machine, rates: Measured) -> Reference:
    """Turn a measured rate into the reference of its machine; it was measured with generated images, not decoded."""
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
    layers = set_slowness(setup.layers, work_of(setup, speed, CONSTANTS), rate.layers)
    return replace(plain, setup=replace(setup, layers=layers), spread=(rate.low, rate.high))


def reference_of(
    machine: Machine,
    recipe: Recipe,
    rate: float | None = None,
    measured: MeasuredTraining | None = None,
    rates: Measured = NOTHING_MEASURED,
) -> Reference:
    """Return the reference of a machine, from the first available of: `rate`, images/s of one host with this recipe;
    `measured` if it has the recipe's network; a published run; `measured` with a network of comparable size.

    Raises InputError if there is none.
    """
    if rate is not None:
        return reference_at(planned_setup(recipe, machine, 1), machine, rate, "given with --rate", rates)
    run = reference_run(machine.model, recipe.precision)
    if measured is not None and (measured.rate.network == recipe.model.name or run is None):
        reference = measured_reference(measured, machine, rates)
        if comparable(reference.setup.layers, layers_of(recipe.model, recipe.data)):
            return reference
    if run is None:
        machines = first_named(machines_with_rates(recipe.precision))
        raise InputError(
            f"no training rate of {machine.name} ({machine.model}) is known in {recipe.precision}; run `cputrain bench "
            f"model precision={recipe.precision}` there, or pass its images/s with --rate"
            + (f" (known rates: {machines})" if machines else "")
        )
    return published_reference(run)


def comparable(layers: tuple[Layer, ...], reference: tuple[Layer, ...]) -> bool:
    """Return whether the networks' operations per image differ by a factor of less than MAX_SIZE_RATIO."""
    flop, reference_flop = (sum(sum(layer.flop) for layer in network) for network in (layers, reference))
    return max(flop, reference_flop) < MAX_SIZE_RATIO * min(flop, reference_flop)


def reference_at(
    setup: Setup, machine: Machine, rate: float, source: str, measured: Measured = NOTHING_MEASURED
) -> Reference:
    """Turn a setup's images/s on a machine into the reference of that machine."""
    return Reference(
        setup=setup,
        images_per_s=rate,
        cores=len(machine.allowed_cores),
        host_bytes_per_s=host_bytes_per_s(machine, measured),
        source=source,
    )


def run_recipe(run: PublishedRun | Measurement, data: DataSection | None = None) -> Recipe:
    """Return a recipe with the settings of a run that affect the speed; the data default to ImageNet's training set."""
    return Recipe(
        model=ModelSection(name=run.network),
        data=data or DataSection(crop=run.crop, train_images=1_281_167),
        batch=BatchSection(local=run.local_batch),
        optim=OptimSection(name=run.optimizer),  # type: ignore[arg-type]
        precision=run.precision,  # type: ignore[arg-type]
        plan=PlanSection(ppn=run.workers),
    )


def speed_at(
    flops: float,
    *,
    machine: Machine | Reference,
    measured: Measured = NOTHING_MEASURED,
    precision: str = "float32",
    constants: Constants = CONSTANTS,
) -> Speed:
    """Return the speed of a host whose cores compute `flops` FLOP/s in this precision."""
    if isinstance(machine, Reference):
        cores, memory, precision = machine.cores, machine.host_bytes_per_s, machine.setup.precision
    else:
        cores, memory = len(machine.allowed_cores), host_bytes_per_s(machine, measured)
    return speed_of(flops, cores, memory, precision, constants)


def core_flops_of(reference: Reference, constants: Constants) -> float:
    """Solve for the FLOP/s of a core at which the reference's setup reaches its images/s.

    Raises InputError if no core speed reaches it, because memory or communication alone take longer.
    """
    target = reference.setup.global_batch / reference.images_per_s
    flops = core_flops(reference.setup, target, reference.cores, reference.host_bytes_per_s, constants)
    if flops is None:
        raise InputError(
            f"{reference.images_per_s:,.4g} images/s ({reference.source}) is out of reach for its "
            f"{plural(reference.setup.ranks, 'worker')}; check the rate"
        )
    return flops


def parse_start_rate(
    text: str, machine: Machine, recipe: Recipe, link: Link, rates: Measured = NOTHING_MEASURED
) -> Reference:
    """Parse --from to a reference: the name of a published run of the machine's processor in the recipe's precision, or
    "IMG/S@HOSTSxWORKERSxBATCH", a run of the recipe's network on such machines over the link.

    Raises InputError if the text is neither, or the run does not fit the machine.
    """
    match = RATED.fullmatch(text)
    if match is None:
        runs = runs_on(machine.model, recipe.precision)
        for run in runs:
            if run.name == text:
                return published_reference(run)
        names = ", ".join(run.name for run in runs)
        choices = f"choose one of {names} (runs on {machine.name} in {recipe.precision}), or " if runs else ""
        raise InputError(
            f"--from {text} names no known run; {choices}pass a rate with hosts, workers per host and local batch, as "
            "in 6303@64x2x32"
        )
    rate, (hosts, workers, batch) = float(match["rate"]), (int(match[key]) for key in ("hosts", "workers", "batch"))
    if not (rate and hosts and workers and batch):
        raise InputError(f"--from {text}: rate, hosts, workers and local batch must be above 0")
    ran = recipe.model_copy(
        update={
            "batch": BatchSection(local=batch),
            "plan": recipe.plan.model_copy(update={"ppn": workers}),
        }
    )
    setup = planned_setup(ran, machine, hosts, link, measured=rates)
    return reference_at(setup, machine, rate, "given with --from", rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A scenario on `nodes` hosts with `workers` ranks in total.

    `low` and `high` bound images/s. `efficiency` is relative to the same number of single hosts, under their own plan
    or under this one, whichever is faster. `time_to_train_s`, `node_hours` and `energy_kwh` are None if the number of
    images or the watts are unknown.
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
        """Simulate the step of a setup of this scenario."""
        return predict_step(setup, self.speed, self.constants)

    def images_per_s(self, setup: Setup) -> float:
        """Return images/s of all hosts."""
        return setup.global_batch / seconds_at(setup, self.constants)(self.speed)


def model_of(scenario: Scenario, constants: Constants | None = None) -> Model:
    """Fit the machine's speed to the scenario's reference under these assumptions; None: the scenario's own."""
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


def images_per_s_of(scenario: Scenario, hosts: int) -> float | None:
    """Return the images/s on a number of hosts to compare with; None if the request, made for another number, does not
    fit them."""
    try:
        setup = scenario_setup(scenario, hosts)
    except InputError:
        return None
    return model_of(scenario).images_per_s(setup)


def rows_of(scenario: Scenario, nodes: Sequence[int], *, watts: float | None = None) -> tuple[Row, ...]:
    """Predict a row for each number of hosts, with the range of images/s. Raises InputError if one does not fit."""
    model, setups = model_of(scenario), [scenario_setup(scenario, count) for count in nodes]
    single = images_per_s_of(scenario, 1) or 0.0
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
    """Return how far images/s may fall and rise: vary each assumption alone to both ends of its range, and add the
    changes in quadrature."""
    falls, rises = [0.0] * len(rates), [0.0] * len(rates)
    for changed, constants in _alternatives(scenario):
        try:
            varied = model_of(changed, constants)
        except InputError:  # with this value the reference's rate is out of reach, so it cannot be the true value
            continue
        for i, setup in enumerate(setups):
            linked = replace(setup, link=changed.link) if setup.link is not None else setup
            change = varied.images_per_s(linked) - rates[i]
            (rises if change > 0 else falls)[i] += change * change
    return [(fall**0.5, rise**0.5) for fall, rise in zip(falls, rises, strict=True)]


def _alternatives(scenario: Scenario) -> list[tuple[Scenario, Constants]]:
    alternatives, usual = [], constants_of(scenario.assumptions)
    for assumption in scenario.assumptions:
        if assumption.name in _unused(scenario):
            continue
        for value in (assumption.low, assumption.high):
            alternatives.append((scenario, replace(usual, **{assumption.name: value})))
    for latency in scenario.link.latency_range_s:
        alternatives.append((replace(scenario, link=replace(scenario.link, latency_s=latency)), usual))
    for rate in scenario.reference.bounds:
        reference = replace(scenario.reference, images_per_s=rate)
        alternatives.append((replace(scenario, reference=reference), usual))
    return alternatives


def _unused(scenario: Scenario) -> set[str]:
    """Return the names of the assumptions that do not affect the scenario's images/s."""
    phi = set() if is_phi(scenario.machine) else {"phi_core_slowness"}
    tcp = set() if scenario.link.name == "ethernet" else {"tcp_move_bytes_per_s"}
    gloo = set() if scenario.recipe.comm.backend == "gloo" else {"gloo_move_bytes_per_s", "gloo_bf16_slowness"}
    return {"snapshot_bytes_per_s", "checkpoint_bytes_per_s", "evaluation_start_s"} | phi | tcp | gloo


def time_to_train(model: Model, setup: Setup, step_s: float) -> float | None:
    """Return the seconds from the first step to the last checkpoint; None if the number of images is unknown."""
    recipe, images = model.scenario.recipe, training_images(model.scenario.recipe.data)
    if images is None:
        return None
    sizes = derive(recipe, ppn=setup.workers, nodes=setup.hosts, images=images)
    steps = sizes.last_step(recipe.max_steps)
    epochs = steps / sizes.steps_per_epoch
    evaluations_s = _evaluations_s(model, setup, sizes, epochs)
    return steps * step_s + evaluations_s + _checkpoints_s(model, setup, sizes, steps, step_s)


def training_images(data: DataSettings) -> int | None:
    """Return the number of training images if the settings state it without the data."""
    if data.images_per_epoch or data.train_images:
        return data.train_images or data.images_per_epoch
    if data.generated:
        return POINTS if data.path == LINE else IMAGENET_TRAIN
    return None


def _evaluations_s(model: Model, setup: Setup, sizes: TrainingSizes, epochs: float) -> float:
    """Return the seconds of all evaluations; each uses the same fraction of images as ImageNet's validation set."""
    if model.scenario.recipe.data.generated:
        return 0.0
    work = work_of(setup, model.speed, model.constants)
    images = sizes.images_per_epoch * IMAGENET_VAL / IMAGENET_TRAIN
    evaluation_s = model.constants.evaluation_start_s + images / setup.ranks * sum(work.forward_s) / setup.local_batch
    every = model.scenario.recipe.evaluate.every_epochs
    return evaluation_s * (1 if every is None else max(1, int(epochs // every)))


def _checkpoints_s(model: Model, setup: Setup, sizes: TrainingSizes, steps: int, step_s: float) -> float:
    """Return the seconds that steps wait while checkpoints are copied, and that the end waits for the last write."""
    recipe = model.scenario.recipe
    weights = sum(BYTES * sum(layer.weights) for layer in setup.layers)
    size = weights * (1 + recipe.optim.state_copies)
    saved = checkpoints_saved(recipe.checkpoint, recipe.evaluate.every_epochs, steps, sizes.steps_per_epoch, step_s)
    return saved * size / model.constants.snapshot_bytes_per_s + size / model.constants.checkpoint_bytes_per_s


def checkpoints_saved(
    section: CheckpointSection, evaluate_every: int | None, steps: int, steps_per_epoch: int, step_s: float
) -> int:
    """Return the number of checkpoints that a training of `steps` steps saves: at the end of epochs (also those with an
    evaluation), at its own end, and within epochs, where minutes count from the previous checkpoint."""
    epochs = ceil(steps / steps_per_epoch)
    every = [interval for interval in (section.every_epochs, evaluate_every) if interval is not None]
    saving = {epoch for interval in every for epoch in range(interval, epochs + 1, interval)} | {epochs}
    if section.every_steps is not None:
        by_steps = set(range(section.every_steps, steps + 1, section.every_steps))
        return len(by_steps | {min(epoch * steps_per_epoch, steps) for epoch in saving})
    if section.every_minutes is None:
        return len(saving)
    ends = [0, *sorted(min(epoch * steps_per_epoch, steps) for epoch in saving)]
    within = sum(int((b - a) * step_s // (60 * section.every_minutes)) for a, b in pairwise(ends))
    return len(saving) + within


def check_global_batch(scenario: Scenario, nodes: Sequence[int]) -> None:
    """Raise InputError if the workers do not divide a fixed global batch, naming the nearest host counts that do."""
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
            raise InputError(f"batch.global={batch} does not divide among {workers} workers per host; set plan.ppn")
        raise InputError(
            f"batch.global={batch} does not divide among {plural(count, 'host')} of {plural(workers, 'worker')}; the "
            f"nearest numbers of hosts are {join_or([str(n) for n in near])}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan for a scenario: its name, setup, images/s and time to train in seconds."""

    name: str
    setup: Setup
    images_per_s: float
    time_to_train_s: float


def best_plan(scenario: Scenario, hosts: int, most_images: int | None) -> tuple[Candidate, ...]:
    """Return the recipe as it is, the published profiles with its batch, and the best plan found, in this order.

    The best plan's global batch is at most `most_images`; None: the recipe's own. Raises InputError if the time to
    train is unknown.
    """
    model = model_of(scenario)
    as_is = _timed(model, scenario, scenario_setup(scenario, hosts), "the recipe")
    profiles = []
    for name in PROFILES:
        changed = _with_plan(scenario, profile=name)
        if name not in ("auto", scenario.recipe.plan.profile) and (setup := _fitting(changed, hosts)) is not None:
            profiles.append(_timed(model, changed, setup, f"profile {name}"))
    limit = most_images or as_is.setup.global_batch
    fitting = [
        _timed(model, candidate, replace(setup, algorithm=algorithm), "best")
        for candidate, setup in _candidates(scenario, hosts, limit)
        for algorithm in ((scenario.algorithm,) if scenario.algorithm else ALGORITHMS)
    ]
    if not fitting:
        raise InputError(
            f"--batch-limit {limit:,} leaves less than one image to each worker of {plural(hosts, 'host')}; raise it"
        )
    allowed = [candidate for candidate in (as_is, *profiles) if candidate.setup.global_batch <= limit]
    return (
        as_is,
        *profiles,
        replace(min((*allowed, *fitting), key=lambda candidate: candidate.time_to_train_s), name="best"),
    )


def _candidates(scenario: Scenario, hosts: int, limit: int) -> Iterator[tuple[Scenario, Setup]]:
    """Yield every combination of workers, comm cores and local batch that fits the host and the limit."""
    cores, packages = len(scenario.machine.allowed_cores), len(scenario.machine.packages)
    counts = sorted({count for count in (1, 2, 4, 8, 16, packages, 2 * packages, 4 * packages) if count <= cores})
    recipe_batch = scenario.recipe.batch.local
    for workers in counts:
        max_batch = limit // (hosts * workers)
        batches = sorted({batch for batch in (*BATCHES, recipe_batch, max_batch) if 1 <= batch <= max_batch})[-3:]
        for comm_cores in range(MAX_COMM_CORES + 1):
            for batch in batches:
                changed = _with_plan(scenario, batch, ppn=workers, comm_cores=comm_cores)
                setup = _fitting(changed, hosts)
                if setup is not None:
                    yield changed, setup


def _with_plan(scenario: Scenario, batch: int | None = None, **plan: object) -> Scenario:
    """Return the scenario with these plan keys and this local batch; without one, a fixed global batch stays fixed."""
    recipe = scenario.recipe
    changes: dict[str, object] = {"plan": recipe.plan.model_copy(update={"profile": "auto", **plan})}
    if batch is not None:
        changes["batch"] = recipe.batch.model_copy(update={"local": batch, "accumulation": 1, "global_": None})
    return replace(scenario, recipe=recipe.model_copy(update=changes))


def _fitting(scenario: Scenario, hosts: int) -> Setup | None:
    """Return the scenario's setup by the rules; None if it does not fit the host."""
    try:
        return scenario_setup(scenario, hosts, compare=None)
    except InputError:
        return None


def _timed(model: Model, scenario: Scenario, setup: Setup, name: str) -> Candidate:
    step = model.step(setup)
    seconds = time_to_train(replace(model, scenario=scenario), setup, step.step_s)
    if seconds is None:
        raise InputError("--best needs the number of training images; set data.train_images=N")
    return Candidate(name=name, setup=setup, images_per_s=setup.global_batch / step.step_s, time_to_train_s=seconds)


def scenario_of_plan(
    recipe: Recipe, plan: Plan, fabric: str, env: Mapping[str, str]
) -> tuple[Scenario | None, list[str]]:
    """Return the scenario of a planned job of several equal hosts, None if there is no prediction for it, and lines:
    warnings, and the reason with what to do."""
    workload = plan.request.workload
    if workload is None or workload.assumed:
        return None, [f"no prediction: `cputrain simulate` does not know the layers of {recipe.model.name}"]
    records = read_records(plan.machine, env)
    measured = find_measured_rate(records, recipe.precision, recipe.model.name, recipe.data.crop)
    notes = [f"warning: {note}" for note in outdated_measurements(records)]
    if measured is None and reference_run(plan.machine.model, recipe.precision) is None:
        unknown = f"no training rate of {plan.machine.name} is known in {recipe.precision}"
        advice = f"run `cputrain bench model precision={recipe.precision}` there"
        return None, [*notes, f"no prediction: {unknown}; {advice}"]
    try:
        reference = reference_of(plan.machine, recipe, measured=measured, rates=plan.measured)
    except InputError as error:  # a rate of a comparable network is missing
        return None, [*notes, no_prediction(error)]
    scenario = Scenario(
        recipe=recipe,
        machine=plan.machine,
        link=link_of(fabric, gbit=plan.request.link_gbit),
        reference=reference,
        request=plan.request,
        measured=plan.measured,
    )
    return scenario, notes


def no_prediction(error: InputError) -> str:
    """Return the line about an error that prevents a prediction."""
    return f"no prediction: {describe_error(error, as_option)}"
