"""Plan a host: workers, threads, binding and environment, with a reason for each value."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta

from cputrain.affinity.errors import InputError, Wording, render_message
from cputrain.affinity.planner.domains import Domain, Partition, partition_host, partition_shared, usable_cores
from cputrain.affinity.planner.memory import (
    Memory,
    MemoryPolicy,
    check_memory_fit,
    left_out_reasons,
    memory_name,
    peak_bytes,
    place_memory,
)
from cputrain.affinity.planner.openmp import (
    Runtime,
    allocator_why,
    ccl_environment,
    planned_runtime,
    runtime_reasons,
    worker_environment,
)
from cputrain.affinity.planner.request import SET, Measured, Reason, Request, Unused, check_request, with_defaults
from cputrain.affinity.planner.rules import (
    CoreRoles,
    WorkerSizes,
    assign_roles,
    local_batches,
    most_per_pass,
    worker_sizes,
)
from cputrain.affinity.planner.workload import PROCESS_BYTES, USUAL_BATCH, footprint
from cputrain.affinity.topology.machine import Count, Ids, Machine, OneOrMore, format_list
from cputrain.affinity.wording import numbers_text

VariableName = Annotated[str, Meta(pattern="^[^=]+$")]

__all__ = ["Plan", "Request", "WorkerPlan", "plan_machine"]
NOTHING_MEASURED = Measured()
Chosen = Mapping[str, tuple[int, str]]
"""Numbers that replace those of the rules, by field of the request, each with its reason."""
NOTHING_CHOSEN: Chosen = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker.

    local_rank: the worker's local rank.
    compute_pus: hardware threads for computing.
    comm_pus: hardware threads for oneCCL.
    loader_pus: hardware threads for loading images.
    memory_policy: the kernel's memory policy for the worker.
    memory_nodes: the NUMA nodes of that policy.
    memory_bytes: estimated peak memory, in bytes; None if network or batch are unknown.
    intra_op: number of intra-op threads.
    inter_op: number of inter-op threads.
    local_batch: images per step; None if not requested.
    env: environment variables of the worker.
    """

    local_rank: Count
    compute_pus: Annotated[Ids, Meta(min_length=1)]
    comm_pus: Ids
    loader_pus: Ids
    memory_policy: MemoryPolicy
    memory_nodes: Ids
    memory_bytes: Count | None
    intra_op: OneOrMore
    inter_op: OneOrMore
    local_batch: Count | None
    env: Mapping[VariableName, str] = field(hash=False)

    @property
    def pus(self) -> tuple[int, ...]:
        """The worker's domain: all PUs that it may run on, ascending."""
        return tuple(sorted({*self.compute_pus, *self.comm_pus, *self.loader_pus}))


def batch_reasons(
    machine: Machine, request: Request, workers: tuple[WorkerPlan, ...], memories: tuple[Memory, ...]
) -> list[Reason]:
    """Explain the local batches and the workers' memory."""
    batches = sorted({worker.local_batch for worker in workers if worker.local_batch is not None})
    if not batches:
        return []
    default = request.workload is not None and request.workload.assumed and request.local_batch == USUAL_BATCH
    why = "the default, as neither a recipe nor {local_batch} sets it" if default else SET
    if request.global_batch is not None:
        why = numbers_text(
            "equal parts of the global batch of {global_batch:image} on {workers:worker}, in as few backward passes "
            "as possible",
            global_batch=request.global_batch,
            workers=request.nodes * len(workers),
        )
    if request.balance == "batch":
        why = numbers_text(
            "proportional to compute threads, {average} on average, so that all workers take the same time",
            average=request.local_batch or 0,
        )
    reasons = [Reason(what="local batch", value=numbers_text("{images}", images=tuple(batches)), why=why)]
    if request.workload is not None:
        parts = footprint(request.workload, batches[-1])
        room = min(memory.room_bytes for memory in memories)
        kinds = {memory_name(machine, w.memory_policy, w.memory_nodes, w.pus) for w in workers}
        value = numbers_text(
            "{need:GiB .1f} GiB of {kinds}" if room == inf else "{need:GiB .1f} of {room:GiB .1f} GiB of {kinds}",
            need=parts.total,
            room=room,
            kinds=" or ".join(sorted(kinds)),
        )
        why = numbers_text(
            "{network}, {images:image} per step: activations {activations:GiB .2f}, weights {weights:GiB .2f}, "
            "gradients {gradients:GiB .2f}, optimizer {optimizer:GiB .2f}, process {process:GiB .2f} GiB",
            network=f"{request.workload.name}{' (assumed)' if request.workload.assumed else ''}",
            images=batches[-1],
            **asdict(parts),
        )
        reasons.append(Reason(what="memory per worker", value=value, why=why))
    return reasons


