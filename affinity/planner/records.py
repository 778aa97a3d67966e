"""Measurements kept between commands, and this machine's plan by them.

A file for each measurement, in the cache folder, with the machine and the versions that it depends on. `cputrain bench`
and `tune` write them; this module reads them.
"""

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from cputrain.affinity.errors import RunError
from cputrain.affinity.filesystem import cache_folder, installed_version
from cputrain.affinity.planner.openmp import find_runtime, installed_allocators, target_of
from cputrain.affinity.planner.plan import Plan, plan_machine
from cputrain.affinity.planner.request import OPTION_OF, Measured, Rate, Request, Tuned, tuning_name, with_defaults
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import GIB, counted

FORMAT, FOLDER = 1, "measured"
RATE, TRAINING, TUNED, ENGINE = "rate", "training", "tuned", "engine"
GOVERNOR = Path("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
PACKAGES = {
    "cputrain": "cputrain",
    "torch": "torch",
    "oneCCL": "oneccl-devel",
    "Intel MPI": "impi-rt",
    "IPEX": "intel-extension-for-pytorch",
}
LEAST, MOST = 1e-9, 1e18  # of a rate
MODULE_GIB = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A measurement: its kind, what was measured, on which machine, with which versions, when, by which command."""

    kind: str
    name: str
    machine: str
    versions: tuple[str, ...]
    date: str
    command: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The records of a machine that may be used; `notes` tell of the others, and why."""

    usable: tuple[Record, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, kind: str) -> tuple[Record, ...]:
        """The usable ones of a kind."""
        return tuple(record for record in self.usable if record.kind == kind)


def machine_name(machine: Machine) -> str:
    """What a measurement counts for: processor, numbers of packages, NUMA nodes, cores and CPUs, memory, and what of
    them this process may use."""
    memory = sum(node.memory_bytes for node in machine.numa_nodes)
    limit = machine.memory_limit_bytes
    parts = (
        machine.model,
        counted(len(machine.packages), "package"),
        counted(len(machine.numa_nodes), "NUMA node"),
        f"{len(machine.allowed_cores)} of {counted(len(machine.cores), 'core')}",
        counted(len(machine.pus), "CPU"),
        # of modules: kernels keep some of it, and not always the same
        f"{MODULE_GIB * ceil(memory / GIB / MODULE_GIB)} GiB",
        *(() if limit is None or limit >= memory else (f"{limit // GIB} GiB of them",)),
        *(() if machine.cpu_quota is None else (f"the time of {machine.cpu_quota:g} CPUs",)),
    )
    return ", ".join(parts)


def current_versions(root: Path = Path("/")) -> tuple[str, ...]:
    """What a measurement depends on besides the machine: "torch 2.13.0", the kernel's clock governor."""
    governor = root / GOVERNOR
    clock = governor.read_text(encoding="utf-8").strip() if governor.is_file() else "unknown"
    packages = (f"{title} {installed_version(name) or 'none'}" for title, name in PACKAGES.items())
    return (*packages, f"Python {platform.python_version()}", f"clock governor {clock}")


def records_folder(machine: str, env: Mapping[str, str]) -> Path:
    """Where the records of a machine lie. Raises RunError where the user has no cache folder."""
    return cache_folder(env) / FOLDER / _slug(machine)


def record_path(record: Record, env: Mapping[str, str]) -> Path:
    """The file of a record: a new one of the same name takes its place."""
    return records_folder(record.machine, env) / f"{record.kind}-{_slug(record.name)}.json"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def read_records(machine: Machine, env: Mapping[str, str]) -> Records:
    """The records of a machine. Damaged ones, and those with other versions than now, are named and not used."""
    name = machine_name(machine)
    try:
        paths = sorted(records_folder(name, env).glob("*.json"))
    except (RunError, OSError):
        return Records()
    if not paths:
        return Records()
    now = current_versions()
    usable: list[Record] = []
    stale: list[Record] = []
    notes: list[str] = []
    for path in paths:
        try:
            record = parse_record(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            notes.append(f"{path} is not a measurement ({error}): measure again, or delete it")
            continue
        if record.machine == name:
            (usable if record.versions == now else stale).append(record)
    return Records(usable=tuple(usable), notes=(*notes, *_stale_notes(stale, now)))


def _stale_notes(stale: list[Record], now: tuple[str, ...]) -> list[str]:
    """A line for the commands whose measurements are out of date since the same day and for the same reason."""
    commands: dict[tuple[str, str], list[str]] = {}
    for command in sorted({record.command for record in stale}):
        old = max((record for record in stale if record.command == command), key=lambda record: record.date)
        changed = [f"{was}, now {new}" for was, new in zip(old.versions, now, strict=False) if was != new]
        why = ", ".join(changed) or "of another release"
        commands.setdefault((old.date, why), []).append(f"`{command}`")
    return [
        f"what {', '.join(names)} measured on {date} is not used ({why}): run {'them' if names[1:] else 'it'} again"
        for (date, why), names in commands.items()
    ]


def parse_record(text: str) -> Record:
    """The record in a file's text. Raises ValueError where it is none."""
    import msgspec  # most hosts have no records

    try:
        data = msgspec.json.decode(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("of another format")
        record = msgspec.convert(data, Record)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    if record.kind == RATE:
        rate_of(record)
    if record.kind == TUNED:
        tuned_of(record)
    return record


def rate_of(record: Record) -> Rate:
    """The rate that a record holds. Raises ValueError where it holds none."""
    value, low, high = (_positive(record.values.get(key)) for key in ("value", "low", "high"))
    if not low <= value <= high:
        raise ValueError("value is not between low and high")
    return Rate(name=record.name, value=value, low=low, high=high, date=record.date, command=record.command)


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not LEAST <= value <= MOST:
        raise ValueError("value, low and high are not positive numbers of usual size")
    return float(value)


def tuned_of(record: Record) -> Tuned:
    """The tuned plan that a record holds. Raises ValueError where it holds none."""
    values = record.values
    counts = {key: values.get(key) for key in ("ppn", "comm_cores", "loader_cores")}
    if not all(type(count) is int and count >= (name == "ppn") for name, count in counts.items()):
        raise ValueError("ppn, comm_cores and loader_cores are not counts")
    if values.get("allocator") not in OPTION_OF["allocator"].choices or not isinstance(values.get("why"), str):
        raise ValueError("allocator or why are missing")
    return Tuned(**counts, allocator=values["allocator"], why=values["why"], date=record.date)  # type: ignore[arg-type]


def read_measured(machine: Machine, request: Request, env: Mapping[str, str]) -> Measured:
    """What was measured on a machine, as far as it counts for a request."""
    records, wanted = read_records(machine, env), tuning_name(request)
    kept = [each for each in records.usable if each.kind == RATE or (each.kind, each.name) == (TUNED, wanted)]
    return replace(measured_of(kept), notes=(*records.notes, *_tuned_for_others(records.of(TUNED), wanted)))


def _tuned_for_others(tuned: Sequence[Record], wanted: str | None) -> list[str]:
    """A line where the network's plan was tuned, but for another precision, decoder or batch than the wanted one."""
    if wanted is None or any(record.name == wanted for record in tuned):
        return []
    network, _, now = wanted.partition(", ")
    others = [record for record in tuned if record.name.partition(", ")[0] == network]
    if not others:
        return []
    newest = max(others, key=lambda record: record.date)
    before = newest.name.partition(", ")[2]
    return [
        f"the plan that `{newest.command}` found on {newest.date} is for {before}, not for {now}: run it with these "
        "settings, too"
    ]


def measured_of(records: Sequence[Record]) -> Measured:
    """The rates and the tuned plan that records hold. Raises ValueError where one is damaged."""
    tuned = next((tuned_of(record) for record in records if record.kind == TUNED), None)
    return Measured(rates=tuple(rate_of(record) for record in records if record.kind == RATE), tuned=tuned)


def plan_this_machine(
    request: Request, env: Mapping[str, str], command: tuple[str, ...] = (), *, machine: Machine | None = None
) -> Plan:
    """Read this machine (or take it as already read) and plan it. Raises InputError where the request does not fit.

    The OpenMP runtime and the allocator are those of the Python that `command` starts; (): of this Python. What
    `cputrain bench` and `tune` have measured on this machine is used.
    """
    machine = machine or this_machine()
    measured = read_measured(machine, request, env)
    target, allocator = target_of(command), request.allocator
    tuned = with_defaults(machine, request, measured)[0].allocator
    if tuned in installed_allocators(target):
        allocator = tuned
    runtime = find_runtime(target, env, openmp=request.openmp, allocator=allocator)
    return plan_machine(machine, request, runtime, measured)
