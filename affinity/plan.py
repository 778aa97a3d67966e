"""Request, WorkerPlan, Plan; plan_machine(machine, request) -> Plan. Pure: the same input gives the same plan."""

from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from affinity import rules
from affinity.cpuset import format_list
from affinity.errors import InputError
from affinity.machine import Core, Machine
from affinity.openmp import Runtime, environment, explain
from affinity.rules import Reason

SCHEMA_VERSION = 1
LEAST = {"ppn": 1, "threads": 1, "inter_op": 1, "comm_cores": 0, "loader_cores": 0, "nodes": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asks of a plan; None means that the rules decide.

    `pin_threads`: bind each OpenMP thread to a PU of its own. OpenMP then binds the process's first thread too, and
    all that it starts later (loader processes, say) inherits that one PU unless it moves itself. `nodes` is the
    number of hosts of the job: with more than one, communication gets cores of its own.
    """

    ppn: int | None = None
    threads: int | None = None
    inter_op: int | None = None
    comm_cores: int | None = None
    loader_cores: int | None = None
    smt: bool = False
    pin_threads: bool = True
    nodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker: the PUs that compute, communicate and load, its memory, its threads, its environment."""

    local_rank: int
    compute_pus: tuple[int, ...]
    comm_pus: tuple[int, ...]
    loader_pus: tuple[int, ...]
    memory_policy: str
    memory_nodes: tuple[int, ...]
    intra_op: int
    inter_op: int
    env: tuple[tuple[str, str], ...]

    @property
    def pus(self) -> tuple[int, ...]:
        """The domain: every PU that this worker may run on, ascending."""
        return tuple(sorted({*self.compute_pus, *self.comm_pus, *self.loader_pus}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Allowed PUs that no worker gets, and why."""

    pus: tuple[int, ...]
    why: str


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

    def _repr_svg_(self) -> str:
        """The picture that notebooks show."""
        from affinity.svg import picture_svg  # which needs this class

        return picture_svg(self)


def plan_machine(machine: Machine, request: Request, runtime: Runtime) -> Plan:
    """Plan one host.

    Invariants, checked before returning: domains are disjoint and inside the allowed set; no two workers share a
    core; every allowed PU is used or named with a reason. Raises InputError when the request does not fit the host.
    """
    for what, least in LEAST.items():
        value = getattr(request, what)
        if value is not None and value < least:
            raise InputError(f"{what}={value}: must be {least} or more")
    if not machine.allowed_pus:
        raise InputError(f"host {machine.name} lends this process no PU: look at its cpuset")
    fed, starved, reasons = rules.within_quota(machine)
    ppn, why_ppn = rules.workers_per_host(fed, request.ppn)
    cut, warnings = rules.domains(fed, ppn)
    reasons.append(why_ppn)
    workers: list[WorkerPlan] = []
    unused = [Unused(pus=starved, why="beyond the CPU quota")] if starved else []
    for local_rank, domain in enumerate(cut):
        worker, idle, why = _worker(fed, request, runtime, local_rank, domain)
        workers.append(worker)
        unused += idle
        reasons += [reason for reason in why if reason not in reasons]
    several = any(worker.intra_op > 1 for worker in workers)
    reasons += explain(runtime, several_threads=several, pin=request.pin_threads)
    plan = Plan(
        machine=machine,
        request=request,
        runtime=runtime,
        workers=tuple(workers),
        unused=tuple(_merged(unused)),
        reasons=tuple(reasons),
        warnings=tuple(warnings),
    )
    _check(plan)
    return plan


def _worker(
    machine: Machine, request: Request, runtime: Runtime, local_rank: int, domain: tuple[Core, ...]
) -> tuple[WorkerPlan, list[Unused], list[Reason]]:
    """Split one domain: comm cores first (a host's first cores also take its interrupts), loader cores, the rest."""
    comm, why_comm = rules.comm_cores(len(domain), request.nodes, request.comm_cores)
    loader, why_loader = rules.loader_cores(len(domain), request.loader_cores)
    rest = domain[comm + loader :]
    if not rest:
        raise InputError(
            f"{comm} comm and {loader} loader cores leave none of worker {local_rank}'s {len(domain)} cores: "
            "ask for fewer of them or a smaller ppn"
        )
    candidates = tuple(pu for core in rest for pu in (core.pus if request.smt else core.pus[:1]))
    intra, why_intra = rules.intra_op_threads(len(candidates), local_rank, request.threads, request.smt)
    inter, why_inter = rules.inter_op_threads(intra, request.inter_op)
    policy, nodes, why_memory = _memory(machine, domain)
    compute = candidates[:intra]
    worker = WorkerPlan(
        local_rank=local_rank,
        compute_pus=compute,
        comm_pus=_pus(domain[:comm]),
        loader_pus=_pus(domain[comm : comm + loader]),
        memory_policy=policy,
        memory_nodes=nodes,
        intra_op=intra,
        inter_op=inter,
        env=environment(compute, runtime, alone=comm + loader == 0, pin=request.pin_threads),
    )
    reasons = [
        Reason(what="comm cores per worker", value=str(comm), why=why_comm),
        Reason(what="loader cores per worker", value=str(loader), why=why_loader),
        Reason(what="intra-op threads", value=str(intra), why=why_intra),
        Reason(what="inter-op threads", value=str(inter), why=why_inter),
        Reason(what="memory policy", value=policy, why=why_memory),
    ]
    return worker, _idle(rest, compute, request), reasons


def _pus(cores: tuple[Core, ...]) -> tuple[int, ...]:
    return tuple(pu for core in cores for pu in core.pus)


def _idle(cores: tuple[Core, ...], compute: tuple[int, ...], request: Request) -> list[Unused]:
    """The PUs of these cores that do not compute, and why."""
    busy = [core for core in cores if not set(core.pus).isdisjoint(compute)]
    siblings = tuple(pu for core in busy for pu in core.pus if pu not in compute)
    beyond = tuple(pu for core in cores if core not in busy for pu in core.pus)
    idle = (
        Unused(pus=siblings, why="second threads of compute cores: two would contend for one core's vector units"),
        Unused(pus=beyond, why=f"threads={request.threads} asked for"),
    )
    return [item for item in idle if item.pus]


def _memory(machine: Machine, domain: tuple[Core, ...]) -> tuple[str, tuple[int, ...], str]:
    """Memory policy (default, bind, preferred, interleave), its NUMA nodes, and why."""
    usable = [node for node in machine.numa_nodes if node.memory_bytes and node.id in machine.allowed_nodes]
    own = {core.numa_node for core in domain}
    near = [node for node in usable if not own.isdisjoint(node.near)]
    fast = tuple(node.id for node in near if node.kind == "hbm" and not node.pus)
    local = tuple(node.id for node in near if node.kind == "dram" or node.pus)
    if len(fast) == 1:
        return "preferred", fast, "high-bandwidth memory next to the worker; what does not fit goes to its DRAM"
    if len(usable) <= 1:
        return "default", (), "one NUMA node with memory: nothing to choose"
    if not local:
        return "default", (), "no memory next to the worker that it may use: the kernel takes the nearest"
    if len(local) == 1:
        return "bind", local, "the memory next to the worker and no other"
    return "interleave", local, "the worker spans NUMA nodes: its pages are spread over them"


def _merged(unused: list[Unused]) -> list[Unused]:
    by_why: dict[str, set[int]] = {}
    for item in unused:
        by_why.setdefault(item.why, set()).update(item.pus)
    return [Unused(pus=tuple(sorted(pus)), why=why) for why, pus in by_why.items()]


def _check(plan: Plan) -> None:
    """Assert the invariants of `plan_machine`; a failure here is a defect of the rules, not of the user's input."""
    allowed = set(plan.machine.allowed_pus)
    core_of = {pu: core for core in plan.machine.cores for pu in core.pus}
    for worker in plan.workers:
        parts = (worker.compute_pus, worker.comm_pus, worker.loader_pus)
        assert sum(map(len, parts)) == len(worker.pus), f"worker {worker.local_rank} uses a PU twice"
        assert allowed.issuperset(worker.pus), f"worker {worker.local_rank} leaves the allowed set"
        assert worker.intra_op == len(worker.compute_pus), f"worker {worker.local_rank}: threads and PUs differ"
    for a, b in combinations(plan.workers, 2):
        shared = {core_of[pu] for pu in a.pus} & {core_of[pu] for pu in b.pus}
        assert not shared, f"workers {a.local_rank} and {b.local_rank} share a core"
    named = {pu for worker in plan.workers for pu in worker.pus} | {pu for item in plan.unused for pu in item.pus}
    assert named == allowed, f"PUs {format_list(allowed ^ named)} are neither used nor named"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data; `worker_from_dict` reads a worker back."""
    machine = plan.machine
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": {
            "name": machine.name,
            "model": machine.model,
            "isa": list(machine.isa),
            "packages": len(machine.packages),
            "numa_nodes": len(machine.numa_nodes),
            "cores": len(machine.cores),
            "pus": len(machine.pus),
            "allowed_pus": list(machine.allowed_pus),
        },
        "request": asdict(plan.request),
        "runtime": asdict(plan.runtime),
        "workers": [{**asdict(worker), "env": dict(worker.env)} for worker in plan.workers],
        "unused": [asdict(item) for item in plan.unused],
        "reasons": [asdict(reason) for reason in plan.reasons],
        "warnings": list(plan.warnings),
    }


def worker_from_dict(plan: dict[str, Any], local_rank: int) -> WorkerPlan:
    """Worker `local_rank` of a plan written by `plan_to_dict`. Raises InputError when there is none."""
    if plan.get("schema_version") != SCHEMA_VERSION:
        found = plan.get("schema_version")
        raise InputError(f"plan has schema_version {found}; this program reads {SCHEMA_VERSION}: make the plan again")
    workers = plan.get("workers", ())
    if not 0 <= local_rank < len(workers):
        raise InputError(f"local rank {local_rank} is not in the plan, which has {len(workers)} workers per host")
    try:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in workers[local_rank].items()}
        return WorkerPlan(**{**fields, "env": tuple(fields["env"].items())})
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"worker {local_rank} of the plan is damaged ({error!r}): make the plan again") from None
