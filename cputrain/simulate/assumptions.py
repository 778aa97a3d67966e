"""Constants of the model with their sources: links, cores, published runs."""

from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import yaml

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import shipped
from cputrain.affinity.planner.request import ALL_REDUCE, Measured
from cputrain.mpi.fabric import FABRICS

US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A host's link: bytes/s that messages reach, the latency of one; `taper` is how much less bandwidth a host has to
    hosts on other leaf switches, `leaf_hosts` how many share one."""

    name: str
    nominal_gbit: float
    bytes_per_s: float
    latency_s: float
    latency_range_s: tuple[float, float]
    taper: float
    leaf_hosts: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What a fabric adds to its nominal speed (mpi/fabric.py): the share of it that messages reach, and the rest."""

    reached: float
    latency_us: tuple[float, float, float]
    taper: float
    leaf_hosts: int
    source: str


_OPA = (
    "12.3 of 12.5 GB/s and 1 to 2 us between MPI ranks (Intel's Omni-Path figures); switches of 48 ports with 28 hosts \
and 20 links up, as TACC's Stampede2"
)
_KINDS = {
    "opa": _Kind(reached=0.98, latency_us=(1.0, 1.5, 3.0), taper=1.4, leaf_hosts=28, source=_OPA),
    "psm3": _Kind(
        reached=0.95, latency_us=(2.0, 3.0, 6.0), taper=1.0, leaf_hosts=32,
        source="usual for RoCE: 95 % of the nominal speed, 3 us; one switch",
    ),
    "ib": _Kind(
        reached=0.97, latency_us=(0.8, 1.3, 3.0), taper=1.0, leaf_hosts=40,
        source="usual for InfiniBand HDR: 97 % of the nominal speed, 1.3 us; a full fat tree",
    ),
    "ethernet": _Kind(
        reached=0.94, latency_us=(15.0, 30.0, 60.0), taper=2.0, leaf_hosts=40,
        source="TCP: 94 % of the nominal speed after headers, 30 us; uplinks usually have half of the hosts' bandwidth",
    ),
    "efa": _Kind(
        reached=0.9, latency_us=(10.0, 16.0, 30.0), taper=1.0, leaf_hosts=40,
        source="AWS: 15 to 20 us between MPI ranks; full bandwidth inside a placement group",
    ),
    "slingshot": _Kind(
        reached=0.95, latency_us=(1.5, 2.0, 4.0), taper=1.0, leaf_hosts=32,
        source="usual for Slingshot: 95 % of the nominal speed, 2 us; a dragonfly with full bandwidth",
    ),
}  # fmt: skip
LINKED = tuple(_KINDS)
"""Names of the fabrics that connect hosts."""


def link_of(fabric: str, *, gbit: float | None = None, latency_us: float | None = None) -> Link:
    """The link of a fabric, with another speed in Gbit/s or latency in microseconds where they are given.

    Raises InputError for a fabric that does not connect hosts.
    """
    kind = _KINDS.get(fabric)
    if kind is None:
        raise InputError(f"--fabric {fabric} does not connect hosts: name one of {', '.join(_KINDS)}")
    nominal = gbit or FABRICS[fabric].link_gbit
    low, usual, high = kind.latency_us
    if latency_us is not None:
        low = usual = high = latency_us
    return Link(
        name=fabric,
        nominal_gbit=nominal,
        bytes_per_s=nominal * 1e9 / 8 * kind.reached,
        latency_s=usual * US,
        latency_range_s=(low * US, high * US),
        taper=kind.taper,
        leaf_hosts=kind.leaf_hosts,
        source=kind.source,
    )


GB = 1e9


