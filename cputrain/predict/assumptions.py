"""Inputs of predictions, read from configs/published: links, assumed constants, published runs."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import read_yaml, shipped_folder
from cputrain.affinity.planner.request import ALL_REDUCE, MEMORY, Measured
from cputrain.affinity.topology.catalog import processor_facts
from cputrain.affinity.topology.machine import Machine
from cputrain.mpi.fabric import FABRICS
from cputrain.predict.collectives import Link
from cputrain.predict.step_time import Constants, Speed

US = 1e-6

MEASURED = {"core_move_bytes_per_s": f"{ALL_REDUCE} ccl", "gloo_move_bytes_per_s": f"{ALL_REDUCE} gloo"}
"""Assumptions that `cputrain bench comm` measures, and the names of the measured rates."""

# FLOP/s of all cores per byte/s of memory, by precision, if the memory bandwidth is unknown: the ratios of a Xeon 8160
# and of an 8480+ in training.
FLOP_PER_BYTE = {"float32": 12.0, "bf16": 25.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A value with its range and its source."""

    name: str
    value: float
    low: float
    high: float
    source: str


@cache
def _read(name: str) -> dict[str, Any]:
    """Read a file of configs/published: assumptions.yaml or speeds.yaml."""
    return dict(read_yaml(shipped_folder("published") / name))


_LINKS: dict[str, dict[str, Any]] = _read("assumptions.yaml")["links"]
LINKED = tuple(_LINKS)
"""Names of the fabrics that connect hosts."""

ASSUMPTIONS = tuple(Assumption(name=name, **fields) for name, fields in _read("assumptions.yaml")["constants"].items())


def link_of(fabric: str, *, gbit: float | None = None, latency_us: float | None = None) -> Link:
    """Return the link of a fabric; `gbit` (Gbit/s) and `latency_us` (microseconds) replace its usual values.

    Raises InputError if the fabric does not connect hosts.
    """
    if fabric not in _LINKS:
        raise InputError(f"--fabric {fabric} does not connect hosts; choose one of {', '.join(LINKED)}")
    kind, nominal = _LINKS[fabric], gbit or FABRICS[fabric].link_gbit
    low, usual, high = kind["latency_us"]
    if latency_us is not None:
        low = usual = high = latency_us
    return Link(
        name=fabric,
        nominal_gbit=nominal,
        bytes_per_s=nominal * 1e9 / 8 * kind["reached"],
        latency_s=usual * US,
        latency_range_s=(low * US, high * US),
        taper=kind["taper"],
        leaf_hosts=kind["leaf_hosts"],
        source=kind["source"],
    )


def constants_of(assumptions: tuple[Assumption, ...]) -> Constants:
    """Return the assumptions' values."""
    return Constants(**{assumption.name: assumption.value for assumption in assumptions})


CONSTANTS = constants_of(ASSUMPTIONS)


def measured_assumptions(measured: Measured) -> tuple[Assumption, ...]:
    """Return the assumptions, replacing value and range by the machine's measurements if there are any."""
    assumptions = []
    for assumption in ASSUMPTIONS:
        rate = measured.rate(MEASURED.get(assumption.name, ""))
        if rate is None:
            assumptions.append(assumption)
            continue
        source = f"measured on {rate.date} by `{rate.command}`: {rate.name}"
        assumptions.append(replace(assumption, value=rate.value, low=rate.low, high=rate.high, source=source))
    return tuple(assumptions)


def host_bytes_per_s(machine: Machine, measured: Measured | None = None) -> float | None:
    """Return the bandwidth of a host's memory, measured or from its processor; None if unknown."""
    rate = None if measured is None else measured.rate(MEMORY)
    usual = processor_facts(machine.model).memory_bytes_per_s
    if rate is not None:
        return rate.value
    return None if usual is None else len(machine.packages) * usual


def speed_of(core_flops: float, cores: int, memory: float | None, precision: str, constants: Constants) -> Speed:
    """Return the speed of a host with these cores and bytes/s of memory; None: as much as is usual for its FLOP/s."""
    usual = memory or cores * core_flops / FLOP_PER_BYTE[precision]
    return Speed(core_flops=core_flops, host_bytes_per_s=constants.memory_share * usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A published training of a network, on `hosts` machines of the catalog with `workers` each.

    `images_per_s` is the total of all hosts; if `derived`, it was computed as images x epochs / time, otherwise the
    source states it. `family` names a group of runs with the same processor, framework and fabric. `gbit` is the link's
    speed if it is not the fabric's usual one. `processor` is part of the machine's model name. `name` is for
    `simulate --from`. `comm_cores` are per worker; None leaves them to the planner. `contradicts` names a run of the
    family that no model can predict from the same speed of a host.
    """

    name: str
    family: str
    source: str
    network: str = "resnet50"
    machine: str
    processor: str
    fabric: str
    gbit: float | None = None
    hosts: int
    workers: int
    comm_cores: int | None = None
    local_batch: int
    crop: int = 224
    optimizer: str = "momentum"
    precision: str = "float32"
    images_per_s: float
    derived: bool = True
    contradicts: str | None = None
    efficiency: float | None = None


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return all published runs, family by family."""
    families = _read("speeds.yaml")["families"]
    runs = ({**family, **run} for family in families for run in family["runs"])
    return tuple(PublishedRun(**{key: run[key] for key in run if key != "runs"}) for run in runs)


def runs_on(model: str, precision: str) -> tuple[PublishedRun, ...]:
    """Return the published runs of a processor in a precision, fewest hosts first."""
    runs = [run for run in published_runs() if run.processor in model and run.precision == precision]
    return tuple(sorted(runs, key=lambda run: run.hosts))


def reference_run(model: str, precision: str) -> PublishedRun | None:
    """Return the published run from which predictions for a processor start: the one on the fewest hosts."""
    return next(iter(runs_on(model, precision)), None)


def machines_with_rates(precision: str) -> tuple[str, ...]:
    """Return the names of the catalog's machines for which a training rate is published."""
    return tuple(sorted({run.machine for run in published_runs() if run.precision == precision}))
