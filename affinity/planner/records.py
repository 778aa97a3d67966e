"""Saved measurements of this machine, and its plan based on them.

Each measurement is a file in the cache folder, with the machine and versions that it depends on. `cputrain bench` and
`tune` write the files; this module reads them.
"""

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cputrain.affinity.errors import RunError
from cputrain.affinity.filesystem import cache_folder, installed_version
from cputrain.affinity.planner.openmp import find_runtime, installed_allocators, target_of
from cputrain.affinity.planner.plan import Compare, Plan, plan_machine
from cputrain.affinity.planner.request import Measured, Rate, Request, Tuned, tuning_name, with_defaults
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import GIB

T = TypeVar("T")
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
MIN_RATE, MAX_RATE = 1e-9, 1e18  # limits of a plausible rate
MODULE_GIB = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A measurement: kind, what was measured, machine, software versions, date, command, results."""

    kind: str
    name: str
    machine: str
    versions: tuple[str, ...]
    date: str
    command: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The usable records of a machine; `notes` name the unusable ones, with the reason."""

    usable: tuple[Record, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, kind: str) -> tuple[Record, ...]:
        """Return the usable records of a kind."""
        return tuple(record for record in self.usable if record.kind == kind)


def machine_name(machine: Machine) -> str:
    """Describe the hardware that a measurement applies to: processor, numbers of packages, NUMA nodes, cores and CPUs,
    memory, and how much of them this process may use."""
    memory = sum(node.memory_bytes for node in machine.numa_nodes)
    limit = machine.memory_limit_bytes
    packages, nodes, cores, cpus = machine.counts
    parts = (
        machine.model,
        packages,
        nodes,
        f"{len(machine.allowed_cores)} of {cores}",
        cpus,
        # rounded up to whole memory modules, as kernels reserve a varying part of the memory
        f"{MODULE_GIB * ceil(memory / GIB / MODULE_GIB)} GiB",
        *(() if limit is None or limit >= memory else (f"{limit // GIB} GiB of them",)),
        *(() if machine.cpu_quota is None else (f"the time of {machine.cpu_quota:g} CPUs",)),
    )
    return ", ".join(parts)


def current_versions(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the software that a measurement depends on, such as "torch 2.13.0", and the CPU frequency governor."""
    governor = root / GOVERNOR
    clock = governor.read_text(encoding="utf-8").strip() if governor.is_file() else "unknown"
    packages = (f"{title} {installed_version(name) or 'none'}" for title, name in PACKAGES.items())
    return (*packages, f"Python {platform.python_version()}", f"clock governor {clock}")


def records_folder(machine: str, env: Mapping[str, str]) -> Path:
    """Return the folder of a machine's records. Raises RunError if the user has no cache folder."""
    return cache_folder(env) / FOLDER / _slug(machine)


def record_path(record: Record, env: Mapping[str, str]) -> Path:
    """Return the file of a record; a newer record of the same kind and name overwrites it."""
    return records_folder(record.machine, env) / f"{record.kind}-{_slug(record.name)}.json"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def read_records(machine: Machine, env: Mapping[str, str]) -> Records:
    """Read a machine's records. Damaged records, and records of other software versions, are only named in `notes`."""
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
    """Write one note for all commands whose measurements have the same date and are stale for the same reason."""
    commands: dict[tuple[str, str], list[str]] = {}
    for command in sorted({record.command for record in stale}):
        old = max((record for record in stale if record.command == command), key=lambda record: record.date)
        changed = [f"{was}, now {new}" for was, new in zip(old.versions, now, strict=False) if was != new]
        why = ", ".join(changed) or "another release"
        commands.setdefault((old.date, why), []).append(f"`{command}`")
    return [
        f"measurements of {', '.join(names)} on {date} are stale ({why}): run {'them' if names[1:] else 'it'} again"
        for (date, why), names in commands.items()
    ]


def parse_record(text: str) -> Record:
    """Parse a record. Raises ValueError if it is invalid."""
    try:
        data = msgspec.json.decode(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        record = msgspec.convert(data, Record)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    if record.kind == RATE:
        rate_of(record)
    if record.kind == TUNED:
        tuned_of(record)
    return record


def rate_of(record: Record) -> Rate:
    """Return the rate in a record. Raises ValueError if it is invalid."""
    rate = _converted(record, Rate)
    if not rate.low <= rate.value <= rate.high:
        raise ValueError("value is not between low and high")
    if not MIN_RATE <= rate.low <= rate.high <= MAX_RATE:
        raise ValueError("low or high is not a plausible rate")
    return rate


def tuned_of(record: Record) -> Tuned:
    """Return the tuned plan in a record. Raises ValueError if it is invalid."""
    return _converted(record, Tuned)


def _converted(record: Record, kind: type[T]) -> T:
    """Convert a record's values, name, date and command to a type. Raises ValueError if they do not fit it."""
    about = {"name": record.name, "date": record.date, "command": record.command}
    try:
        return msgspec.convert({**record.values, **about}, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def read_measured(machine: Machine, request: Request, env: Mapping[str, str]) -> Measured:
    """Read the measurements of a machine that apply to a request."""
    records, name = read_records(machine, env), tuning_name(request)
    applicable = [
        record for record in records.usable if record.kind == RATE or (record.kind, record.name) == (TUNED, name)
    ]
    return replace(measured_of(applicable), notes=(*records.notes, *_tuned_for_others(records.of(TUNED), name)))


def _tuned_for_others(tuned: Sequence[Record], name: str | None) -> list[str]:
    """Note that a tuned plan exists only for a different precision, decoder or batch size."""
    if name is None or any(record.name == name for record in tuned):
        return []
    network, _, now = name.partition(", ")
    candidates = [record for record in tuned if record.name.partition(", ")[0] == network]
    if not candidates:
        return []
    newest = max(candidates, key=lambda record: record.date)
    before = newest.name.partition(", ")[2]
    return [
        f"the plan that `{newest.command}` found on {newest.date} is for {before}, not for {now}: run it again with "
        "these settings"
    ]


def measured_of(records: Sequence[Record]) -> Measured:
    """Collect the rates and the tuned plan from records. Raises ValueError if one is invalid."""
    tuned = next((tuned_of(record) for record in records if record.kind == TUNED), None)
    return Measured(rates=tuple(rate_of(record) for record in records if record.kind == RATE), tuned=tuned)


def plan_this_machine(
    request: Request,
    env: Mapping[str, str],
    command: tuple[str, ...] = (),
    *,
    machine: Machine | None = None,
    compare: Compare | None = None,
) -> Plan:
    """Plan this machine, which is read unless given, based on its saved measurements.

    OpenMP runtime and allocator are the ones that the Python started by `command` loads; (): this Python. `compare` as
    in `plan_machine`. Raises InputError if the request does not fit.
    """
    machine = machine or this_machine()
    measured = read_measured(machine, request, env)
    target, allocator = target_of(command), request.allocator
    tuned = with_defaults(machine, request, measured)[0].allocator
    if tuned in installed_allocators(target):
        allocator = tuned
    runtime = find_runtime(target, env, openmp=request.openmp, allocator=allocator)
    return plan_machine(machine, request, runtime, measured, compare=compare)
