"""Plans as JSON files."""

import json
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from cputrain.affinity.errors import InputError, RequestError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, Request, WorkerPlan
from cputrain.affinity.planner.request import Measured, Reason, Unused, check_request
from cputrain.affinity.ranks.host_names import find_host, find_this_host
from cputrain.affinity.terminal import printable
from cputrain.affinity.topology.machine import Core, Count, Ids, Machine, NumaNode, OneOrMore

SCHEMA_VERSION = 1
T = TypeVar("T")
PLAN_FILE = "plan.json"
"""The name of a plan's file in the folder of a job or run."""
MOST = 1 << 63
# Control characters, which a terminal may take for commands, and halves of characters, which nothing can encode but
# those that stand for the bytes of a file name.
UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")


class WrittenMachine(Struct, kw_only=True):
    """The host, and what this process may use of it.

    packages: number of CPU sockets.
    numa_nodes: number of NUMA nodes, those without cores included.
    cores: number of cores.
    pus: number of hardware threads (PUs).
    isolated_pus: CPUs between which the scheduler moves no thread (isolcpus); absent where there are none.
    core_list: every core that may be used.
    numa_node_list: every NUMA node of the host.
    """

    name: str
    model: str = ""
    isa: tuple[str, ...] = ()
    packages: OneOrMore
    numa_nodes: Count
    cores: OneOrMore
    pus: OneOrMore
    allowed_pus: Ids
    allowed_nodes: Ids
    cpu_quota: float | None = None
    memory_limit_bytes: int | None = None
    isolated_pus: Ids | UnsetType = UNSET
    warnings: tuple[str, ...] = ()
    core_list: Annotated[tuple[Core, ...], Meta(min_length=1)]
    numa_node_list: tuple[NumaNode, ...]


class WrittenPlan(Struct, kw_only=True):
    """A host's plan: what `cputrain plan --format json` prints and plan.json holds.

    request: what was requested; None: the profile, a tuned plan or the rules decide.
    measured: what `cputrain bench` and `tune` have measured on this host, which the rules go by.
    workers: the workers of the host, by local rank.
    unused: allowed PUs that no worker uses, with the reason.
    reasons: each decision, with its reason.
    oversubscribed: whether workers share cores.
    warnings: what the user should know about this plan. Settings are in braces: {balance=batch} is --balance batch on
        the command line.
    """

    schema_version: Literal[1] = 1
    machine: WrittenMachine
    request: Request
    runtime: Runtime
    measured: Measured
    workers: Annotated[tuple[WorkerPlan, ...], Meta(min_length=1)]
    unused: tuple[Unused, ...]
    reasons: tuple[Reason, ...]
    oversubscribed: bool
    warnings: tuple[str, ...]


SAME_IN_FILE = ("name", "model", "isa", "allowed_pus", "allowed_nodes", "cpu_quota", "memory_limit_bytes", "warnings")


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data; `plan_from_dict` reads it back."""
    machine = plan.machine
    host = WrittenMachine(
        **{name: getattr(machine, name) for name in SAME_IN_FILE},
        packages=len(machine.packages),
        numa_nodes=len(machine.numa_nodes),
        cores=len(machine.cores),
        pus=len(machine.pus),
        isolated_pus=machine.isolated_pus or UNSET,
        core_list=machine.cores,
        numa_node_list=machine.numa_nodes,
    )
    written = WrittenPlan(
        machine=host,
        request=plan.request,
        runtime=plan.runtime,
        measured=plan.measured,
        workers=plan.workers,
        unused=plan.unused,
        reasons=plan.reasons,
        oversubscribed=plan.oversubscribed,
        warnings=plan.warnings,
    )
    data: dict[str, Any] = msgspec.to_builtins(written, enc_hook=str)  # of the texts that carry their numbers
    return data


def plan_to_json(plan: Plan) -> str:
    """The plan as JSON text, with each field of a worker, each core and each NUMA node on a line."""
    return dumps(plan_to_dict(plan))


def dumps(value: Any, indent: str = "") -> str:
    """JSON with small dictionaries, and values that hold no dictionaries, on one line."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list | tuple) or not value or _is_leaf(value, len(flat)):
        return flat
    deeper = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {dumps(item, deeper)}" for key, item in value.items()]
    else:
        items = [dumps(item, deeper) for item in value]
    left, right = "{}" if isinstance(value, dict) else "[]"
    return f"{left}\n{deeper}" + f",\n{deeper}".join(items) + f"\n{indent}{right}"


def _is_leaf(value: Any, length: int) -> bool:
    """Whether a value is short, or a list of numbers."""
    holds = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict) and not any(isinstance(item, dict | list | tuple | str) for item in holds):
        return True
    return length <= 140 and not any(isinstance(item, dict) for item in holds)


def plan_from_dict(data: Any) -> Plan:
    """The plan that `plan_to_dict` wrote. Raises InputError when it is damaged or of another schema."""
    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != SCHEMA_VERSION or isinstance(found, bool):
        shown = json.dumps(found)[:60]
        raise InputError(f"the plan has schema_version {shown}; this program reads {SCHEMA_VERSION}: plan again")
    try:
        written = _checked(data, WrittenPlan)
        check_request(written.request)
    except (ValueError, RequestError) as error:
        raise InputError(f"the plan is damaged: {printable(str(error))}: plan again") from None
    host = written.machine
    plan = Plan(
        machine=Machine(
            **{name: getattr(host, name) for name in SAME_IN_FILE},
            isolated_pus=() if host.isolated_pus is UNSET else host.isolated_pus,
            cores=host.core_list,
            numa_nodes=host.numa_node_list,
        ),
        request=written.request,
        runtime=written.runtime,
        workers=written.workers,
        unused=written.unused,
        reasons=written.reasons,
        warnings=written.warnings,
        measured=written.measured,
    )
    for problem in _unknown_parts(plan):
        raise InputError(f"the plan is damaged: {problem}: plan again")
    return plan


