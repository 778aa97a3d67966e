"""How many cores and threads each part of a worker has: as requested, else by the profile or a tuned plan, else by the
rules. defaults.py decides between the profile and the tuned plan."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from affinity.errors import RequestError
from affinity.planner import rules
from affinity.planner.core_rates import CoreRates, core_rates
from affinity.planner.core_roles import compute_candidates, reserve, second_threads
from affinity.planner.domains import Domain
from affinity.planner.measured import Measured
from affinity.planner.reasons import SET, Reason
from affinity.planner.request import Request
from affinity.planner.workload import RESNET50, USUAL_BATCH
from affinity.topology.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSizes:
    """Cores that communicate and load, second threads of compute cores that communicate, threads; with reasons."""

    comm_cores: int
    loader_cores: int
    comm_siblings: int
    intra_op: int
    inter_op: int
    reasons: tuple[Reason, ...]


def worker_sizes(
    machine: Machine,
    request: Request,
    default_why: Mapping[str, str],
    domain: Domain,
    measured: Measured,
    *,
    local_rank: int,
    ppn: int,
) -> WorkerSizes:
    """The sizes of the worker that has this domain.

    `request` has the values of the profile or the tuned plan filled in, `default_why` the reason for each of those. A
    requested value that does not fit raises RequestError; one that was filled in is lowered to what the domain has.
    """
    rates = core_rates(machine, request.workload or RESNET50, measured)
    comm, why_comm, loader, why_loader = _reserved_cores(rates, request, default_why, domain, ppn)
    if comm + loader - len(domain.spare) >= len(domain.cores):
        raise RequestError(
            f"{comm} comm and {loader} loader cores leave none of worker {local_rank}'s {len(domain.cores)} cores to "
            "compute: request fewer of them, or a smaller {ppn}"
        )
    compute = reserve(domain, comm + loader, at_end=request.reserve_last).compute
    candidates = compute_candidates(compute, smt=request.smt)
    if request.threads is not None and request.threads > len(candidates):
        raise RequestError(
            f"{{threads={request.threads}}}: worker {local_rank} has compute cores for {len(candidates)}: set "
            f"{{threads}} to {len(candidates)} or fewer"
        )
    intra, why_intra = _chosen(
        rules.intra_op_threads(len(candidates), smt=request.smt), request.threads, default_why.get("threads")
    )
    inter, why_inter = _chosen(
        rules.inter_op_threads(intra, request.workload), request.inter_op, default_why.get("inter_op")
    )
    siblings = len(second_threads(compute, candidates[:intra], request.comm_siblings))
    if siblings:
        why = default_why.get("comm_siblings", SET)
        why_comm = replace(why_comm, value=f"{comm} and {siblings} second threads", why=why)
    return WorkerSizes(
        comm_cores=comm,
        loader_cores=loader,
        comm_siblings=siblings,
        intra_op=intra,
        inter_op=inter,
        reasons=(why_comm, why_loader, why_intra, why_inter),
    )


def _reserved_cores(
    rates: CoreRates, request: Request, default_why: Mapping[str, str], domain: Domain, ppn: int
) -> tuple[int, Reason, int, Reason]:
    """Comm cores and why, loader cores and why."""
    workload, batch = request.workload or RESNET50, request.local_batch or USUAL_BATCH
    comm_rule = rules.comm_cores(
        domain, rates, workload, ppn=ppn, nodes=request.nodes, link_gbit=request.link_gbit, local_batch=batch
    )
    loader_rule = rules.loader_cores(replace(domain, spare=domain.spare[comm_rule[0] :]), rates, workload)
    most = len(domain.cores) + len(domain.spare) - 1  # what a default may take of a small domain
    loader, why_loader = _chosen(loader_rule, request.loader_cores, default_why.get("loader_cores"), most)
    comm, why_comm = _chosen(comm_rule, request.comm_cores, default_why.get("comm_cores"), most - loader)
    return comm, why_comm, loader, why_loader


def _chosen(
    rule: tuple[int, Reason], requested: int | None, default_why: str | None, most: int | None = None
) -> tuple[int, Reason]:
    """The requested value, or the default, which is at most `most`, or the rule's; and why."""
    if requested is None:
        return rule
    value = requested if default_why is None or most is None else min(requested, most)
    return value, replace(rule[1], value=str(value), why=default_why or SET)
