"""What has been measured on a machine: speeds that the rules otherwise assume, and the fastest plan of a training."""

from dataclasses import dataclass

DECODING, ALL_REDUCE, MEMORY = "decoding", "all-reduce", "memory"
BF16 = "convolution, bf16 to float32"
STANDARD = "resnet50 at 224 x 224"  # its training rate stands for networks that have none


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A speed: median, lowest and highest of the repeats, when it was measured (2026-01-31) and by which command.

    `name` and unit: "training NETWORK, PRECISION" GFLOP/s of a core in whole steps; "decoding DECODER" ns of a core per
    pixel of a JPEG; "all-reduce BACKEND" bytes/s that a core receives, adds and sends; "memory" bytes/s of the host;
    "convolution, bf16 to float32" the one's speed relative to the other's.
    """

    name: str
    value: float
    low: float
    high: float
    date: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The fastest plan of one host for a training among those that `cputrain tune` has tried; `why` tells by how much.

    Its threads are one for each core that neither communicates nor loads.
    """

    ppn: int
    comm_cores: int
    loader_cores: int
    allocator: str
    date: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements that count for a machine and a request; `notes` tell of those that are not used, and why."""

    rates: tuple[Rate, ...] = ()
    tuned: Tuned | None = None
    notes: tuple[str, ...] = ()

    def rate(self, *names: str) -> Rate | None:
        """The rate of the first of these names that was measured."""
        known = {rate.name: rate for rate in self.rates}
        return next((known[name] for name in names if name in known), None)


def training_name(workload: str, precision: str) -> str:
    """The name of a network's training rate: "training resnet50 at 224 x 224, float32"."""
    return f"training {workload}, {precision}"
