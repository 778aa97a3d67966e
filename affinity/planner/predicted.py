"""A plan checked against the predicted step time: what the next best numbers cost, and faster ones where a rule loses.

The model is that of `cputrain simulate` (step_time.py): the same layers, constants, links and speed of the host.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.domains import (
    MOST_CORES_PER_WORKER,
    SMALL_HOST_CORES,
    capacity,
    uniform_groups,
    usable_cores,
)
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import NOTHING_CHOSEN, NOTHING_MEASURED, Chosen, NextBest, Plan, plan_machine
from cputrain.affinity.planner.request import (
    ALGORITHM_OF,
    LINK_GBIT,
    RESNET50,
    USUAL_BATCH,
    Measured,
    Reason,
    Request,
    Workload,
    is_phi,
    with_defaults,
)
from cputrain.affinity.planner.rules import MOST_COMM_CORES, TRAINING, core_rates
from cputrain.affinity.planner.step_time import (
    FASTEST,
    Constants,
    Layer,
    Message,
    Setup,
    Speed,
    layer_of,
    layers_at,
    messages_of,
    passes_over_weights,
    read_network,
    solve_core_flops,
    step_seconds,
    work_of,
)
from cputrain.affinity.topology.catalog import named_machine, processor_facts
from cputrain.affinity.topology.machine import Core, Machine
from cputrain.affinity.wording import plural

if TYPE_CHECKING:
    from cputrain.affinity.planner.assumptions import PublishedRun

LOSES = 0.03  # a rule's number stays if it is predicted to lose no more, which is below what the model can tell
USUAL_CLOCK_RANGE = 0.33  # from 2.1 to 2.8 GHz
WORKERS, COMM, LOADER = "workers per host", "comm cores per worker", "loader cores per worker"
COMPUTING = "computing cores per host"
NOUNS = {WORKERS: "worker", COMM: "comm core", LOADER: "loader core", COMPUTING: "computing core"}
FIELDS = {WORKERS: "ppn", COMM: "comm_cores", LOADER: "loader_cores"}


def slowest_part(plan: Plan) -> dict[str, Any]:
    """Return the fields of `Setup` for the worker that all others wait for: threads, comm_cores, loader_cores, pace and
    remote. If batches are in proportion to the workers' cores, none waits, and their mean pace counts."""
    core_of = {pu: core for core in plan.machine.cores for pu in core.pus}

    def cores(pus: tuple[int, ...]) -> tuple[Core, ...]:
        return tuple(dict.fromkeys(core_of[pu] for pu in pus))

    parts = [cores(worker.compute_pus) for worker in plan.workers]
    speeds = [capacity(part) for part in parts]
    slowest = speeds.index(min(speeds))
    part, worker = parts[slowest], plan.workers[slowest]
    pace = min(core.speed for core in part)
    if plan.request.balance == "batch":
        pace *= sum(speeds) / len(speeds) / min(speeds)
    return {
        "threads": len(part),
        "comm_cores": len(cores(worker.comm_pus)),
        "loader_cores": len(cores(worker.loader_pus)),
        "pace": pace,
        "remote": 1 - 1 / len({core.numa_node for core in part}),
    }


TRACED = re.compile(r"(?P<name>\S+) at (?P<side>\d+) x \d+$")


