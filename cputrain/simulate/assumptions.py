"""The constants of a prediction: each with its range and its source."""

from dataclasses import dataclass, fields, replace

from affinity.planner.measured import ALL_REDUCE, Measured

US = 1e-6
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What a prediction assumes beyond machine, network and fabric. Sources and ranges are in ASSUMPTIONS."""

    host_variation: float
    step_variation: float
    memory_share: float
    serial_fraction: float
    core_move_bytes_per_s: float
    phi_core_slowness: float
    gloo_move_bytes_per_s: float
    gloo_bf16_slowness: float
    ccl_bf16_slowness: float
    tcp_move_bytes_per_s: float
    host_latency_s: float
    layer_overhead_s: float
    core_reorder_bytes_per_s: float
    decoding_share: float
    snapshot_bytes_per_s: float
    checkpoint_bytes_per_s: float
    evaluation_start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A value, the range that it may lie in, and where it is from."""

    name: str
    value: float
    low: float
    high: float
    source: str


ASSUMPTIONS = (
    Assumption(
        name="host_variation",
        value=0.18,
        low=0.03,
        high=0.26,
        source="standard deviation of the hosts' lasting speeds, in parts of the clock range, from the base clock to "
        "the most that all cores reach: 6 % on a Xeon 8160, 1.3 % on Xeon Phi. Processors under a power limit differ "
        "in their clocks: 16 to 20 % apart (Acun et al. 2016, ICS; Marathe et al. 2017, E2SC). Chosen for all "
        "published runs together (benchmarks.simulate_published); clusters differ: Jain et al. 2019 lost 2 % on 128 "
        "hosts",
    ),
    Assumption(
        name="step_variation",
        value=0.01,
        low=0.003,
        high=0.02,
        source="standard deviation of a worker's steps around its own mean: noise of the operating system takes 1 to "
        "2 % (Petrini, Kerbyson and Pakin 2003, SC); assumed",
    ),
    Assumption(
        name="memory_share",
        value=1.0,
        low=0.8,
        high=1.15,
        source="memory's speed, relative to that measured, or to 80 % of the nominal speed of the channels in "
        "configs/machines (STREAM's usual share), or, of processors that are not there, to that of a Xeon 8160 "
        "(float32) or 8480+ (bf16) with as many FLOP/s",
    ),
    Assumption(
        name="serial_fraction",
        value=0.005,
        low=0.0,
        high=0.02,
        source="part of a step that more threads of a worker do not speed up (Amdahl); assumed",
    ),
    Assumption(
        name="core_move_bytes_per_s",
        value=3.5 * GB,
        low=2 * GB,
        high=5 * GB,
        source="what one core receives, adds and sends in an all-reduce: oneCCL between 2 ranks of one core each took "
        "7.3 to 9.4 ms for 25 MB and 32 to 52 ms for 100 MB, 1.9 to 3.4 GB/s (docs/benchmarks.md); chosen for all "
        "published runs together",
    ),
    Assumption(
        name="phi_core_slowness",
        value=5.0,
        low=3.0,
        high=6.0,
        source="how many times slower a core of a Xeon Phi starts operations and moves messages than one of a Xeon: "
        "half of the clock, and two instructions at a time; chosen for all published runs together",
    ),
    Assumption(
        name="gloo_move_bytes_per_s",
        value=1 * GB,
        low=0.8 * GB,
        high=1.4 * GB,
        source="the same through gloo's sockets: 23 ms for 25 MB and 102 ms for 100 MB (docs/benchmarks.md)",
    ),
    Assumption(
        name="gloo_bf16_slowness",
        value=2.0,
        low=1.5,
        high=2.3,
        source="how many times longer gloo adds and sends a byte of bfloat16 than one of float32: 2 ranks took 24 to "
        "26 ms for 12 MiB of bfloat16 and 11 to 16 ms for 12 MiB of float32, on AVX-512",
    ),
    Assumption(
        name="ccl_bf16_slowness",
        value=1.15,
        low=1.0,
        high=1.5,
        source="the same for oneCCL: 7.7 ms and 6.2 to 6.8 ms, on AVX-512; assumed to be up to 1.5 times without it",
    ),
    Assumption(
        name="tcp_move_bytes_per_s",
        value=1.5 * GB,
        low=1 * GB,
        high=3 * GB,
        source="the same between hosts over TCP, where the kernel copies each message: gloo's sockets 1 GB/s "
        "(docs/benchmarks.md); a core sends or receives 20 to 40 Gbit/s with large segments, here it does both",
    ),
    Assumption(
        name="host_latency_s",
        value=1 * US,
        low=0.5 * US,
        high=5 * US,
        source="a message between workers of a host through shared memory; usual for MPI",
    ),
    Assumption(
        name="layer_overhead_s",
        value=70 * US,
        low=10 * US,
        high=100 * US,
        source="start and end of one operation: the framework, oneDNN's choice of code, fork and join of the threads; "
        "chosen for all published runs together",
    ),
    Assumption(
        name="core_reorder_bytes_per_s",
        value=10 * GB,
        low=5 * GB,
        high=15 * GB,
        source="what one core reads and writes when oneDNN copies weights into another layout, where memory does not "
        "limit it: 3 x 3 convolutions of 512 channels took 0.6 to 0.8 ms forward and 4.2 to 4.8 ms backward beside "
        "their operations, 57 MB, on AVX-512",
    ),
    Assumption(
        name="decoding_share",
        value=1.0,
        low=0.5,
        high=1.5,
        source="time to decode an image, relative to the planner's rule (measured on an AMD EPYC)",
    ),
    Assumption(
        name="snapshot_bytes_per_s",
        value=6 * GB,
        low=2 * GB,
        high=12 * GB,
        source="copying weights and optimizer state in memory, which steps wait for; a checkpoint's files are written "
        "from the copy while they go on: 205 MB in 0.034 s on an AMD EPYC (benchmarks.checkpoint_stall)",
    ),
    Assumption(
        name="checkpoint_bytes_per_s",
        value=1 * GB,
        low=0.3 * GB,
        high=3 * GB,
        source="writing the last checkpoint, which the end of the training waits for; assumed",
    ),
    Assumption(
        name="evaluation_start_s",
        value=3.0,
        low=1.0,
        high=6.0,
        source="start of an evaluation: 9 s for 50,000 images on 8 hosts and 19 s on 2 in Intel's MLPerf v1.0 logs",
    ),
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


CONSTANTS = constants_of(ASSUMPTIONS)
assert {field.name for field in fields(Constants)} == {assumption.name for assumption in ASSUMPTIONS}
