"""Groups of equal hosts, each with one plan, and the address at which the hosts reach this one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, Request
from cputrain.affinity.planner.plan_file import SCHEMA_VERSION, dumps, plan_to_dict, plan_to_json
from cputrain.affinity.planner.predicted import checked_plan
from cputrain.affinity.ranks.host_names import is_loopback, is_this_host, network_name, repeated_host
from cputrain.affinity.ranks.rank import LOOPBACK, address_to
from cputrain.affinity.topology.machine import Machine
from cputrain.mpi.hosts.hostfile import fold


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Names of equal hosts, and the plan that each of them uses."""

    hosts: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The host groups of a job in rank order, and warnings about their differences."""

    groups: tuple[HostGroup, ...]
    warnings: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return sum(len(group.hosts) * len(group.plan.workers) for group in self.groups)


def plan_cluster(groups: Sequence[tuple[tuple[str, ...], Machine]], request: Request) -> Cluster:
    """Plan each group of hosts once, as part of one job. Raises InputError if a host is in two groups."""
    hosts = [host for names, _ in groups for host in names]
    if (twice := repeated_host(hosts)) is not None:
        same = "" if twice[0] == twice[1] else f", as {twice[0]}"
        raise InputError(f"host {twice[1]} is in two groups{same}: name each host once")
    whole = replace(request, nodes=len(hosts))
    plans = [checked_plan(machine, whole, Runtime()) for _, machine in groups]
    comm = {_ccl_threads(plan) for plan in plans}
    if len(comm) > 1:
        plans = [_with_ccl_threads(machine, whole, min(comm)) for _, machine in groups]
    planned = tuple(HostGroup(hosts=names, plan=plan) for (names, _), plan in zip(groups, plans, strict=True))
    threads = sorted({worker.intra_op for group in planned for worker in group.plan.workers})
    uneven = (
        (f"workers have {threads[0]} to {threads[-1]} threads: the smallest sets the pace of each step on all hosts",)
        if len(threads) > 1 and request.balance == "equal"
        else ()
    )
    return Cluster(groups=planned, warnings=uneven)


def _ccl_threads(plan: Plan) -> int:
    return int(plan.workers[0].env.get("CCL_WORKER_COUNT", "0"))


def _with_ccl_threads(machine: Machine, request: Request, threads: int) -> Plan:
    """Plan a host for this number of oneCCL threads per worker, and as many comm cores as they need unless a profile
    places them."""
    chosen = {"comm_threads": (threads, "the most that all hosts can have, as oneCCL connects equal numbers")}
    if request.profile == "auto":
        each = max(len(core.pus) for core in machine.allowed_cores)
        chosen["comm_cores"] = ceil(threads / each), "enough for the oneCCL threads that all hosts can have"
    return checked_plan(machine, request, Runtime(), chosen=chosen)


def one_group(hosts: tuple[str, ...], plan: Plan) -> Cluster:
    """Return a cluster of equal hosts."""
    return Cluster(groups=(HostGroup(hosts=hosts, plan=plan),), warnings=())


def job_plan_json(groups: Sequence[HostGroup]) -> str:
    """Return the plan file for a job's ranks: one plan if all hosts share it, else each group's hosts and plan."""
    if all(group.plan == groups[0].plan for group in groups):
        return plan_to_json(groups[0].plan)
    return dumps({"host_groups": [{"hosts": list(group.hosts), "plan": plan_to_dict(group.plan)} for group in groups]})


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Convert a cluster's plans to JSON data: for each group its folded host names and one plan."""
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": cluster.world_size,
        "host_groups": [
            {"hosts": fold(group.hosts), "count": len(group.hosts), "plan": plan_to_dict(group.plan)}
            for group in cluster.groups
        ],
        "warnings": list(cluster.warnings),
    }


def own_address(hosts: tuple[str, ...]) -> str:
    """Return this host's address as other hosts see it: the source address of packets to the first other host."""
    for host in hosts:
        if is_this_host(host):
            continue
        try:
            address = address_to(network_name(host))
        except OSError as error:
            raise InputError(f"host {host} cannot be reached from here ({error}): correct its name") from None
        if not is_loopback(address):  # a loopback address means another name of this host
            return address
    return LOOPBACK