def _checked(data: Any, kind: type[T]) -> T:
    """JSON data as a type. Raises ValueError with the first place that is wrong."""
    try:
        found = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        raise ValueError(f"{place.removesuffix('`')}: {problem}" if place else problem) from None
    for problem in _problems(data, msgspec.to_builtins(found), ""):
        raise ValueError(problem)
    return found


def _problems(value: Any, kept: Any, place: str) -> Iterator[str]:
    """What the types allow in a value and no plan has; `kept` is what they have made of it."""
    if isinstance(value, dict):
        for name, item in value.items():
            if UNSHOWN.search(name):
                yield f"{place}{name[:60]!a} has characters that cannot be shown"
            elif name not in kept:
                yield f"{place}{name[:60]} is not a part of a plan"
            else:
                yield from _problems(item, kept[name], f"{place}{name}.")
    elif isinstance(value, list):
        if value and type(value[0]) is int and len(set(value)) < len(value):
            yield f"{place[:-1]} has a value twice"
        for number, (item, kept_item) in enumerate(zip(value, kept, strict=True)):
            yield from _problems(item, kept_item, f"{place[:-1]}[{number}].")
    elif isinstance(value, str):
        if UNSHOWN.search(value):
            yield f"{place[:-1]} is {value[:60]!a}, which has characters that cannot be shown"
    elif value is not None and not abs(value) < MOST:
        yield f"{place[:-1]} is {value}"


def _unknown_parts(plan: Plan) -> Iterator[str]:
    """What a plan names that its machine does not have, which no schema can tell."""
    machine = plan.machine
    pus, nodes = frozenset(machine.pus), frozenset(node.id for node in machine.numa_nodes)
    if len(machine.pus) > len(pus) or not all(core.pus for core in machine.cores):
        yield "a core has no CPU, or a CPU of another core"
    of_nodes = [pu for node in machine.numa_nodes for pu in node.pus]
    if not pus.issuperset((*machine.allowed_pus, *of_nodes)) or not nodes.issuperset(machine.allowed_nodes):
        yield "its machine has no such allowed CPUs or NUMA nodes"
    if not nodes.issuperset(core.numa_node for core in machine.cores if core.numa_node is not None):
        yield "its machine has no such NUMA nodes"
    for i, worker in enumerate(plan.workers):
        if not pus.issuperset((*worker.compute_pus, *worker.comm_pus, *worker.loader_pus)):
            yield f"worker {i} has CPUs that its machine does not have"
        if not nodes.issuperset(worker.memory_nodes):
            yield f"worker {i} has NUMA nodes that its machine does not have"
    if not pus.issuperset(pu for item in plan.unused for pu in item.pus):
        yield "its unused CPUs are not the machine's"


def request_to_json(request: Request) -> str:
    """The fields of a request that differ from the defaults, as one line of JSON."""
    blank, fields = msgspec.to_builtins(Request()), msgspec.to_builtins(request)
    return json.dumps({key: value for key, value in fields.items() if value != blank[key]})


def request_from_json(text: str) -> Request:
    """The inverse of `request_to_json`. Raises InputError on anything else."""
    try:
        return _checked(json.loads(text), Request)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{text[:60]!r} is not a request for a plan ({error})") from None


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises InputError when it cannot be read."""
    return plan_from_dict(read_json(path))


def read_json(path: Path) -> Any:
    """A plan file's JSON. Raises InputError when it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the plan {path}: {error}") from None


def plan_of_host(data: Any, host: str) -> Any:
    """A host's plan in the JSON of one plan, or of several host groups with their hosts' names, full or short.

    Raises InputError when the host is in none of them, or may be several of theirs.
    """
    return _plan_in_groups(data, host, lambda hosts: find_host(host, hosts))


def plan_of_this_host(data: Any) -> Any:
    """The plan of this host, whichever of its names or addresses the host groups have; otherwise as `plan_of_host`."""
    return _plan_in_groups(data, socket.gethostname(), find_this_host)


def _plan_in_groups(data: Any, host: str, find: Callable[[Sequence[str]], int | None]) -> Any:
    groups = data.get("host_groups") if isinstance(data, dict) else None
    if groups is None:
        return data
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        raise InputError("the plan is damaged: host_groups is not a list of hosts and plans: plan again")
    hosts = [(name, group["plan"]) for group in groups for name in group["hosts"]]
    place = find([name for name, _ in hosts])
    if place is None:
        raise InputError(f"host {host} is not in the plan: plan again with this host name, or run on the plan's hosts")
    return hosts[place][1]


def _is_group(group: Any) -> bool:
    hosts = group.get("hosts") if isinstance(group, dict) else None
    return isinstance(hosts, list) and all(isinstance(name, str) for name in hosts) and "plan" in group


def worker_of(plan: Plan, local_rank: int) -> WorkerPlan:
    """Worker `local_rank` of a plan. Raises InputError when there is none."""
    if not 0 <= local_rank < len(plan.workers):
        raise InputError(f"local rank {local_rank} is not in the plan, which has {len(plan.workers)} workers per host")
    return plan.workers[local_rank]