def worker_costs(request: Request, workers: tuple[WorkerPlan, ...]) -> list[Reason]:
    """Explain the cost of the number of workers: ranks per all-reduce, images per backward pass, memory."""
    ranks, images = request.nodes * len(workers), [w.local_batch for w in workers if w.local_batch is not None]
    memory = [w.memory_bytes for w in workers if w.memory_bytes is not None]
    costs = [
        "{ranks:rank} in each all-reduce",
        *(["{images:image} in one backward pass of all workers"] if images else []),
        *(["{memory:GiB .1f} GiB on a host"] if memory else []),
    ]
    value = numbers_text(", ".join(costs), ranks=ranks, images=request.nodes * sum(images), memory=sum(memory))
    why = "each worker has its own process, weights and gradients; fewer workers with more threads cost less"
    return [Reason(what="cost of the workers", value=value, why=why)] if ranks > 1 else []


def ccl_reasons(variables: Mapping[str, str], default_why: str | None) -> list[Reason]:
    """Explain oneCCL's variables in a worker's environment."""
    reasons = []
    if "CCL_WORKER_COUNT" in variables:
        why = default_why or "one for each comm CPU; CCL_WORKER_AFFINITY lists the CPUs of all workers"
        value = numbers_text("{threads}", threads=int(variables["CCL_WORKER_COUNT"]))
        reasons.append(Reason(what="oneCCL threads per worker", value=value, why=why))
    if "CCL_YIELD" in variables:
        why = "workers share cores, so a waiting rank yields its core instead of spinning"
        reasons.append(Reason(what="waiting of MPI and oneCCL", value="yields", why=why))
    return reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBest:
    """The best other value of a decision, by the predicted step time.

    what: the decision, as in the plan's reasons.
    value: its value in this plan.
    other: the other value.
    slower_percent: by how much fewer images/s are predicted with it, in percent; negative if more.
    """

    what: str
    value: Count
    other: Count
    slower_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a host: its workers, with a reason for every value, and the measurements it is based on.

    Texts have settings in braces, `{balance=batch}`, which command lines and recipes spell differently: see
    `render_message`.
    """

    machine: Machine
    request: Request
    runtime: Runtime
    workers: tuple[WorkerPlan, ...]
    unused: tuple[Unused, ...]
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]
    measured: Measured = NOTHING_MEASURED
    next_best: tuple[NextBest, ...] = ()

    @property
    def oversubscribed(self) -> bool:
        """Whether workers share cores."""
        core_of = self.machine.core_of
        used = [core for worker in self.workers for core in {core_of[pu] for pu in worker.pus}]
        return len(used) > len(set(used))

    @property
    def computing_cores(self) -> int:
        """Number of cores that compute."""
        core_of = self.machine.core_of
        return len({core_of[pu] for worker in self.workers for pu in worker.compute_pus})

    def render(self, wording: Wording) -> "Plan":
        """Return the plan with the settings in its texts spelled by `wording(name, value)`."""
        return replace(
            self,
            unused=tuple(replace(item, why=render_message(item.why, wording)) for item in self.unused),
            reasons=tuple(
                replace(reason, value=render_message(reason.value, wording), why=render_message(reason.why, wording))
                for reason in self.reasons
            ),
            warnings=tuple(render_message(text, wording) for text in self.warnings),
        )

    def memory_kind(self, worker: WorkerPlan) -> str:
        """Return the kind of a worker's memory: "DRAM", "HBM", "MCDRAM"; "HBM + DRAM" if it may overflow into DRAM."""
        return memory_name(self.machine, worker.memory_policy, worker.memory_nodes, worker.pus)


Compare = Callable[[Plan, Chosen], Plan]
"""Takes a plan by the rules, and the numbers that were chosen instead of theirs; returns it with the cost of the next
best numbers, or a plan with faster ones."""


