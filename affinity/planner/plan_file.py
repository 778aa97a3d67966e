"""Read and write plans as JSON."""

import json
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from cputrain.affinity.errors import InputError, RequestError
from cputrain.affinity.host_names import find_host, find_this_host
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import NextBest, Plan, Request, WorkerPlan
from cputrain.affinity.planner.request import Measured, Reason, Unused, check_request
from cputrain.affinity.terminal import printable
from cputrain.affinity.topology.machine import Core, Count, Ids, Machine, NumaNode, OneOrMore
from cputrain.affinity.wording import plural

SCHEMA_VERSION = 1
T = TypeVar("T")
MAX_NUMBER = 1 << 63
# Control characters, which a terminal would interpret, and surrogates, which cannot be encoded; except surrogates that
# stand for non-UTF-8 bytes of a file name.
UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")
SAME_IN_FILE = ("name", "model", "isa", "allowed_pus", "allowed_nodes", "cpu_quota", "memory_limit_bytes", "warnings")


class WrittenMachine(Struct, kw_only=True):
    """The host, and the parts of it that this process may use.

    packages: number of CPU sockets.
    numa_nodes: number of NUMA nodes, including nodes without cores.
    cores: number of cores.
    pus: number of hardware threads (PUs).
    isolated_pus: CPUs between which the scheduler moves no thread (isolcpus); absent if there are none.
    core_list: all cores of the host.
    numa_node_list: all NUMA nodes of the host.
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
    """Plan of a host, as printed by `cputrain plan --format json` and saved in plan.json.

    request: the requested settings; None lets the profile, a tuned plan or the rules decide.
    measured: measurements of `cputrain bench` and `tune` on this host that the rules use.
    workers: the workers of the host, by local rank.
    unused: allowed PUs that no worker uses, with the reason.
    reasons: each decision, with its reason.
    oversubscribed: whether workers share cores.
    next_best: the best other numbers of workers, comm cores and loader cores, by the predicted step time; absent if the
        plan was not checked against it.
    warnings: warnings about this plan. Settings are in braces: {balance=batch} is --balance batch on the command line.
    """

    schema_version: Literal[1] = 1
    machine: WrittenMachine
    request: Request
    runtime: Runtime
    measured: Measured
    workers: Annotated[tuple[WorkerPlan, ...], Meta(min_length=1)]
    unused: tuple[Unused, ...]
    reasons: tuple[Reason, ...]
    next_best: tuple[NextBest, ...] | UnsetType = UNSET
    oversubscribed: bool
    warnings: tuple[str, ...]


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Convert a plan to JSON data; the inverse of `plan_from_dict`."""
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
        next_best=plan.next_best or UNSET,
        oversubscribed=plan.oversubscribed,
        warnings=plan.warnings,
    )
    data: dict[str, Any] = msgspec.to_builtins(written, enc_hook=str)  # str: a `Text` is written without its numbers
    return data


def plan_to_json(plan: Plan) -> str:
    """Convert a plan to JSON text, with a line for each field of a worker, each core and each NUMA node."""
    return plan_json(plan_to_dict(plan))


def plan_json(value: Any, indent: str = "") -> str:
    """Write JSON with small dictionaries, and values without dictionaries, on one line."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list | tuple) or not value or _is_leaf(value, len(flat)):
        return flat
    deeper = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {plan_json(item, deeper)}" for key, item in value.items()]
    else:
        items = [plan_json(item, deeper) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{deeper}" + f",\n{deeper}".join(items) + f"\n{indent}{closing}"


def _is_leaf(value: Any, length: int) -> bool:
    """Whether a value is written on one line: short, or a list of numbers."""
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict) and not any(isinstance(item, dict | list | tuple | str) for item in items):
        return True
    return length <= 140 and not any(isinstance(item, dict) for item in items)


def plan_from_dict(data: Any) -> Plan:
    """Convert JSON data of `plan_to_dict` to a plan. Raises InputError if it is damaged or of another schema."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        shown = json.dumps(version)[:60]
        raise InputError(f"the plan has schema_version {shown}, but this version reads {SCHEMA_VERSION}: plan again")
    try:
        written = _checked(data, WrittenPlan)
        check_request(written.request)
    except (ValueError, RequestError) as error:
        raise InputError(f"the plan is damaged: {printable(str(error))}; plan again") from None
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
        next_best=() if written.next_best is UNSET else written.next_best,
    )
    for problem in _inconsistencies(plan):
        raise InputError(f"the plan is damaged: {problem}; plan again")
    return plan


def _checked(data: Any, kind: type[T]) -> T:
    """Convert JSON data to a type. Raises ValueError with the place of the first error."""
    try:
        converted = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        raise ValueError(f"{path.removesuffix('`')}: {problem}" if path else problem) from None
    for problem in _problems(data, msgspec.to_builtins(converted), ""):
        raise ValueError(problem)
    return converted


