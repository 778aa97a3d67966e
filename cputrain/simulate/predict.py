"""A recipe on so many hosts: images/s, efficiency and time to train, with the range that the assumptions leave open."""

from dataclasses import dataclass, replace

from affinity.errors import InputError
from affinity.planner.plan import Plan, Request, plan_machine
from affinity.planner.runtime import Runtime
from affinity.topology.catalog import named_machine
from affinity.topology.machine import Machine
from cputrain.launch.recipe_request import request_of
from cputrain.recipe.schema import BatchSection, DataSection, ModelSection, OptimSection, PlanSection, Recipe
from cputrain.recipe.schema.data import SYNTHETIC
from cputrain.simulate.assumptions import Constants
from cputrain.simulate.links import Link, link_of
from cputrain.simulate.measured import Measurement
from cputrain.simulate.rates import FLOP_PER_BYTE, Run, memory_of, starting_run
from cputrain.simulate.setup import Setup, Speed, setup_of
from cputrain.simulate.timeline import seconds_at

SLOWEST, FASTEST = 1e7, 1e15  # FLOP/s of a core that a rate may mean
PRECISE, TRIES = 1e-6, 100
RATE_RANGE = 0.03  # a published rate may be off by as much: rounded times, evaluations in them


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Where the speed of a machine is from: images/s of all hosts of a setup, and who says so."""

    setup: Setup
    images_per_s: float
    packages: int
    cores: int
    memory_bytes_per_s: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A recipe on a machine, between whose hosts there is a link.

    `algorithm` None: the fabric's usual one. `request`: what is requested of the planner, None: what the recipe does.
    """

    recipe: Recipe
    machine: Machine
    link: Link
    reference: Reference
    algorithm: str | None = None
    request: Request | None = None


def planned(recipe: Recipe, machine: Machine, hosts: int, link: Link, request: Request | None = None) -> Plan:
    """The plan of one of the hosts, as `cputrain plan` makes it. Raises InputError where the recipe does not fit."""
    requested = replace(request or request_of(recipe), nodes=hosts, link_gbit=link.nominal_gbit)
    return plan_machine(machine, requested, Runtime())


def job_setup(job: Job, hosts: int) -> Setup:
    """The setup of a job on `hosts` hosts."""
    return setup_of(job.recipe, planned(job.recipe, job.machine, hosts, job.link, job.request), job.link, job.algorithm)


def published_reference(run: Run) -> Reference:
    """A published run as the rate of its machine."""
    recipe, machine = run_recipe(run), named_machine(run.machine)
    link = link_of(run.fabric, gbit=run.gbit)
    return _reference(
        setup_of(recipe, planned(recipe, machine, run.hosts, link), link), machine, run.images_per_s, run.source
    )


def measured_reference(measured: Measurement, machine: Machine) -> Reference:
    """A measured rate as that of its machine; generated images needed no decoding."""
    recipe = Recipe(
        model=ModelSection(name=measured.network),
        data=DataSection(crop=measured.crop, path=SYNTHETIC),
        batch=BatchSection(local=measured.local_batch),
        optim=OptimSection(name=measured.optimizer),  # type: ignore[arg-type]
        precision=measured.precision,  # type: ignore[arg-type]
        plan=PlanSection(ppn=measured.workers),
    )
    setup = replace(
        setup_of(recipe, planned(recipe, machine, 1, link_of("opa")), None),
        threads=measured.threads,
        comm_cores=measured.comm_cores,
        loader_cores=measured.loader_cores,
        backend=measured.backend,
    )
    source = f"measured on {measured.date} with {', '.join(measured.versions)}"
    return _reference(setup, machine, measured.images_per_s, source)


def reference_of(
    machine: Machine, recipe: Recipe, rate: float | None = None, measured: Measurement | None = None
) -> Reference:
    """Where the machine's speed is from: `rate`, images/s of one host with this recipe; `measured`; a published run.

    Raises InputError for a machine without any of them.
    """
    if rate is not None:
        link = link_of("opa")  # one host uses none
        setup = setup_of(recipe, planned(recipe, machine, 1, link), None)
        return _reference(setup, machine, rate, "given with --rate")
    if measured is not None:
        return measured_reference(measured, machine)
    run = starting_run(machine.model, recipe.precision)
    if run is None:
        raise InputError(
            f"no training rate of {machine.name} ({machine.model}) is known in {recipe.precision}: run `cputrain bench "
            "model` there, or give its images/s with --rate"
        )
    return published_reference(run)


def _reference(setup: Setup, machine: Machine, rate: float, source: str) -> Reference:
    return Reference(
        setup=setup,
        images_per_s=rate,
        packages=len(machine.packages),
        cores=len(machine.allowed_cores),
        memory_bytes_per_s=memory_of(machine.model),
        source=source,
    )


def run_recipe(run: Run) -> Recipe:
    """The recipe of a published run, as far as it decides the speed."""
    return Recipe(
        model=ModelSection(name=run.network),
        data=DataSection(crop=run.crop, train_images=1_281_167),
        batch=BatchSection(local=run.local_batch),
        optim=OptimSection(name=run.optimizer),  # type: ignore[arg-type]
        precision=run.precision,  # type: ignore[arg-type]
        plan=PlanSection(ppn=run.workers),
    )


def speed_at(core_flops: float, *, machine: Machine | Reference) -> Speed:
    """The speed of a host whose cores compute so many FLOP/s."""
    if isinstance(machine, Reference):
        packages, cores, memory = machine.packages, machine.cores, machine.memory_bytes_per_s
    else:
        packages, cores, memory = len(machine.packages), len(machine.allowed_cores), memory_of(machine.model)
    host = cores * core_flops / FLOP_PER_BYTE if memory is None else packages * memory
    return Speed(core_flops=core_flops, host_bytes_per_s=host)


def core_flops_of(reference: Reference, constants: Constants) -> float:
    """FLOP/s of a core at which the reference's setup reaches its images/s, by the regula falsi (Illinois).

    Raises InputError where no speed of the cores does, because memory or communication alone take longer.
    """
    wanted = reference.setup.global_batch / reference.images_per_s
    seconds = seconds_at(reference.setup, constants)

    def excess(seconds_per_flop: float) -> float:
        """Seconds of a step beyond those wanted: nearly linear."""
        return seconds(speed_at(1 / seconds_per_flop, machine=reference)) - wanted

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