def plan_machine(
    machine: Machine,
    request: Request | None = None,
    runtime: Runtime | None = None,
    measured: Measured = NOTHING_MEASURED,
    chosen: Chosen = NOTHING_CHOSEN,
    compare: Compare | None = None,
) -> Plan:
    """Plan one host: by default by the rules alone, for torch's own libgomp and glibc.

    `measured` replaces figures that the rules assume, `chosen` numbers that they choose. `compare` compares the plan
    with others and may return a faster one: `cputrain.predict.compare_plan`, for the plan that `cputrain plan` shows.
    Invariants, checked before returning: domains are disjoint and inside the allowed set; no two workers share a core,
    unless the request allows it; every allowed PU is used or listed as unused with a reason; the estimated memory fits.
    Raises InputError if the request does not fit the host.
    """
    request = request or Request()
    check_request(request)
    if not machine.allowed_pus:
        raise InputError(f"no CPU of host {machine.name} is available to this process: check its cpuset")
    usable = usable_cores(machine, request)
    full, default_why = with_defaults(usable.machine, request, measured)
    assert all(getattr(request, name) in (None, value) for name, (value, _) in chosen.items()), "the request sets it"
    values: dict[str, Any] = {name: value for name, (value, _) in chosen.items()}
    full = replace(full, **values)
    default_why |= {name: why for name, (_, why) in chosen.items()}
    loaded, runtime_warnings = planned_runtime(
        runtime or Runtime(), full.openmp, default_why.get("openmp", SET), request.allocator
    )
    if full.workload is not None:
        full = replace(full, workload=loaded.holds(full.workload))
    partition = _partition(usable.machine, full, default_why.get("ppn", SET))
    full = replace(full, local_batch=_local_batch(full, len(partition.domains)))
    sizes = tuple(
        worker_sizes(usable.machine, full, default_why, domain, measured, local_rank=i, ppn=len(partition.domains))
        for i, domain in enumerate(partition.domains)
    )
    roles = tuple(assign_roles(domain, size, full) for domain, size in zip(partition.domains, sizes, strict=True))
    workers, memories, misfit = _workers(usable.machine, full, partition.domains, roles, sizes, loaded)
    plan = Plan(
        machine=machine,
        request=request,
        runtime=loaded,
        workers=workers,
        unused=_merge_unused(
            *usable.unused,
            *partition.unused,
            *(item for role in roles for item in role.unused),
        ),
        reasons=(
            *usable.reasons,
            *partition.reasons,
            *worker_costs(full, workers),
            *_distinct_reasons(sizes, memories),
            *left_out_reasons(usable.machine, partition.domains, memories),
            *batch_reasons(machine, full, workers, memories),
            *ccl_reasons(workers[0].env, default_why.get("comm_threads")),
            *runtime_reasons(
                loaded,
                several_threads=max(w.intra_op for w in workers) > 1,
                pin=any(_pins(usable.machine, full, role) for role in roles),
                allocator_why=allocator_why(runtime, full.allocator, default_why.get("allocator", SET)),
            ),
        ),
        warnings=machine.warnings + usable.warnings + partition.warnings + misfit + runtime_warnings + measured.notes,
        measured=measured,
    )
    _check(plan)
    return plan if compare is None else compare(plan, chosen)


def _partition(machine: Machine, request: Request, ppn_why: str) -> Partition:
    """Choose the workers' domains: exclusive cores, or shared ones if oversubscription is allowed and necessary."""
    if request.oversubscribe and request.ppn is not None and request.ppn > len(machine.allowed_cores):
        return partition_shared(machine, request.ppn)
    proportional = request.balance == "batch"

    def headroom(domains: tuple[Domain, ...]) -> float:
        """Smallest ratio of a worker's memory to its need; an unknown program needs as much as a Python with torch."""
        threads = tuple(len(domain.cores) for domain in domains)
        batch = _local_batch(request, len(domains))
        batches = local_batches(domains, threads, batch, proportional=proportional)
        requested = request.workload is not None and not request.workload.assumed
        needs = tuple((peak_bytes(request.workload, b) if requested else None) or PROCESS_BYTES for b in batches)
        rooms = (memory.room_bytes for memory in place_memory(machine, domains, needs))
        return min(room / need for room, need in zip(rooms, needs, strict=True))

    return partition_host(
        machine,
        request.ppn,
        ppn_why=ppn_why,
        max_workers=request.most_per_host,
        proportional=proportional,
        headroom=headroom,
    )


