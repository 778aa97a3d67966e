"""The constants of a prediction: each with its range and its source."""

from dataclasses import dataclass, fields

US = 1e-6
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What a prediction assumes beyond machine, network and fabric. Sources and ranges are in ASSUMPTIONS."""

    step_variation: float
    phi_step_variation: float
    serial_fraction: float
    core_move_bytes_per_s: float
    phi_core_move_bytes_per_s: float
    gloo_move_bytes_per_s: float
    host_latency_s: float
    layer_overhead_s: float
    decoding_share: float
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
        name="step_variation",
        value=0.07,
        low=0.04,
        high=0.09,
        source="standard deviation of a worker's step on Xeon, relative to its mean. Marathe et al. 2017 (E2SC): the "
        "processors of a cluster are 20 % apart (among thousands: 2.9 %), runs of one processor 15 % (of about five: "
        "6.4 %); Acun et al. 2016 (ICS): processors 16 % apart. Taken as standard deviations of normal values",
    ),
    Assumption(
        name="phi_step_variation",
        value=0.01,
        low=0.005,
        high=0.03,
        source="the same on Xeon Phi, assumed: its clock hardly depends on its load, and You et al.'s 2,048 hosts lost "
        "nothing against their 16",
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
        value=3 * GB,
        low=2 * GB,
        high=5 * GB,
        source="what one core receives, adds and sends in an all-reduce: oneCCL between 2 ranks of one core each took "
        "7.3 to 9.4 ms for 25 MB and 32 to 52 ms for 100 MB (docs/benchmarks.md)",
    ),
    Assumption(
        name="phi_core_move_bytes_per_s",
        value=1.2 * GB,
        low=0.6 * GB,
        high=2 * GB,
        source="the same on Xeon Phi: slower in the ratio of the planner's two values, 3.2 to 8 GB/s",
    ),
    Assumption(
        name="gloo_move_bytes_per_s",
        value=1 * GB,
        low=0.8 * GB,
        high=1.4 * GB,
        source="the same through gloo's sockets: 23 ms for 25 MB and 102 ms for 100 MB (docs/benchmarks.md)",
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
        value=50 * US,
        low=10 * US,
        high=100 * US,
        source="start and end of one operation: the framework, oneDNN's choice of code, fork and join of the threads; "
        "assumed",
    ),
    Assumption(
        name="decoding_share",
        value=1.0,
        low=0.5,
        high=1.5,
        source="time to decode an image, relative to the planner's rule (measured on an AMD EPYC)",
    ),
    Assumption(
        name="checkpoint_bytes_per_s",
        value=1 * GB,
        low=0.3 * GB,
        high=3 * GB,
        source="writing of a checkpoint by rank 0, while the others wait; assumed",
    ),
    Assumption(
        name="evaluation_start_s",
        value=3.0,
        low=1.0,
        high=6.0,
        source="start of an evaluation: 9 s for 50,000 images on 8 hosts and 19 s on 2 in Intel's MLPerf v1.0 logs",
    ),
)
CONSTANTS = Constants(**{assumption.name: assumption.value for assumption in ASSUMPTIONS})
assert {field.name for field in fields(Constants)} == {assumption.name for assumption in ASSUMPTIONS}
