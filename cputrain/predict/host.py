"""The model of a plan's host: the setup of its training, and the speed that was measured, published or cited for it."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from cputrain.affinity.planner.layouts import worker_capacity
from cputrain.affinity.planner.plan import Plan, Request, plan_machine
from cputrain.affinity.planner.request import is_phi
from cputrain.affinity.planner.rules import TRAINING, core_rates, most_per_pass, passes_of
from cputrain.affinity.planner.workload import RESNET50, USUAL_BATCH, Workload
from cputrain.affinity.topology.catalog import named_machine, processor_facts
from cputrain.affinity.topology.machine import Core
from cputrain.mpi.fabric import FABRICS
from cputrain.predict.layers import layers_of_workload, read_network
from cputrain.predict.step_time import Constants, Setup, Speed, passes_over_weights, seconds_at, solve_core_flops

if TYPE_CHECKING:
    from cputrain.predict.assumptions import PublishedRun

# Rate of the operations alone over that of whole steps, at most (3 x 3 convolutions reached 1.4 on Zen 4). A cited rate
# that takes more was found under other conditions or with more memory bandwidth, a measured one with small batches.
MAX_OVER_CITED, MAX_OVER_MEASURED = 2.0, 4.0
USUAL_CLOCK_RANGE = 0.33  # from 2.1 to 2.8 GHz


def slowest_part(plan: Plan) -> dict[str, Any]:
    """Return the fields of `Setup` for the worker that all others wait for: threads, comm_cores, loader_cores,
    slowest_core_speed and remote. If batches are in proportion to the workers' cores, none waits, and their mean speed
    counts."""
    core_of = plan.machine.core_of

    def cores(pus: tuple[int, ...]) -> tuple[Core, ...]:
        return tuple(dict.fromkeys(core_of[pu] for pu in pus))

    parts = [cores(worker.compute_pus) for worker in plan.workers]
    speeds = [worker_capacity(part) for part in parts]
    slowest = speeds.index(min(speeds))
    part, worker = parts[slowest], plan.workers[slowest]
    slowest_speed = min(core.speed for core in part)
    if plan.request.balance == "batch":
        slowest_speed *= sum(speeds) / len(speeds) / min(speeds)
    return {
        "threads": len(part),
        "comm_cores": len(cores(worker.comm_pus)),
        "loader_cores": len(cores(worker.loader_pus)),
        "slowest_core_speed": slowest_speed,
        "remote": 1 - 1 / len({core.numa_node for core in part}),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """The model of a host: its speed, the speed's source, and the setup of the plan that is checked with its images per
    host and step."""

    setup: Setup
    images: float
    speed: Speed
    constants: Constants
    source: str

    def of(self, plan: Plan) -> Setup:
        """Return the setup of another plan with as many images a host and step."""
        workers, passes = len(plan.workers), self.setup.accumulation
        if plan.request.global_batch is not None:
            local, passes = batch_of(plan.request, workers)
        else:
            images = ceil(self.images / workers)
            passes = min(images, passes)
            local = ceil(images / passes)
        return replace(self.setup, workers=workers, local_batch=local, accumulation=passes, **slowest_part(plan))

    def images_per_s(self, setup: Setup) -> float:
        """Return the images/s of a host whose workers share its images; a part of the last worker's may be empty."""
        return self.images / seconds_at(setup, self.constants)(self.speed)


def batch_of(request: Request, workers: int) -> tuple[int, int]:
    """Return the images of a backward pass, at most, and the passes per step of each of `workers` per host."""
    limit, ranks = request.local_batch or USUAL_BATCH, request.nodes * workers
    if request.global_batch is None:
        return limit, request.accumulation
    return most_per_pass(limit, request.global_batch, ranks), passes_of(limit, request.global_batch, ranks)