@lru_cache(maxsize=8)
def layers_of_workload(workload: Workload) -> tuple[Layer, ...]:
    """Return the layers of a workload's traced network; a single layer of all its operations if it was not traced."""
    found = TRACED.match(workload.name.replace("ResNet-50", "resnet50"))
    network = read_network(found["name"]) if found else None
    if found is None or network is None:
        gflop = workload.gflop * 1e9
        moved = float(workload.activation_bytes)
        return (
            Layer(
                name=workload.name,
                weights=(workload.parameters,),
                flop=(gflop / 3, 2 * gflop / 3),
                moved_bytes=(2 * moved, 4 * moved),
            ),
        )
    sizes = layers_at(network, int(found["side"]))
    return tuple(layer_of(size, first=number == 0) for number, size in enumerate(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """The model of a host: its speed, the speed's source, and the setup of the plan that is checked."""

    setup: Setup
    speed: Speed
    constants: Constants
    source: str

    def of(self, plan: Plan) -> Setup:
        """Return the setup of another plan with as many images a host and step."""
        images, workers = self.setup.local_batch * self.setup.accumulation * self.setup.workers, len(plan.workers)
        share = ceil(images / workers)
        passes = min(share, self.setup.accumulation)
        return replace(
            self.setup, workers=workers, local_batch=ceil(share / passes), accumulation=passes, **slowest_part(plan)
        )

    def images_per_s(self, setup: Setup, messages: tuple[Message, ...] | None = None) -> float:
        """Return the images/s of a host; `messages` are the setup's if they are known."""
        messages = messages_of(setup, self.constants) if messages is None else messages
        step_s = step_seconds(setup, work_of(setup, self.speed, self.constants), messages, self.constants)
        return setup.global_batch / setup.hosts / step_s


def setup_of_plan(plan: Plan) -> Setup:
    """Return the setup of a plan's workload, ResNet-50 if it has none, over its request's link."""
    from cputrain.affinity.planner.assumptions import LINKED, link_of  # reads a file

    machine, request, several = plan.machine, plan.request, plan.request.nodes > 1
    workload, workers = request.workload or RESNET50, len(plan.workers)
    limit, passes = request.local_batch or USUAL_BATCH, request.accumulation
    share = limit * passes
    if request.global_batch is not None:
        share = max(1, request.global_batch // (request.nodes * workers))
        passes = ceil(share / limit)
    fabric = request.fabric if request.fabric in LINKED else "opa"
    clock = processor_facts(machine.model).clock_range
    return Setup(
        layers=layers_of_workload(workload),
        hosts=request.nodes,
        workers=workers,
        local_batch=ceil(share / passes),
        accumulation=passes,
        precision=workload.precision,
        compression=workload.compression,
        optimizer_passes=passes_over_weights(workload.optimizer_copies, norms=workload.norms),
        bucket_mib=workload.bucket_mib,
        backend=workload.backend,
        # Settings choose oneCCL's algorithm; gloo only has a ring.
        algorithm=ALGORITHM_OF.get(fabric, "ring") if several and workload.backend == "ccl" else "ring",
        link=link_of(fabric, gbit=request.link_gbit) if several else None,
        phi=is_phi(machine),
        clock_range=USUAL_CLOCK_RANGE if clock is None else clock,
        decoded_per_core_s=core_rates(machine, workload, plan.measured).decoded_per_s,
        **slowest_part(plan),
    )


def host_model(plan: Plan) -> HostModel:
    """Return the model of a plan's host, with the speed that was measured, published or else cited for its cores."""
    from cputrain.affinity.planner.assumptions import (  # reads a file
        constants_of,
        host_bytes_per_s,
        measured_assumptions,
        reference_run,
        speed_of,
    )

    machine, setup, measured = plan.machine, setup_of_plan(plan), plan.measured
    workload, constants = plan.request.workload or RESNET50, constants_of(measured_assumptions(measured))
    rates, memory = core_rates(machine, workload, measured), host_bytes_per_s(machine, measured)
    cores = len(machine.allowed_cores)
    run = None if TRAINING in rates.measured else reference_run(machine.model, workload.precision)
    flops = None if run is None else published_core_flops(run, constants)
    source = "" if run is None else f"that of the published {run.name}"
    if flops is None:
        # A rate is that of whole steps of one host with generated images; a cited one, of cores near their memory.
        alone = replace(setup, hosts=1, link=None, algorithm="ring", comm_cores=0, decoded_per_core_s=None)
        if TRAINING not in rates.measured:
            alone = replace(alone, pace=1.0, remote=0.0)
        target_s = alone.local_batch * alone.accumulation * workload.gflop / (alone.threads * rates.gflops)
        flops = core_flops(alone, target_s, cores, memory, constants)
        if flops is None:  # the memory's bandwidth contradicts the rate
            memory = None
            flops = core_flops(alone, target_s, cores, memory, constants) or FASTEST  # overheads alone take longer
        source = f"{rates.gflops:.3g} GFLOP/s a core{rates.since(TRAINING)}"
    speed = speed_of(flops, cores, memory, workload.precision, constants)
    return HostModel(setup=setup, speed=speed, constants=constants, source=source)


def core_flops(setup: Setup, step_s: float, cores: int, memory: float | None, constants: Constants) -> float | None:
    """Return the FLOP/s of a core at which a step takes `step_s` seconds on hosts with these cores and bytes/s of
    memory; None if no speed does."""
    from cputrain.affinity.planner.assumptions import speed_of

    messages = messages_of(setup, constants)

    def seconds(flops: float) -> float:
        speed = speed_of(flops, cores, memory, setup.precision, constants)
        return step_seconds(setup, work_of(setup, speed, constants), messages, constants)

    return solve_core_flops(seconds, step_s)


@lru_cache(maxsize=8)
def published_core_flops(run: "PublishedRun", constants: Constants) -> float | None:
    """Return the FLOP/s of a core at which a published run, planned by the rules, reaches its images/s; None if no
    speed does."""
    from cputrain.affinity.planner.assumptions import host_bytes_per_s

    machine = named_machine(run.machine)
    network = read_network(run.network)
    assert network is not None, "published runs are of traced networks"
    workload = Workload(
        name=f"{run.network} at {run.crop} x {run.crop}",
        parameters=network["parameters"],
        gflop=network["gflop"],
        activation_bytes=network["activation_bytes"],
        precision=run.precision,
    )
    request = Request(
        ppn=run.workers,
        comm_cores=run.comm_cores,
        nodes=run.hosts,
        fabric=run.fabric,
        link_gbit=run.gbit or LINK_GBIT[run.fabric],
        local_batch=run.local_batch,
        workload=workload,
    )
    setup = setup_of_plan(plan_machine(machine, request))
    step_s = setup.global_batch / run.images_per_s
    return core_flops(setup, step_s, len(machine.allowed_cores), host_bytes_per_s(machine), constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A decision: what it is, its value, and the predicted images/s of a host by value.

    `refused` are values that published practice speaks against: they are shown, but not taken.
    """

    what: str
    value: int
    rates: Mapping[int, float]
    refused: frozenset[int] = frozenset()

    @property
    def best(self) -> int:
        """The value with the most images/s that is not refused, this one among equals."""
        return max(self.rates.keys() - self.refused, key=lambda value: (self.rates[value], value == self.value))

    @property
    def loss(self) -> float:
        """The part of the best value's images/s that this one loses."""
        return 1 - self.rates[self.value] / self.rates[self.best]

    @property
    def next_best(self) -> NextBest | None:
        """The best other value, and how much slower it is, in percent; negative if it is faster."""
        others = [value for value in self.rates if value != self.value]
        if not others:
            return None
        other = max(others, key=lambda value: self.rates[value])
        slower = 100 * (1 - self.rates[other] / self.rates[self.value])
        return NextBest(what=self.what, value=self.value, other=other, slower_percent=round(slower, 1) + 0.0)  # not -0


def worker_choice(plan: Plan, model: HostModel, free: frozenset[str]) -> Choice:
    """Compare the plan's number of workers with half, twice, one per package, and one fewer and more, if they fit and
    workers stay equal.

    Each has its comm and loader cores by the rules, or none if that is faster and nothing sets them.
    """
    own, cores = len(plan.workers), usable_cores(plan.machine, plan.request).machine.allowed_cores
    near = {own // 2, 2 * own, len({core.package for core in cores})}
    if len(uniform_groups(cores)) == 1:
        near |= {count for count in (own - 1, own + 1) if count and len(cores) % count == 0}
    request, plans = plan.request, {own: plan}
    most = len(cores) if request.most_workers is None else max(1, request.most_workers // request.nodes)
    for count in sorted(near - {own}):
        other = _replanned(plan, ppn=count) if 1 <= count <= min(len(cores), most) else None
        if other is not None:
            plans[count] = other

    def rate(planned: Plan) -> float:
        setups = [model.of(planned)]
        for what in (COMM, LOADER):
            others = (_with_cores(planned, each, what, 0, model) for each in setups if what in free)
            setups += [each for each in others if each is not None]
        return max(map(model.images_per_s, setups))

    # Several workers were up to twice as fast as a large one, whose threads the model takes to scale.
    large = {count for count in plans if count < own and len(cores) > MOST_CORES_PER_WORKER * count}
    rates = {count: rate(each) for count, each in plans.items()}
    return Choice(what=WORKERS, value=own, rates=rates, refused=frozenset(large))


def core_choice(what: str, plan: Plan, model: HostModel) -> Choice:
    """Compare the plan's number of comm or loader cores with smaller ones and larger ones."""
    setup = model.of(plan)
    own, most = (setup.comm_cores, MOST_COMM_CORES) if what == COMM else (setup.loader_cores, setup.loader_cores + 1)
    counts = range(max(own, most) + 1) if setup.hosts > 1 or what == LOADER else ()
    others = {count: _with_cores(plan, setup, what, count, model) for count in counts if count != own}
    rates = {count: model.images_per_s(each) for count, each in others.items() if each is not None}
    # Published trainings reserve cores for communication; without them, only a few cores were measured.
    refused = frozenset({0} if what == COMM and own else ())
    return Choice(what=what, value=own, rates={own: model.images_per_s(setup), **rates}, refused=refused)


def computing_choice(plan: Plan, model: HostModel) -> Choice | None:
    """Compare the cores that compute with those of the fastest type alone; None if the plan uses no others."""

    def computing(planned: Plan) -> int:
        core_of = {pu: core for core in planned.machine.cores for pu in core.pus}
        return len({core_of[pu] for worker in planned.workers for pu in worker.compute_pus})

    fast = _replanned(plan, e_cores="off") if len({core.speed for core in plan.machine.allowed_cores}) > 1 else None
    if fast is None or computing(fast) == computing(plan):
        return None
    rates = {computing(each): model.images_per_s(model.of(each)) for each in (plan, fast)}
    return Choice(what=COMPUTING, value=computing(plan), rates=rates)


def _replanned(plan: Plan, **fields: int | str) -> Plan | None:
    """Return the plan for other values of the request; None if it does not fit the host or its memory."""
    workload = plan.request.workload
    known = workload and replace(workload, assumed=False)  # refused if it does not fit
    try:
        values: dict[str, Any] = {"workload": known, **fields}
        return plan_machine(plan.machine, replace(plan.request, **values), plan.runtime, plan.measured)
    except InputError:
        return None


def _with_cores(plan: Plan, setup: Setup, what: str, count: int, model: HostModel) -> Setup | None:
    """Return the setup of a plan with this number of comm or loader cores; None if it does not fit the host.

    Only unequal workers are planned again, and cores of several types, and workers with a set number of threads; the
    slowest of equal workers has as many more or fewer threads.
    """
    machine, own = plan.machine, setup.comm_cores if what == COMM else setup.loader_cores
    core_of = {pu: core for core in machine.cores for pu in core.pus}
    one_type = all(len({core_of[pu].speed for pu in worker.pus}) == 1 for worker in plan.workers)
    reserved = {(len(worker.comm_pus), len(worker.loader_pus)) for worker in plan.workers}
    if not one_type or len(reserved) > 1 or plan.request.threads is not None:
        other = _replanned(plan, ppn=len(plan.workers), **{FIELDS[what]: count})
        return None if other is None else model.of(other)
    fields: dict[str, Any] = {FIELDS[what]: count, "threads": setup.threads + own - count}
    return replace(setup, **fields) if fields["threads"] >= 1 else None


def free_choices(plan: Plan) -> frozenset[str]:
    """Return the decisions that the rules made: set by neither the request, a profile nor a measurement."""
    full, _ = with_defaults(plan.machine, plan.request, plan.measured)
    return frozenset(what for what, field in FIELDS.items() if getattr(full, field) is None)


def choices_of(plan: Plan, model: HostModel) -> Iterator[Choice]:
    """Compare the plan's numbers of workers, comm, loader and computing cores with others, each alone."""
    yield worker_choice(plan, model, free_choices(plan))
    yield from (core_choice(what, plan, model) for what in core_kinds(plan))
    computing = computing_choice(plan, model)
    yield from () if computing is None else (computing,)


def core_kinds(plan: Plan) -> tuple[str, ...]:
    """Return the kinds of reserved cores that can be compared; comm threads on computing cores have none."""
    full, _ = with_defaults(plan.machine, plan.request, plan.measured)
    return (LOADER,) if full.comm_siblings else (COMM, LOADER)


def checked_plan(
    machine: Machine,
    request: Request | None = None,
    runtime: Runtime | None = None,
    measured: Measured = NOTHING_MEASURED,
    chosen: Chosen = NOTHING_CHOSEN,
) -> Plan:
    """Plan one host by the rules, and let a number that is predicted to be clearly faster replace the rule's. The plan
    has the predicted cost of the next best numbers.

    A number stays if the request, a profile, a measurement or `chosen` sets it, if the network is assumed, and the
    number of workers also if it sets the global batch. Raises InputError if the request does not fit the host.
    """
    plan = plan_machine(machine, request, runtime, measured, chosen)
    # On a few cores a worker for each was measured to be the fastest, which the model does not have.
    if plan.oversubscribed or len(usable_cores(machine, plan.request).machine.allowed_cores) <= SMALL_HOST_CORES:
        return plan
    model = host_model(plan)
    faster, choices = _faster(plan, model, chosen)
    if faster:
        plan = plan_machine(machine, request, runtime, measured, {**chosen, **faster})
    best = tuple(each for each in (choice.next_best for choice in choices) if each is not None)
    return replace(plan, reasons=(*plan.reasons, *_reasons(plan, best, model, measured)), next_best=best)


def _faster(rules: Plan, model: HostModel, chosen: Chosen) -> tuple[Chosen, tuple[Choice, ...]]:
    """Return the numbers that replace those of rules that lose more than LOSES, with reasons, and the choices of the
    plan with these numbers. The largest loss goes first, as each changes what the others lose."""
    workload, plan = rules.request.workload, rules
    found: dict[str, tuple[int, str]] = {}
    known = workload is not None and not workload.assumed
    free = free_choices(rules) - {what for what, field in FIELDS.items() if field in chosen} if known else frozenset()
    free -= {WORKERS} if rules.request.global_batch is None else set()
    by_rules = choices = tuple(choices_of(rules, model))
    while losing := [each for each in choices if each.what in free and each.loss > LOSES]:
        lost = max(losing, key=lambda each: each.loss)
        rule, best = lost.rates[lost.value], lost.rates[lost.best]
        why = (
            f"the rule's {lost.value} is predicted to be {lost.loss:.1%} slower: {rule:.3g} against {best:.3g} "
            "images/s a host, by the model of `cputrain simulate`"
        )
        found[FIELDS[lost.what]] = lost.best, why
        request = _asking(plan, found).request
        plan, free = plan_machine(plan.machine, request, plan.runtime, plan.measured), free - {lost.what}
        choices = tuple(choices_of(plan, model))
    # Other workers were compared with the best numbers of their cores, which the rules may not give them.
    faster = plan is rules or model.images_per_s(model.of(plan)) > model.images_per_s(model.of(rules))
    return (found, choices) if faster else ({}, by_rules)


def _asking(plan: Plan, chosen: Chosen) -> Plan:
    """Return the plan as if its request set these numbers, with which other plans are then made, too."""
    values: dict[str, Any] = {field: value for field, (value, _) in chosen.items()}
    return replace(plan, request=replace(plan.request, **values))


def _reasons(plan: Plan, best: tuple[NextBest, ...], model: HostModel, measured: Measured) -> list[Reason]:
    """Explain the predicted cost of the next best values, and of a profile."""
    source = f"predicted by the model of `cputrain simulate` for the same images per step; the speed is {model.source}"
    reasons = []
    if best:
        value = ", ".join(f"{plural(each.other, NOUNS[each.what])} {_slower(each.slower_percent)}" for each in best)
        reasons.append(Reason(what="next best", value=value, why=source))
    if plan.request.profile != "auto":
        own = plan_machine(plan.machine, replace(plan.request, profile="auto"), plan.runtime, measured)
        slower = 100 * (1 - model.images_per_s(model.of(own)) / model.images_per_s(model.setup))
        reasons.append(Reason(what="without the profile", value=_slower(round(slower, 1)), why=source))
    return reasons


def _slower(percent: float) -> str:
    return f"{percent:g} % slower" if percent >= 0 else f"{-percent:g} % faster"
