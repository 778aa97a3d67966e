"""Measurements of this host in its cache folder, by network and transport; the cost model of an all-reduce."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.records import (
    FORMAT,
    RATE,
    Record,
    current_versions,
    machine_name,
    rate_of,
    read_records,
    record_path,
)
from cputrain.affinity.planner.request import ALL_REDUCE, BF16
from cputrain.affinity.topology.machine import Machine, without_limits
from cputrain.affinity.topology.sysfs import read_machine, this_machine
from cputrain.files import write_text

BF16_GAIN = 1.2  # speedup of a convolution from which on bf16 is suggested
AUTO_BF16_GAIN = 1.3  # speedup of a step from which on precision=auto takes bf16
VARIABLE = "CCL_ATL_TRANSPORT"
MPI, LIBFABRIC = "mpi", "ofi"
TITLES = {MPI: "MPI", LIBFABRIC: "libfabric"}
BUCKET_BYTES = 25 << 20  # size of DDP's gradient buckets
BUCKET_ALL_REDUCE = "25 MiB all-reduce"


def spread_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the lowest and the highest value."""
    return median(values), min(values), max(values)


def new_record(machine: Machine, kind: str, name: str, values: dict[str, Any], *, command: str) -> Record:
    """Return a record of a measurement made today with the current versions; `command` repeats the measurement."""
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
    """Return the record of a rate: median, lowest and highest."""
    return new_record(machine, RATE, name, dict(zip(("value", "low", "high"), repeats, strict=True)), command=command)


def save_measurement(record: Record, env: Mapping[str, str]) -> Path:
    """Write a record, replacing one of the same name, and return its path. Raises RunError if writing fails."""
    path = record_path(record, env)
    try:
        write_text(path, json.dumps({"format": FORMAT, **asdict(record)}, indent=1))
    except OSError as error:
        raise RunError(
            f"measurements cannot be saved in {path.parent}: {error.strerror}; set CPUTRAIN_CACHE to a writable folder"
        ) from None
    return path


def bf16_line(speedup: float) -> str:
    """Return the suggestion to use bfloat16, which is faster by this factor."""
    return (
        f"faster: precision=bf16, with which a convolution is {speedup:.1f} times as fast on this CPU; "
        "weights, sums and statistics stay float32"
    )


def auto_line(precision: str, why: str) -> str:
    """Return the line about the precision that a run with precision=auto has."""
    return f"precision {precision} (auto): {why}"


def save_bf16_gain(speedups: Sequence[float], env: Mapping[str, str]) -> None:
    """Save the speedup of bfloat16 measured at a training's start, for `plan`; ignored if the cache is not writable, as
    only a line of advice depends on it."""
    machine = read_machine(Path("/"))  # the whole host, not the part that this process is bound to
    with suppress(RunError):
        save_measurement(rate_record(machine, BF16, spread_of(speedups), command="cputrain train"), env)


def rate_name(transport: str) -> str:
    """Return the name of a transport's saved rate, in bytes/s sent by each of two ranks."""
    return f"{ALL_REDUCE} ccl over {TITLES[transport]}, 25 MiB"


def transport_records(seconds: Mapping[str, Sequence[float]], *, command: str) -> tuple[Record, ...]:
    """Return the records of all-reduces of BUCKET_BYTES from the seconds of each round, by transport.

    They are recorded for the whole host, as the ranks that read them may use only some of its cores.
    """
    host = without_limits(this_machine())
    rates = {name: spread_of([BUCKET_BYTES / each for each in rounds]) for name, rounds in seconds.items()}
    return tuple(rate_record(host, rate_name(name), rate, command=command) for name, rate in rates.items())


def cached_seconds(env: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds of an all-reduce of BUCKET_BYTES by transport, for those measured on this host."""
    with suppress(InputError):  # this host's topology cannot be read
        records = read_records(without_limits(this_machine()), env).of(RATE)
        kept = {record.name: rate_of(record).value for record in records}
        return {name: BUCKET_BYTES / kept[rate_name(name)] for name in TITLES if rate_name(name) in kept}
    return {}


def comparison(seconds: Mapping[str, float]) -> str:
    """Format measurements: "25 MiB all-reduce 10.8 ms over MPI, 38.9 ms over libfabric"."""
    return f"{BUCKET_ALL_REDUCE} " + ", ".join(
        f"{1000 * each:.1f} ms over {TITLES[name]}" for name, each in seconds.items()
    )
