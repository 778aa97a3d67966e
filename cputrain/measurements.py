"""Measurements of this machine: written by `cputrain bench` and `tune`, read by plan, tune and simulate."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from affinity.errors import RunError
from affinity.planner.measured import BF16
from affinity.planner.records import FORMAT, RATE, Record, current_versions, machine_name, record_path
from affinity.topology.machine import Machine
from affinity.topology.sysfs import read_machine
from cputrain.files import write_atomic


def new_record(machine: Machine, kind: str, name: str, values: dict[str, Any], *, command: str) -> Record:
    """A measurement made today with the present versions; `command`: what to run to make it again."""
    return Record(
        kind=kind,
        name=name,
        machine=machine_name(machine),
        versions=current_versions(),
        date=date.today().isoformat(),
        command=command,
        values=values,
    )


def rate_record(machine: Machine, name: str, repeats: tuple[float, float, float], *, command: str) -> Record:
    """The record of a rate: median, lowest and highest."""
    return new_record(machine, RATE, name, dict(zip(("value", "low", "high"), repeats, strict=True)), command=command)


def keep(record: Record, env: Mapping[str, str]) -> Path:
    """Write a record in place of an older one of the same name; its file. Raises RunError where that cannot be done."""
    path = record_path(record, env)
    try:
        write_atomic(path, json.dumps({"format": FORMAT, **asdict(record)}, indent=1).encode())
    except OSError as error:
        raise RunError(
            f"what was measured cannot be kept in {path.parent}: {error.strerror}: set CPUTRAIN_CACHE to a folder that "
            "may be written to"
        ) from None
    return path


def keep_bf16_gain(speedups: Sequence[float], env: Mapping[str, str]) -> None:
    """Keep how many times as fast bfloat16 was at a training's start, for `plan`; not where there is no cache to write
    to, as only a line of advice depends on it."""
    machine = read_machine(Path("/"))  # the whole host: this process is bound to a part of it
    value = median(speedups), min(speedups), max(speedups)
    with suppress(RunError):
        keep(rate_record(machine, BF16, value, command="cputrain train"), env)
