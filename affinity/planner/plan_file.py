"""Plans as JSON files."""

import json
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from operator import ge, gt, le
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, Request, WorkerPlan
from cputrain.affinity.planner.request import (
    COUNT,
    CPUS,
    FLAG,
    NUMBER,
    OPTIONS,
    SPEED,
    SWITCH,
    Measured,
    Option,
    Rate,
    Reason,
    Tuned,
    Unused,
    Workload,
)
from cputrain.affinity.ranks.host_names import find_host, find_this_host
from cputrain.affinity.topology.machine import Core, Machine, NumaNode

SCHEMA_FILE = "plan.schema.json"
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
# Kinds of options -> the schema of their fields in a request; a choice has its words.
VALUES: dict[str, dict[str, Any]] = {
    NUMBER: {"$ref": "#/$defs/count"},
    COUNT: {"$ref": "#/$defs/count"},
    SPEED: {"type": "number"},
    CPUS: {"$ref": "#/$defs/ids"},
    SWITCH: {"type": "boolean"},
    FLAG: {"type": "boolean"},
}
LIMITS: dict[str, Callable[[Any, Any], bool]] = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt}
MOST = 1 << 63
# Control characters, which a terminal may take for commands, and halves of characters, which nothing can encode but
# those that stand for the bytes of a file name.
UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")


def check_plan(data: Any) -> None:
    """Raise InputError with the first place of a host's plan that is not as the schema says."""
    problem = next(_problems(data, plan_schema(), ""), None)
    if problem is not None:
        raise InputError(f"the plan is damaged: {problem}: plan again")


@cache
def plan_schema() -> dict[str, Any]:
    """The schema: inside the package once installed, in docs/ in a checkout. A request has the fields of OPTIONS."""
    inside = Path(__file__).with_name(SCHEMA_FILE)
    path = inside if inside.is_file() else Path(__file__).parents[3] / "docs" / SCHEMA_FILE
    schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    request = schema["properties"]["request"]["properties"]
    request.update((option.name, _field_of(option)) for option in OPTIONS if option.name in Request.__slots__)
    return schema


def _field_of(option: Option) -> dict[str, Any]:
    """The schema of an option's field in a request."""
    unit = ", Gbit/s" if option.kind == SPEED else ""
    values = VALUES.get(option.kind) or {"enum": [*option.choices]}
    return {"description": f"{option.help[0].upper()}{option.help[1:]}{unit}.", **values}


def _problems(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    """What is wrong with a value, and below it."""
    while "$ref" in schema:
        schema = plan_schema()["$defs"][schema["$ref"].rpartition("/")[2]] | {**schema, "$ref": None}
        schema = {key: part for key, part in schema.items() if part is not None}
    here = place or "it"
    types = schema.get("type", ())
    if types and not any(_is(value, name) for name in ([types] if isinstance(types, str) else types)):
        yield f"{here} is {_shown(value)}"
        return
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(value == each and type(value) is type(each) for each in allowed):
        yield f"{here} is {_shown(value)}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) >= MOST or not all(fits(value, schema[name]) for name, fits in LIMITS.items() if name in schema):
            yield f"{here} is {_shown(value)}"
    elif isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{here} is empty"
        if UNSHOWN.search(value):
            yield f"{here} is {_shown(value)}, which has characters that cannot be shown"
    elif isinstance(value, list):
        yield from _problems_of_list(value, schema, place)
    elif isinstance(value, dict):
        yield from _problems_of_object(value, schema, place)


def _problems_of_list(value: list[Any], schema: dict[str, Any], place: str) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0):
        yield f"{place} is empty"
    for number, item in enumerate(value):
        yield from _problems(item, schema.get("items", {}), f"{place}[{number}]")
    if schema.get("uniqueItems") and len({json.dumps(item) for item in value}) < len(value):
        yield f"{place} has a value twice"


def _problems_of_object(value: dict[str, Any], schema: dict[str, Any], place: str) -> Iterator[str]:
    prefix = place and f"{place}."
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    yield from (f"{prefix}{name} is missing" for name in schema.get("required", ()) if name not in value)
    for name, item in value.items():
        if UNSHOWN.search(name):
            yield f"{prefix}{_shown(name)} has characters that cannot be shown"
        elif not re.search(schema.get("propertyNames", {}).get("pattern", ""), name):
            yield f"{prefix}{_shown(name)} is not a name"
        elif name in properties:
            yield from _problems(item, properties[name], f"{prefix}{name}")
        elif others is False:
            yield f"{prefix}{name[:60]} is not a part of a plan"
        elif isinstance(others, dict):
            yield from _problems(item, others, f"{prefix}{name[:60]}")