def setup_of_plan(plan: Plan) -> Setup:
    """Return the setup of a plan's workload, ResNet-50 if it has none, over its request's link."""
    from cputrain.predict.assumptions import LINKED, link_of  # reads a file

    machine, request, several = plan.machine, plan.request, plan.request.nodes > 1
    workload, workers = request.workload or RESNET50, len(plan.workers)
    local, passes = batch_of(request, workers)
    fabric = request.fabric if request.fabric in LINKED else "opa"
    clock = processor_facts(machine.model).clock_range
    return Setup(
        layers=layers_of_workload(workload),
        hosts=request.nodes,
        workers=workers,
        local_batch=local,
        accumulation=passes,
        precision=workload.precision,
        compression=workload.compression,
        optimizer_passes=passes_over_weights(workload.optimizer_copies, norms=workload.norms),
        bucket_mib=workload.bucket_mib,
        backend=workload.backend,
        # Settings choose oneCCL's algorithm; gloo only has a ring.
        algorithm=(FABRICS[fabric].all_reduce if several and workload.backend == "ccl" else None) or "ring",
        link=link_of(fabric, gbit=request.link_gbit) if several else None,
        phi=is_phi(machine),
        clock_range=USUAL_CLOCK_RANGE if clock is None else clock,
        decoded_per_core_s=core_rates(machine, workload, plan.measured).decoded_per_s,
        **slowest_part(plan),
    )


def host_model(plan: Plan) -> HostModel:
    """Return the model of a plan's host, with the speed that was measured, published or else cited for its cores."""
    from cputrain.predict.assumptions import (  # reads a file
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
        limit = MAX_OVER_MEASURED if TRAINING in rates.measured else MAX_OVER_CITED
        if TRAINING in rates.measured:  # whole steps of one host with generated images
            alone = replace(setup, hosts=1, link=None, algorithm="ring", comm_cores=0, decoded_per_core_s=None)
        else:  # cited for usual batches on cores near their memory
            batch = max(setup.local_batch, USUAL_BATCH)
            alone = replace(setup, hosts=1, workers=1, comm_cores=0, local_batch=batch, accumulation=1)
            alone = replace(alone, link=None, decoded_per_core_s=None, slowest_core_speed=1.0, remote=0.0)
        step_s = alone.local_batch * alone.accumulation * workload.gflop / (alone.threads * rates.gflops)
        solved = core_flops(alone, step_s, cores, memory, constants)
        flops = min(solved or inf, limit * 1e9 * rates.gflops)
        source = f"{rates.gflops:.3g} GFLOP/s a core{rates.since(TRAINING)}"
    images = setup.global_batch / setup.hosts
    if plan.request.global_batch is not None:
        images = plan.request.global_batch / setup.hosts
    speed = speed_of(flops, cores, memory, workload.precision, constants)
    return HostModel(setup=setup, images=images, speed=speed, constants=constants, source=source)


def core_flops(setup: Setup, step_s: float, cores: int, memory: float | None, constants: Constants) -> float | None:
    """Return the FLOP/s of a core at which a step takes `step_s` seconds on hosts with these cores and bytes/s of
    memory; None if no speed does."""
    from cputrain.predict.assumptions import speed_of

    seconds = seconds_at(setup, constants)
    return solve_core_flops(lambda flops: seconds(speed_of(flops, cores, memory, setup.precision, constants)), step_s)


@lru_cache(maxsize=8)
def published_core_flops(run: "PublishedRun", constants: Constants) -> float | None:
    """Return the FLOP/s of a core at which a published run, planned by the rules, reaches its images/s; None if no
    speed does."""
    from cputrain.predict.assumptions import host_bytes_per_s

    machine = named_machine(run.machine)
    network = read_network(run.network)
    assert network is not None, "published runs are of traced networks"
    workload = Workload(
        name=f"{run.network} at {run.crop} x {run.crop}",
        network=run.network,
        side=run.crop,
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
        link_gbit=run.gbit or FABRICS[run.fabric].link_gbit,
        local_batch=run.local_batch,
        workload=workload,
    )
    setup = setup_of_plan(plan_machine(machine, request))
    step_s = setup.global_batch / run.images_per_s
    return core_flops(setup, step_s, len(machine.allowed_cores), host_bytes_per_s(machine), constants)
