"""Groups of hosts with a plan each, and the address by which hosts reach this one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, Request, plan_machine
from cputrain.affinity.planner.plan_file import SCHEMA_VERSION, dumps, plan_to_dict, plan_to_json
from cputrain.affinity.ranks.host_names import is_loopback, is_this_host, network_name, repeated_host
from cputrain.affinity.ranks.rank import LOOPBACK, address_to
from cputrain.affinity.topology.machine import Machine
from cputrain.mpi.hosts.hostfile import fold


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Equal hosts, by name, and the plan of each of them."""

    hosts: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The host groups of a job, in the order of the ranks, and warnings about their differences."""

    groups: tuple[HostGroup, ...]
    warnings: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return sum(len(group.hosts) * len(group.plan.workers) for group in self.groups)


def plan_cluster(groups: Sequence[tuple[tuple[str, ...], Machine]], request: Request) -> Cluster:
    """Plan each group of hosts once, as part of one job. Raises InputError when a host is in two groups."""
    hosts = [host for names, _ in groups for host in names]
    if (twice := repeated_host(hosts)) is not None:
        same = "" if twice[0] == twice[1] else f", as {twice[0]}"
        raise InputError(f"host {twice[1]} is in two groups{same}: name each host once")
    whole = replace(request, nodes=len(hosts))
    planned = tuple(HostGroup(hosts=names, plan=plan_machine(machine, whole, Runtime())) for names, machine in groups)
    threads = sorted({worker.intra_op for group in planned for worker in group.plan.workers})
    uneven = (
        (f"workers have {threads[0]} to {threads[-1]} threads: the smallest sets the pace of each step on all hosts",)
        if len(threads) > 1 and request.balance == "equal"
        else ()
    )
    return Cluster(groups=planned, warnings=uneven)


def one_group(hosts: tuple[str, ...], plan: Plan) -> Cluster:
    """A cluster of equal hosts."""
    return Cluster(groups=(HostGroup(hosts=hosts, plan=plan),), warnings=())


def job_plan_json(groups: Sequence[HostGroup]) -> str:
    """The plan file of a job's ranks: the plan of all hosts, or that of each group with its hosts' names."""
    if all(group.plan == groups[0].plan for group in groups):
        return plan_to_json(groups[0].plan)
    return dumps({"host_groups": [{"hosts": list(group.hosts), "plan": plan_to_dict(group.plan)} for group in groups]})


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster's plans as JSON data: for each group its folded host names and one plan."""
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
    """This host's address on the way to a job's hosts: the one that packets to the first other host leave from."""
    for host in hosts:
        if is_this_host(host):
            continue
        try:
            address = address_to(network_name(host))
        except OSError as error:
            raise InputError(f"host {host} cannot be reached from here: {error}: correct its name") from None
        if not is_loopback(address):  # else it is another name of this host
            return address
    return LOOPBACK