def _is(value: Any, name: str) -> bool:
    """Whether a value is of a type of JSON Schema, in which true is no number."""
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


SCHEMA_VERSION = 1
PLAN_FILE = "plan.json"
"""The name of a plan's file in the folder of a job or run."""


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data; `plan_from_dict` reads it back."""
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
            "allowed_nodes": list(machine.allowed_nodes),
            "cpu_quota": machine.cpu_quota,
            "memory_limit_bytes": machine.memory_limit_bytes,
            **({"isolated_pus": list(machine.isolated_pus)} if machine.isolated_pus else {}),
            "warnings": list(machine.warnings),
            "core_list": [asdict(core) for core in machine.cores],
            "numa_node_list": [asdict(node) for node in machine.numa_nodes],
        },
        "request": asdict(plan.request),
        "runtime": asdict(plan.runtime),
        "measured": asdict(plan.measured),
        "workers": [{**asdict(worker), "env": dict(worker.env)} for worker in plan.workers],
        "unused": [asdict(item) for item in plan.unused],
        "reasons": [asdict(reason) for reason in plan.reasons],
        "oversubscribed": plan.oversubscribed,
        "warnings": list(plan.warnings),
    }


def plan_to_json(plan: Plan) -> str:
    """The plan as JSON text, with each field of a worker, each core and each NUMA node on a line."""
    return dumps(plan_to_dict(plan))


def dumps(value: Any, indent: str = "") -> str:
    """JSON with small dictionaries, and values that hold no dictionaries, on one line."""
    flat = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value or _is_leaf(value, len(flat)):
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
    if isinstance(value, list) and not any(isinstance(item, (dict, list, str)) for item in holds):
        return True
    return length <= 140 and not any(isinstance(item, dict) for item in holds)


def plan_from_dict(data: Any) -> Plan:
    """The plan that `plan_to_dict` wrote. Raises InputError when it is damaged or of another schema."""
    _check_schema(data)
    try:
        machine = dict(data["machine"])
        for count in ("packages", "cores", "pus", "numa_nodes"):
            del machine[count]
        cores = tuple(Core(**_tuples(core)) for core in machine.pop("core_list"))
        nodes = tuple(NumaNode(**_tuples(node)) for node in machine.pop("numa_node_list"))
        plan = Plan(
            machine=Machine(**_tuples(machine), cores=cores, numa_nodes=nodes),
            request=_request(data["request"]),
            runtime=Runtime(**_tuples(data["runtime"])),
            workers=tuple(map(_worker, data["workers"])),
            unused=tuple(Unused(**_tuples(item)) for item in data["unused"]),
            reasons=tuple(Reason(**item) for item in data["reasons"]),
            warnings=tuple(data["warnings"]),
            measured=_measured(data["measured"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"the plan is damaged ({error!r}): plan again") from None
    problem = next(_unknown_parts(plan), None)
    if problem is not None:
        raise InputError(f"the plan is damaged: {problem}: plan again")
    return plan


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
    return json.dumps({key: value for key, value in asdict(request).items() if value != getattr(Request(), key)})


def request_from_json(text: str) -> Request:
    """The inverse of `request_to_json`. Raises InputError on anything else."""
    try:
        return _request(json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{text[:60]!r} is not a request for a plan ({error!r})") from None


def _request(fields: dict[str, Any]) -> Request:
    workload = fields.get("workload")
    return Request(**{**_tuples(fields), "workload": None if workload is None else Workload(**workload)})


def _measured(fields: dict[str, Any]) -> Measured:
    return Measured(
        rates=tuple(Rate(**rate) for rate in fields["rates"]),
        tuned=None if fields["tuned"] is None else Tuned(**fields["tuned"]),
        notes=tuple(fields["notes"]),
    )


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


def worker_from_dict(data: Any, local_rank: int) -> WorkerPlan:
    """Worker `local_rank` of a plan written by `plan_to_dict`. Raises InputError when there is none."""
    _check_schema(data)
    workers = data.get("workers", ())
    if not 0 <= local_rank < len(workers):
        raise InputError(f"local rank {local_rank} is not in the plan, which has {len(workers)} workers per host")
    try:
        return _worker(workers[local_rank])
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"worker {local_rank} of the plan is damaged ({error!r}): plan again") from None


def _check_schema(data: Any) -> None:
    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != SCHEMA_VERSION:
        raise InputError(f"the plan has schema_version {found}; this program reads {SCHEMA_VERSION}: plan again")
    check_plan(data)


def _worker(fields: dict[str, Any]) -> WorkerPlan:
    return WorkerPlan(**{**_tuples(fields), "env": tuple(fields["env"].items())})


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
