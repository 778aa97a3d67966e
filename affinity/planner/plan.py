"""Request, WorkerPlan, Plan; plan_machine(machine, request) -> Plan. Pure: the same input gives the same plan."""

from dataclasses import dataclass, replace
from math import inf

from affinity.errors import InputError
from affinity.planner import rules
from affinity.planner.core_roles import TOO_SLOW, USUAL_BATCH, Split, Unused, split_domain
from affinity.planner.domains import Cut, cut_host
from affinity.planner.memory import Memory, batches_of, check_fit, memory_name, need, place
from affinity.planner.oneccl import ccl_environment
from affinity.planner.openmp import environment, explain, planned_runtime
from affinity.planner.oversubscribe import cut_shared
from affinity.planner.request import Request, check_request, with_profile
from affinity.planner.rules import Reason
from affinity.planner.runtime import Runtime
from affinity.planner.workload import footprint
from affinity.topology.cpuset import format_list
from affinity.topology.machine import Machine
from affinity.units import GIB

__all__ = ["Plan", "Request", "WorkerPlan", "plan_machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker: the PUs that compute, communicate and load, its memory, threads, batch and environment.

    `local_batch` (images a step) and `memory_bytes` (estimated peak) are None where the request does not tell.
    """

    local_rank: int
    compute_pus: tuple[int, ...]
    comm_pus: tuple[int, ...]
    loader_pus: tuple[int, ...]
    memory_policy: str
    memory_nodes: tuple[int, ...]
    memory_bytes: int | None
    intra_op: int
    inter_op: int
    local_batch: int | None
    env: tuple[tuple[str, str], ...]

    @property
    def pus(self) -> tuple[int, ...]:
        """The domain: every PU that this worker may run on, ascending."""
        return tuple(sorted({*self.compute_pus, *self.comm_pus, *self.loader_pus}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A host's workers, with a reason for every number."""

    machine: Machine
    request: Request
    runtime: Runtime
    workers: tuple[WorkerPlan, ...]
    unused: tuple[Unused, ...]
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...]

    @property
    def oversubscribed(self) -> bool:
        """Whether workers share cores."""
        core_of = {pu: core for core in self.machine.cores for pu in core.pus}
        used = [core for worker in self.workers for core in {core_of[pu] for pu in worker.pus}]
        return len(used) > len(set(used))

    def memory_kind(self, worker: WorkerPlan) -> str:
        """The memory that a worker uses: "DRAM", "HBM", "MCDRAM"; "HBM + DRAM" where it may overflow into DRAM."""
        return memory_name(self.machine, worker.memory_policy, worker.memory_nodes, worker.pus)

    def _repr_svg_(self) -> str:
        """The picture that notebooks show."""
        from affinity.views.svg import picture_svg  # which needs this class

        return picture_svg(self)


def plan_machine(machine: Machine, request: Request, runtime: Runtime) -> Plan:
    """Plan one host.

    Invariants, checked before returning: domains are disjoint and inside the allowed set; no two workers share a
    core, unless the request allows it; every allowed PU is used or named with a reason; the estimated memory fits.
    Raises InputError when the request does not fit the host.
    """
    check_request(request)
    if not machine.allowed_pus:
        raise InputError(f"host {machine.name} lends this process no PU: look at its cpuset")
    free, occupied, reasons = rules.beside(machine, request.taken)
    fed, starved, limits = rules.within_quota(free)
    reasons += limits
    asked, decided = with_profile(fed, request)
    runtime, doubts = planned_runtime(runtime, asked.openmp, decided.get("openmp", "asked for"))
    proportional = asked.balance == "batch"
    cut = _cut(fed, asked)
    why_ppn = decided.get("ppn", cut.why_count)
    reasons.append(Reason(what="workers per host", value=str(len(cut.domains)), why=why_ppn))
    reasons += [Reason(what=what, value=value, why=why) for what, value, why in cut.notes]
    splits = tuple(
        split_domain(fed, asked, decided, domain, i, len(cut.domains)) for i, domain in enumerate(cut.domains)
    )
    threads = tuple(len(split.compute) for split in splits)
    batches = batches_of(cut.domains, threads, asked.local_batch, proportional=proportional)
    needs = tuple(need(asked.workload, batch) for batch in batches)
    memories = place(fed, cut.domains, needs)
    check_fit(asked.workload, batches, memories)
    workers = tuple(
        _worker(i, split, memory, runtime, pin=asked.pin_threads, local_batch=batch, memory_bytes=peak)
        for i, (split, batch, peak, memory) in enumerate(zip(splits, batches, needs, memories, strict=True))
    )
    ccl = ccl_environment(
        tuple(split.comm for split in splits), asked.comm_threads, shared_cores=len(splits) > len(fed.allowed_cores)
    )
    workers = tuple(replace(worker, env=worker.env + ccl) for worker in workers)
    for split, memory in zip(splits, memories, strict=True):
        why = (*split.reasons, Reason(what="memory policy", value=memory.policy, why=memory.why))
        reasons += [reason for reason in why if reason not in reasons]
    reasons += _about_batches(machine, asked, workers, memories)
    reasons += _about_oneccl(workers, decided)
    reasons += explain(runtime, several_threads=max(threads) > 1, pin=asked.pin_threads)
    unused = [Unused(pus=starved, why="beyond the CPU quota")] if starved else []
    unused += [Unused(pus=occupied, why="on cores of processes that other plans have bound")] if occupied else []
    unused += [Unused(pus=core.pus, why=TOO_SLOW) for core in cut.left]
    plan = Plan(
        machine=machine,
        request=request,
        runtime=runtime,
        workers=workers,
        unused=tuple(_merged(unused + [item for split in splits for item in split.unused])),
        reasons=tuple(reasons),
        warnings=cut.warnings + doubts,
    )
    _check(plan)
    return plan


