"""Hosts of several kinds -> a plan for each kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from affinity.errors import InputError
from affinity.planner.plan import Plan, Request, plan_machine
from affinity.planner.plan_file import SCHEMA_VERSION, dumps, plan_to_dict, plan_to_json
from affinity.planner.runtime import Runtime
from affinity.topology.machine import Machine
from mpi.hosts.nodelist import fold


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Hosts that are alike, and the plan of each of them."""

    hosts: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The kinds of hosts of a job, in the order of the ranks, and what their differences cost."""

    kinds: tuple[Kind, ...]
    warnings: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return sum(len(kind.hosts) * len(kind.plan.workers) for kind in self.kinds)


def plan_cluster(kinds: Sequence[tuple[tuple[str, ...], Machine]], request: Request) -> Cluster:
    """Plan each kind of host once, as part of a job of all of them. Raises InputError when a host is of two kinds."""
    hosts = [host for names, _ in kinds for host in names]
    if len(set(hosts)) < len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise InputError(f"host {twice} is of two kinds: name each host once")
    whole = replace(request, nodes=len(hosts))
    made = tuple(Kind(hosts=names, plan=plan_machine(machine, whole, Runtime())) for names, machine in kinds)
    threads = sorted({worker.intra_op for kind in made for worker in kind.plan.workers})
    uneven = (
        (f"workers of {threads[0]} to {threads[-1]} threads: the smallest sets the pace of each step on all hosts",)
        if len(threads) > 1 and request.balance == "equal"
        else ()
    )
    return Cluster(kinds=made, warnings=uneven)


def one_kind(hosts: tuple[str, ...], plan: Plan) -> Cluster:
    """Hosts that are all alike."""
    return Cluster(kinds=(Kind(hosts=hosts, plan=plan),), warnings=())


def job_plan_json(kinds: Sequence[Kind]) -> str:
    """What the ranks read: the plan of all hosts, or the plan of each kind with its hosts' names written out."""
    if len(kinds) == 1:
        return plan_to_json(kinds[0].plan)
    return dumps({"kinds": [{"hosts": list(kind.hosts), "plan": plan_to_dict(kind.plan)} for kind in kinds]})


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster's plans as JSON data: for each kind its hosts, folded, and one of their plans."""
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": cluster.world_size,
        "kinds": [
            {"hosts": fold(kind.hosts), "count": len(kind.hosts), "plan": plan_to_dict(kind.plan)}
            for kind in cluster.kinds
        ],
        "warnings": list(cluster.warnings),
    }