def _local_batch(request: Request, ppn: int) -> int | None:
    """Return the most images of a worker's backward pass on hosts with ppn workers."""
    if request.local_batch is None:
        return None
    return most_per_pass(request.local_batch, request.global_batch, request.nodes * ppn)


def _workers(
    machine: Machine,
    request: Request,
    domains: tuple[Domain, ...],
    roles: tuple[CoreRoles, ...],
    sizes: tuple[WorkerSizes, ...],
    runtime: Runtime,
) -> tuple[tuple[WorkerPlan, ...], tuple[Memory, ...], tuple[str, ...]]:
    """Build the workers, their memory, and a warning if an assumed network does not fit in it.

    Raises DoesNotFitError if a known network does not fit.
    """
    threads = tuple(size.intra_op for size in sizes)
    batches = local_batches(domains, threads, request.local_batch, proportional=request.balance == "batch")
    peaks = tuple(peak_bytes(request.workload, batch) for batch in batches)
    memories = place_memory(machine, domains, peaks)
    misfit = check_memory_fit(request.workload, batches, memories)
    comm = tuple(role.comm for role in roles)
    ccl = ccl_environment(comm, request.comm_threads, shared_cores=len(roles) > len(machine.allowed_cores))
    workers = tuple(
        WorkerPlan(
            local_rank=i,
            compute_pus=role.compute,
            comm_pus=role.comm,
            loader_pus=role.loader,
            memory_policy=memory.policy,
            memory_nodes=memory.nodes,
            memory_bytes=peak,
            intra_op=size.intra_op,
            inter_op=size.inter_op,
            local_batch=batch,
            env=worker_environment(role.compute, runtime, packed=role.packed, pin=_pins(machine, request, role)) | ccl,
        )
        for i, (role, size, batch, peak, memory) in enumerate(zip(roles, sizes, batches, peaks, memories, strict=True))
    )
    return workers, memories, misfit


def _pins(machine: Machine, request: Request, role: CoreRoles) -> bool:
    """Whether OpenMP binds each thread of a worker; on isolated PUs it must, as all threads would stay on one."""
    needed = request.pin_threads or not set(role.compute).isdisjoint(machine.isolated_pus)
    return needed and not role.single_pu


def _distinct_reasons(sizes: tuple[WorkerSizes, ...], memories: tuple[Memory, ...]) -> list[Reason]:
    """List the workers' reasons without duplicates."""
    every = (reason for size, memory in zip(sizes, memories, strict=True) for reason in (*size.reasons, memory.reason))
    return list(dict.fromkeys(every))


def _merge_unused(*unused: Unused) -> tuple[Unused, ...]:
    """Merge unused PUs that have the same reason."""
    by_why: dict[str, set[int]] = {}
    for item in filter(lambda item: item.pus, unused):
        by_why.setdefault(item.why, set()).update(item.pus)
    return tuple(Unused(pus=tuple(sorted(pus)), why=why) for why, pus in by_why.items())


def _check(plan: Plan) -> None:
    """Assert the invariants of `plan_machine`; a failure is a bug in the rules, not wrong input."""
    allowed = set(plan.machine.allowed_pus)
    for worker in plan.workers:
        parts = (worker.compute_pus, worker.comm_pus, worker.loader_pus)
        assert sum(map(len, parts)) == len(worker.pus), f"worker {worker.local_rank} uses a PU twice"
        assert allowed.issuperset(worker.pus), f"worker {worker.local_rank} leaves the allowed set"
        assert worker.intra_op == len(worker.compute_pus), f"worker {worker.local_rank}: threads and PUs differ"
    assert plan.request.oversubscribe or not plan.oversubscribed, "two workers share a core"
    batches = [worker.local_batch for worker in plan.workers if worker.local_batch is not None]
    assert sum(batches) == (_local_batch(plan.request, len(plan.workers)) or 0) * len(plan.workers), (
        "batches do not add up"
    )
    planned = {pu for worker in plan.workers for pu in worker.pus} | {pu for item in plan.unused for pu in item.pus}
    assert planned == allowed, f"PUs {format_list(allowed ^ planned)} are neither used nor listed as unused"
