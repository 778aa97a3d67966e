"""One worker's domain -> what computes, what communicates, what loads, what stays idle."""

from dataclasses import dataclass, replace

from affinity.errors import InputError
from affinity.planner import rules
from affinity.planner.domains import Domain
from affinity.planner.request import Request
from affinity.planner.rules import Reason
from affinity.planner.workload import RESNET50
from affinity.topology.machine import Core, Machine

USUAL_BATCH = 32  # images a step, where nobody says
TOO_SLOW = "of another kind: a step would wait for them (--balance batch may use them)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Allowed PUs that no worker gets, and why."""

    pus: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A domain cut into PUs that compute, communicate and load; `packed`: OpenMP's own order starts with `compute`."""

    compute: tuple[int, ...]
    comm: tuple[int, ...]
    loader: tuple[int, ...]
    packed: bool
    inter_op: int
    unused: tuple[Unused, ...]
    reasons: tuple[Reason, ...]

    @property
    def lone(self) -> bool:
        """Whether all of it is one PU, so that the process's mask alone binds its one thread."""
        return len(self.compute) + len(self.comm) + len(self.loader) == 1


def split_domain(
    machine: Machine, asked: Request, decided: dict[str, str], domain: Domain, local_rank: int, ppn: int
) -> Split:
    """Give a domain's cores their work: comm cores first (a host's first cores also take its interrupts), then loader
    cores, the rest computes; cores too slow to compute are taken for comm and loading before any other."""
    workload, batch = asked.workload or RESNET50, asked.local_batch or USUAL_BATCH
    comm, why_comm = rules.comm_cores(
        domain, machine, workload, ppn=ppn, nodes=asked.nodes, link_gbit=asked.link_gbit, local_batch=batch
    )
    left = replace(domain, free=domain.free[comm:])
    loader, why_loader = rules.loader_cores(left, machine, workload)
    most = len(domain.cores) + len(domain.free) - 1  # what a profile may take of a small domain
    if asked.loader_cores is not None:
        loader, why_loader = asked.loader_cores, decided.get("loader_cores", "asked for")
        loader = min(loader, most) if "loader_cores" in decided else loader
    if asked.comm_cores is not None:
        comm, why_comm = asked.comm_cores, decided.get("comm_cores", "asked for")
        comm = min(comm, most - loader) if "comm_cores" in decided else comm
    free, taken = domain.free[: comm + loader], max(0, comm + loader - len(domain.free))
    if taken >= len(domain.cores):
        raise InputError(
            f"{comm} comm and {loader} loader cores leave none of worker {local_rank}'s {len(domain.cores)} cores: "
            "ask for fewer of them or a smaller ppn"
        )
    kept = len(domain.cores) - taken
    rest = domain.cores[:kept] if asked.spare_last else domain.cores[taken:]
    spare = free + (domain.cores[kept:] if asked.spare_last else domain.cores[:taken])
    candidates = tuple(pu for core in rest for pu in (core.pus if asked.smt else core.pus[:1]))
    intra, why_intra = rules.intra_op_threads(len(candidates), local_rank, asked.threads, asked.smt)
    inter, why_inter = rules.inter_op_threads(intra)
    if asked.inter_op is not None:
        inter, why_inter = asked.inter_op, decided.get("inter_op", "asked for")
    compute = candidates[:intra]
    siblings = _siblings(rest, compute, asked.comm_siblings)
    if siblings:
        comm_value, why_comm = f"0, {len(siblings)} second threads", decided.get("comm_siblings", "asked for")
    else:
        comm_value = str(comm)
    reasons = (
        Reason(what="comm cores per worker", value=comm_value, why=why_comm),
        Reason(what="loader cores per worker", value=str(loader), why=why_loader),
        Reason(what="intra-op threads", value=str(intra), why=why_intra),
        Reason(what="inter-op threads", value=str(inter), why=why_inter),
    )
    comm_pus = _first_threads_first(spare[:comm]) + siblings
    loader_pus = _pus(spare[comm:])
    mask = {*compute, *comm_pus, *loader_pus}
    in_order = _first_threads_first(tuple(sorted((*rest, *spare), key=lambda core: core.pus)))
    return Split(
        compute=compute,
        comm=comm_pus,
        loader=loader_pus,
        packed=tuple(pu for pu in in_order if pu in mask)[:intra] == compute,
        inter_op=inter,
        unused=_idle(rest, domain.free[comm + loader :], {*compute, *siblings}, asked),
        reasons=reasons,
    )


def _siblings(cores: tuple[Core, ...], compute: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Second threads of the first `count` compute cores. Raises InputError where they compute themselves."""
    second = tuple(core.pus[1] for core in cores if len(core.pus) > 1 and core.pus[0] in compute)[:count]
    if not set(second).isdisjoint(compute):
        raise InputError("communication on second hardware threads and smt=on exclude each other: leave smt off")
    return second


def _pus(cores: tuple[Core, ...]) -> tuple[int, ...]:
    return tuple(pu for core in cores for pu in core.pus)


def _first_threads_first(cores: tuple[Core, ...]) -> tuple[int, ...]:
    """The PUs of cores: the first thread of each, then the second of each, and so on."""
    threads = max((len(core.pus) for core in cores), default=0)
    return tuple(core.pus[i] for i in range(threads) for core in cores if i < len(core.pus))


def _idle(cores: tuple[Core, ...], slow: tuple[Core, ...], busy_pus: set[int], asked: Request) -> tuple[Unused, ...]:
    """The PUs of these cores that have no work, and why; `slow` ones are not among `cores`."""
    busy = [core for core in cores if not busy_pus.isdisjoint(core.pus)]
    siblings = tuple(pu for core in busy for pu in core.pus if pu not in busy_pus)
    beyond = tuple(pu for core in cores if core not in busy for pu in core.pus)
    idle = (
        Unused(pus=siblings, why="second threads of compute cores: two would contend for one core's vector units"),
        Unused(pus=beyond, why=f"threads={asked.threads} asked for"),
        Unused(pus=_pus(slow), why=TOO_SLOW),
    )
    return tuple(item for item in idle if item.pus)