def _assumed(value: float, low: float, high: float, source: str) -> float:
    """A field of Constants: its value, the range that it may lie in, and where it is from."""
    made: float = field(default=value, metadata={"low": low, "high": high, "source": source})
    return made


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What a prediction assumes beyond machine, network and fabric."""

    host_variation: float = _assumed(
        0.18, 0.03, 0.26,
        "standard deviation of the hosts' lasting speeds, in parts of the clock range, from the base clock to the "
        "most that all cores reach: 6 % on a Xeon 8160, 1.3 % on Xeon Phi. Processors under a power limit differ in "
        "their clocks: 16 to 20 % apart (Acun et al. 2016, ICS; Marathe et al. 2017, E2SC). Chosen for all published "
        "runs together (benchmarks.simulate_published); clusters differ: Jain et al. 2019 lost 2 % on 128 hosts",
    )
    step_variation: float = _assumed(
        0.01, 0.003, 0.02,
        "standard deviation of a worker's steps around its own mean: noise of the operating system takes 1 to 2 % "
        "(Petrini, Kerbyson and Pakin 2003, SC); assumed",
    )
    memory_share: float = _assumed(
        1.0, 0.8, 1.15,
        "memory's speed, relative to that measured, or to 80 % of the nominal speed of the channels in "
        "configs/machines (STREAM's usual share), or, of processors that are not there, to that of a Xeon 8160 "
        "(float32) or 8480+ (bf16) with as many FLOP/s",
    )
    serial_fraction: float = _assumed(
        0.005, 0.0, 0.02,
        "part of a step that more threads of a worker do not speed up (Amdahl); assumed",
    )
    core_move_bytes_per_s: float = _assumed(
        3.5 * GB, 2 * GB, 5 * GB,
        "what one core receives, adds and sends in an all-reduce: oneCCL between 2 ranks of one core each took 7.3 "
        "to 9.4 ms for 25 MB and 32 to 52 ms for 100 MB, 1.9 to 3.4 GB/s (docs/benchmarks.md); chosen for all "
        "published runs together",
    )
    phi_core_slowness: float = _assumed(
        5.0, 3.0, 6.0,
        "how many times slower a core of a Xeon Phi starts operations and moves messages than one of a Xeon: half of "
        "the clock, and two instructions at a time; chosen for all published runs together",
    )
    gloo_move_bytes_per_s: float = _assumed(
        1 * GB, 0.8 * GB, 1.4 * GB,
        "the same through gloo's sockets: 23 ms for 25 MB and 102 ms for 100 MB (docs/benchmarks.md)",
    )
    gloo_bf16_slowness: float = _assumed(
        2.0, 1.5, 2.3,
        "how many times longer gloo adds and sends a byte of bfloat16 than one of float32: 2 ranks took 24 to 26 ms "
        "for 12 MiB of bfloat16 and 11 to 16 ms for 12 MiB of float32, on AVX-512",
    )
    ccl_bf16_slowness: float = _assumed(
        1.15, 1.0, 1.5,
        "the same for oneCCL: 7.7 ms and 6.2 to 6.8 ms, on AVX-512; assumed to be up to 1.5 times without it",
    )
    tcp_move_bytes_per_s: float = _assumed(
        1.5 * GB, 1 * GB, 3 * GB,
        "the same between hosts over TCP, where the kernel copies each message: gloo's sockets 1 GB/s "
        "(docs/benchmarks.md); a core sends or receives 20 to 40 Gbit/s with large segments, here it does both",
    )
    host_latency_s: float = _assumed(
        1 * US, 0.5 * US, 5 * US,
        "a message between workers of a host through shared memory; usual for MPI",
    )
    layer_overhead_s: float = _assumed(
        70 * US, 10 * US, 100 * US,
        "start and end of one operation: the framework, oneDNN's choice of code, fork and join of the threads; "
        "chosen for all published runs together",
    )
    core_reorder_bytes_per_s: float = _assumed(
        10 * GB, 5 * GB, 15 * GB,
        "what one core reads and writes when oneDNN copies weights into another layout, where memory does not limit "
        "it: 3 x 3 convolutions of 512 channels took 0.6 to 0.8 ms forward and 4.2 to 4.8 ms backward beside their "
        "operations, 57 MB, on AVX-512",
    )
    decoding_share: float = _assumed(
        1.0, 0.5, 1.5,
        "time to decode an image, relative to the planner's rule (measured on an AMD EPYC)",
    )
    snapshot_bytes_per_s: float = _assumed(
        6 * GB, 2 * GB, 12 * GB,
        "copying weights and optimizer state in memory, which steps wait for; a checkpoint's files are written from "
        "the copy while they go on: 205 MB in 0.034 s on an AMD EPYC (benchmarks.checkpoint_stall)",
    )
    checkpoint_bytes_per_s: float = _assumed(
        1 * GB, 0.3 * GB, 3 * GB,
        "writing the last checkpoint, which the end of the training waits for; assumed",
    )
    evaluation_start_s: float = _assumed(
        3.0, 1.0, 6.0,
        "start of an evaluation: 9 s for 50,000 images on 8 hosts and 19 s on 2 in Intel's MLPerf v1.0 logs",
    )


# fmt: on
@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A value, the range that it may lie in, and where it is from."""

    name: str
    value: float
    low: float
    high: float
    source: str