def _problems(value: Any, known_value: Any, path: str) -> Iterator[str]:
    """Find errors in JSON data that conversion to the types does not: unknown names, duplicates, unprintable text,
    numbers out of range. `known_value` is the data after conversion and back."""
    if isinstance(value, dict):
        for name, item in value.items():
            if UNSHOWN.search(name):
                yield f"{path}{name[:60]!a} has characters that cannot be shown"
            elif name not in known_value:
                yield f"{path}{name[:60]} is not a field of a plan"
            else:
                yield from _problems(item, known_value[name], f"{path}{name}.")
    elif isinstance(value, list):
        if value and type(value[0]) is int and len(set(value)) < len(value):
            yield f"{path[:-1]} has a duplicate value"
        for number, (item, kept_item) in enumerate(zip(value, known_value, strict=True)):
            yield from _problems(item, kept_item, f"{path[:-1]}[{number}].")
    elif isinstance(value, str):
        if UNSHOWN.search(value):
            yield f"{path[:-1]} is {value[:60]!a}, which has characters that cannot be shown"
    elif value is not None and not abs(value) < MAX_NUMBER:
        yield f"{path[:-1]} is {value}"


def _inconsistencies(plan: Plan) -> Iterator[str]:
    """Find inconsistencies between a plan and its machine, which no schema can express."""
    machine = plan.machine
    pus, nodes = frozenset(machine.pus), frozenset(node.id for node in machine.numa_nodes)
    if len(machine.pus) > len(pus) or not all(core.pus for core in machine.cores):
        yield "a core has no CPU, or a CPU of another core"
    of_nodes = [pu for node in machine.numa_nodes for pu in node.pus]
    if not pus.issuperset((*machine.allowed_pus, *of_nodes)) or not nodes.issuperset(machine.allowed_nodes):
        yield "the allowed CPUs or NUMA nodes are not in its machine"
    if not nodes.issuperset(core.numa_node for core in machine.cores if core.numa_node is not None):
        yield "a core's NUMA node is not in its machine"
    for i, worker in enumerate(plan.workers):
        if not pus.issuperset((*worker.compute_pus, *worker.comm_pus, *worker.loader_pus)):
            yield f"worker {i} has CPUs that are not in its machine"
        if not nodes.issuperset(worker.memory_nodes):
            yield f"worker {i} has NUMA nodes that are not in its machine"
    if not pus.issuperset(pu for item in plan.unused for pu in item.pus):
        yield "the unused CPUs are not in its machine"


def request_to_json(request: Request) -> str:
    """Write the fields of a request that differ from the defaults as one line of JSON."""
    blank, fields = msgspec.to_builtins(Request()), msgspec.to_builtins(request)
    return json.dumps({key: value for key, value in fields.items() if value != blank[key]})


def request_from_json(text: str) -> Request:
    """Read the output of `request_to_json`. Raises InputError on anything else."""
    try:
        return _checked(json.loads(text), Request)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{text[:60]!r} is not a request for a plan ({error})") from None


def read_plan(path: Path) -> Plan:
    """Read a plan file. Raises InputError if it cannot be read."""
    return plan_from_dict(read_json(path))


def read_json(path: Path) -> Any:
    """Read a plan file's JSON. Raises InputError if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the plan {path}: {error}") from None


def plan_of_host(data: Any, host: str) -> Any:
    """Select a host's plan in the JSON of one plan, or of several host groups with full or short host names.

    Raises InputError if the host is in no group, or its name is ambiguous.
    """
    return _plan_in_groups(data, host, lambda hosts: find_host(host, hosts))


def plan_of_this_host(data: Any) -> Any:
    """Like `plan_of_host` for this host, by any of its names or addresses."""
    return _plan_in_groups(data, socket.gethostname(), find_this_host)


def _plan_in_groups(data: Any, host: str, find: Callable[[Sequence[str]], int | None]) -> Any:
    groups = data.get("host_groups") if isinstance(data, dict) else None
    if groups is None:
        return data
    if not isinstance(groups, list) or not all(map(_is_group, groups)):
        raise InputError("the plan is damaged: host_groups is not a list of hosts and plans; plan again")
    hosts = [(name, group["plan"]) for group in groups for name in group["hosts"]]
    index = find([name for name, _ in hosts])
    if index is None:
        raise InputError(f"host {host} is not in the plan: plan again with this host name, or run on the plan's hosts")
    return hosts[index][1]


def _is_group(group: Any) -> bool:
    hosts = group.get("hosts") if isinstance(group, dict) else None
    return isinstance(hosts, list) and all(isinstance(name, str) for name in hosts) and "plan" in group


def worker_of(plan: Plan, local_rank: int) -> WorkerPlan:
    """Return a plan's worker by its local rank. Raises InputError if there is none."""
    if not 0 <= local_rank < len(plan.workers):
        counted = f"{plural(len(plan.workers), 'worker')} per host"
        raise InputError(f"local rank {local_rank} is not in the plan, which has {counted}")
    return plan.workers[local_rank]
