"""Predict a step on a host, from what is measured or published."""

import re
from dataclasses import dataclass, replace

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import NOTHING_MEASURED, Plan, Request, plan_machine
from cputrain.affinity.planner.request import MEMORY, Measured
from cputrain.affinity.topology.catalog import named_machine, processor_facts
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.wording import first_named
from cputrain.launch.recipe_request import request_of
from cputrain.recipe.schema import SYNTHETIC, BatchSection, DataSection, ModelSection, OptimSection, PlanSection, Recipe
from cputrain.simulate.assumptions import (
    CONSTANTS,
    FLOP_PER_BYTE,
    Assumption,
    Constants,
    Link,
    PublishedRun,
    link_of,
    machines_with_rates,
    measured_assumptions,
    runs_on,
    starting_run,
)
from cputrain.simulate.network import Layer, MeasuredTraining, Measurement, Setup, Speed, layers_of, setup_of
from cputrain.simulate.step import as_measured, seconds_at, slow_as, work_of

SLOWEST, FASTEST = 1e7, 1e15  # FLOP/s of a core that a rate may mean
PRECISE, TRIES = 1e-6, 100
MOST_TIMES = 10  # that a network may be larger or smaller than that whose rate it is predicted from
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


def planned(
    recipe: Recipe,
    machine: Machine,
    hosts: int,
    link: Link,
    request: Request | None = None,
    measured: Measured = NOTHING_MEASURED,
) -> Plan:
    """The plan of one of the hosts, as `cputrain plan` makes it. Raises InputError where the recipe does not fit."""
    requested = replace(request or request_of(recipe), nodes=hosts, link_gbit=link.nominal_gbit)
    return plan_machine(machine, requested, Runtime(), measured)


def scenario_setup(scenario: Scenario, hosts: int) -> Setup:
    """The setup of a scenario on `hosts` hosts."""
    plan = planned(scenario.recipe, scenario.machine, hosts, scenario.link, scenario.request, scenario.measured)
    setup = setup_of(scenario.recipe, plan, scenario.link, scenario.algorithm)
    return replace(setup, layers=slow_as(setup.layers, scenario.reference.setup.layers))


def published_reference(run: PublishedRun) -> Reference:
    """A published run as the rate of its machine."""
    recipe, machine = run_recipe(run), named_machine(run.machine)
    link = link_of(run.fabric, gbit=run.gbit)
    return reference_at(
        setup_of(recipe, planned(recipe, machine, run.hosts, link), link), machine, run.images_per_s, run.source
    )


def measured_reference(training: MeasuredTraining, machine: Machine, rates: Measured) -> Reference:
    """A measured rate as that of its machine; generated images needed no decoding."""
    rate = training.rate
    recipe = run_recipe(rate, DataSection(crop=rate.crop, path=SYNTHETIC))
    setup = replace(
        setup_of(recipe, planned(recipe, machine, 1, link_of("opa")), None),
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
        link = link_of("opa")  # one host uses none
        setup = setup_of(recipe, planned(recipe, machine, 1, link), None)
        return reference_at(setup, machine, rate, "given with --rate", rates)
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
    setup = setup_of(ran, planned(ran, machine, hosts, link, measured=rates), link)
    return reference_at(setup, machine, rate, "given with --from", rates)