CONSTANTS = Constants()
ASSUMPTIONS = tuple(
    Assumption(name=each.name, value=getattr(CONSTANTS, each.name), **each.metadata) for each in fields(Constants)
)
MEASURED = {"core_move_bytes_per_s": f"{ALL_REDUCE} ccl", "gloo_move_bytes_per_s": f"{ALL_REDUCE} gloo"}
"""The assumptions that `cputrain bench comm` measures, and the names of its rates."""


def constants_of(assumptions: tuple[Assumption, ...]) -> Constants:
    """The values of assumptions."""
    return Constants(**{assumption.name: assumption.value for assumption in assumptions})


def measured_assumptions(measured: Measured) -> tuple[Assumption, ...]:
    """The assumptions, those that were measured on the machine with the measured value and range."""
    found = []
    for assumption in ASSUMPTIONS:
        rate = measured.rate(MEASURED.get(assumption.name, ""))
        if rate is None:
            found.append(assumption)
            continue
        source = f"measured on {rate.date} by `{rate.command}`: {rate.name}"
        found.append(replace(assumption, value=rate.value, low=rate.low, high=rate.high, source=source))
    return tuple(found)


# FLOP/s of all cores for each byte/s of memory, where the memory is not known, by precision: those of a Xeon 8160 and
# of an 8480+ in training.
FLOP_PER_BYTE = {"float32": 12.0, "bf16": 25.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A published training of a network, on `hosts` of a machine of the catalog with `workers` each.

    `images_per_s` are those of all hosts; `derived`: images x epochs / time, else the source prints them. `family`
    names what runs have in common: processor, framework, fabric. `gbit` is the link's speed where it is not the
    fabric's usual one. `processor` is how the machine's model names it. `name` is for `simulate --from`.
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
    local_batch: int
    crop: int = 224
    optimizer: str = "momentum"
    precision: str = "float32"
    images_per_s: float
    derived: bool = True
    efficiency: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedEfficiency:
    """A published efficiency of a training on many hosts without its images/s; `start` names the run that gives the
    processor's speed here. `comm_cores` are those of a worker."""

    source: str
    start: str
    network: str
    machine: str
    fabric: str
    hosts: int
    workers: int
    local_batch: int
    comm_cores: int
    efficiency: float


@cache
def _published() -> dict[str, Any]:
    """The file of published speeds."""
    text = (shipped("published") / "speeds.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All published runs, family by family."""
    families = _published()["families"]
    found = ({**family, **run} for family in families for run in family["runs"])
    return tuple(PublishedRun(**{key: run[key] for key in run if key != "runs"}) for run in found)


def published_efficiencies() -> tuple[PublishedEfficiency, ...]:
    """All published efficiencies without a rate."""
    return tuple(PublishedEfficiency(**each) for each in _published()["efficiencies"])


def runs_on(model: str, precision: str) -> tuple[PublishedRun, ...]:
    """The published runs of a processor in a precision, those on the fewest hosts first."""
    known = [run for run in published_runs() if run.processor in model and run.precision == precision]
    return tuple(sorted(known, key=lambda run: run.hosts))


def starting_run(model: str, precision: str) -> PublishedRun | None:
    """The published run that predictions for a processor start from: the one on the fewest hosts."""
    return next(iter(runs_on(model, precision)), None)


def machines_with_rates(precision: str) -> tuple[str, ...]:
    """The machines of the catalog that have a published rate to start from, by name."""
    return tuple(sorted({run.machine for run in published_runs() if run.precision == precision}))
