"""The plans of a job's hosts in the formats that `cputrain plan` prints."""

import json
import shlex
from collections.abc import Callable

import yaml

from affinity.errors import InputError, as_option
from affinity.planner.plan_file import dumps, plan_to_json
from affinity.views.svg import plan_to_svg
from affinity.views.text import plan_to_text
from affinity.wording import counted
from mpi.hosts.groups import Cluster, cluster_to_dict
from mpi.hosts.nodelist import fold


def cluster_json(cluster: Cluster) -> str:
    """The plan of all hosts, or the plans of the groups of hosts that differ, as JSON."""
    return plan_to_json(cluster.groups[0].plan) if len(cluster.groups) == 1 else dumps(cluster_to_dict(cluster))


def _yaml(cluster: Cluster) -> str:
    return str(yaml.safe_dump(json.loads(cluster_json(cluster)), sort_keys=False)).rstrip()


def _svg(cluster: Cluster) -> str:
    return plan_to_svg(cluster.groups[0].plan, wording=as_option)


def _env(cluster: Cluster) -> str:
    """Shell assignments, one block for each worker."""
    blocks = (
        f"# worker {worker.local_rank}\n" + "\n".join(f"export {k}={shlex.quote(v)}" for k, v in worker.env)
        for worker in cluster.groups[0].plan.workers
    )
    return "\n".join(blocks)


FORMATS: dict[str, Callable[[Cluster], str]] = {"json": cluster_json, "yaml": _yaml, "svg": _svg, "env": _env}


def formatted(cluster: Cluster, output_format: str) -> str:
    """The plans in one of FORMATS. Raises InputError for several groups of hosts in a format of one."""
    if output_format != "json" and len(cluster.groups) > 1:
        raise InputError(
            f"--format {output_format} shows one group of hosts: use text, json or command, or plan each group alone"
        )
    return FORMATS[output_format](cluster)


def cluster_text(cluster: Cluster, *, colored: bool, explained: bool) -> str:
    """The plans as text, one for each group of hosts, and the warnings about them together."""
    several, lines = len(cluster.groups) > 1, []
    for group in cluster.groups:
        if several:
            lines.append(f"{counted(len(group.hosts), 'host')}: {fold(group.hosts)}")
        shown = plan_to_text(group.plan, colored=colored, explained=explained, wording=as_option)
        lines.append(shown + ("\n" if several else ""))
    if several:
        hosts = sum(len(group.hosts) for group in cluster.groups)
        workers = sum(len(group.hosts) * len(group.plan.workers) for group in cluster.groups)
        lines.append(f"{counted(hosts, 'host')}, {counted(workers, 'worker')}")
    return "\n".join((*lines, *(f"warning: {warning}" for warning in cluster.warnings)))