def _worker(
    local_rank: int,
    split: Split,
    memory: Memory,
    runtime: Runtime,
    *,
    pin: bool,
    local_batch: int | None,
    memory_bytes: int | None,
) -> WorkerPlan:
    """A worker; its environment is still without oneCCL's variables, which depend on all workers."""
    return WorkerPlan(
        local_rank=local_rank,
        compute_pus=split.compute,
        comm_pus=split.comm,
        loader_pus=split.loader,
        memory_policy=memory.policy,
        memory_nodes=memory.nodes,
        memory_bytes=memory_bytes,
        intra_op=len(split.compute),
        inter_op=split.inter_op,
        local_batch=local_batch,
        env=environment(split.compute, runtime, packed=split.packed, pin=pin and not split.lone),
    )


def _cut(machine: Machine, asked: Request) -> Cut:
    """The workers' domains: cores of their own, or shared ones where that is allowed and there are too few."""
    if asked.oversubscribe and asked.ppn is not None and asked.ppn > len(machine.allowed_cores):
        return cut_shared(machine, asked.ppn)
    return cut_host(machine, asked.ppn, proportional=asked.balance == "batch")


def _about_batches(
    machine: Machine, asked: Request, workers: tuple[WorkerPlan, ...], memories: tuple[Memory, ...]
) -> list[Reason]:
    """The local batches and the memory that they take."""
    batches = sorted({worker.local_batch for worker in workers if worker.local_batch is not None})
    if not batches:
        return []
    usual = asked.workload is not None and asked.workload.assumed and asked.local_batch == USUAL_BATCH
    how = "the usual one; a recipe or --local-batch tells another" if usual else "asked for"
    if asked.balance == "batch":
        how = f"in proportion to compute threads, {asked.local_batch} on average: all take the same time"
    shown = str(batches[0]) if len(batches) == 1 else f"{batches[0]}-{batches[-1]}"
    reasons = [Reason(what="local batch", value=shown, why=how)]
    if asked.workload is not None:
        parts = footprint(asked.workload, batches[-1])
        room = min(memory.room_bytes for memory in memories)
        what = f"{asked.workload.name}{' (assumed)' if asked.workload.assumed else ''}"
        why = (
            f"{what}, {batches[-1]} images a step: activations {parts.activations / GIB:.2f}, weights "
            f"{parts.weights / GIB:.2f}, gradients {parts.gradients / GIB:.2f}, optimizer {parts.optimizer / GIB:.2f}, "
            f"the process itself {parts.process / GIB:.2f} GiB"
        )
        of = "" if room == inf else f" of {room / GIB:.1f}"
        kinds = {memory_name(machine, w.memory_policy, w.memory_nodes, w.pus) for w in workers}
        value = f"{parts.total / GIB:.1f}{of} GiB of {' or '.join(sorted(kinds))}"
        reasons.append(Reason(what="memory per worker", value=value, why=why))
    return reasons


def _about_oneccl(workers: tuple[WorkerPlan, ...], decided: dict[str, str]) -> list[Reason]:
    env, reasons = dict(workers[0].env), []
    if "CCL_WORKER_COUNT" in env:
        why = decided.get("comm_threads", "one for each PU that communicates; every worker lists those of all workers")
        reasons.append(Reason(what="oneCCL threads per worker", value=env["CCL_WORKER_COUNT"], why=why))
    if "CCL_YIELD" in env:
        why = "workers share cores: a rank that waits leaves its core to another, where MPI and oneCCL would spin"
        reasons.append(Reason(what="waiting of MPI, oneCCL", value="yields", why=why))
    return reasons


def _merged(unused: list[Unused]) -> list[Unused]:
    by_why: dict[str, set[int]] = {}
    for item in unused:
        by_why.setdefault(item.why, set()).update(item.pus)
    return [Unused(pus=tuple(sorted(pus)), why=why) for why, pus in by_why.items()]


def _check(plan: Plan) -> None:
    """Assert the invariants of `plan_machine`; a failure here is a defect of the rules, not of the user's input."""
    allowed = set(plan.machine.allowed_pus)
    for worker in plan.workers:
        parts = (worker.compute_pus, worker.comm_pus, worker.loader_pus)
        assert sum(map(len, parts)) == len(worker.pus), f"worker {worker.local_rank} uses a PU twice"
        assert allowed.issuperset(worker.pus), f"worker {worker.local_rank} leaves the allowed set"
        assert worker.intra_op == len(worker.compute_pus), f"worker {worker.local_rank}: threads and PUs differ"
    assert plan.request.oversubscribe or not plan.oversubscribed, "two workers share a core"
    batches = [worker.local_batch for worker in plan.workers if worker.local_batch is not None]
    assert sum(batches) == (plan.request.local_batch or 0) * len(plan.workers), "batches do not add up"
    named = {pu for worker in plan.workers for pu in worker.pus} | {pu for item in plan.unused for pu in item.pus}
    assert named == allowed, f"PUs {format_list(allowed ^ named)} are neither used nor named"
