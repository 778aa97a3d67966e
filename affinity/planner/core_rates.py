"""The speeds of one core that the rules go by: as measured on this machine, else as cited."""

from dataclasses import dataclass

from affinity.planner.measured import ALL_REDUCE, DECODING, STANDARD, Measured, Rate, training_name
from affinity.planner.profiles import is_phi
from affinity.planner.reasons import Reason
from affinity.planner.workload import Workload
from affinity.topology.machine import Machine

CORE_GFLOPS = {"avx2": 50.0, "avx512f": 90.0}  # in a whole training step
BF16_GFLOPS = {"avx512_bf16": 150.0}  # AMX's processors have these instructions, too; without them bf16 is emulated
LEAST_GFLOPS = 20.0
DECODING_NS = {"libjpeg-turbo": 7.0, "Pillow": 18.0}  # per pixel of a JPEG, from which crops are decoded
COMM_BYTES_PER_CORE_S = 8e9
COMM_BYTES_PER_PHI_CORE_S = 3.2e9
TRAINING, DECODED, REDUCED = "training, GFLOP/s per core", "decoding, ns per pixel of an image", "GB/s per comm core"
FIGURES = (
    Reason(
        what=TRAINING,
        value=", ".join(
            f"{isa} {gflops:g}"
            for isa, gflops in (*CORE_GFLOPS.items(), ("others", LEAST_GFLOPS), *BF16_GFLOPS.items())
        ),
        why="measured in float32: 48 on Zen 3 (AVX2), 88 on Zen 4 (AVX-512); SURFsara-Intel 2018, 256 hosts, comes to "
        "35 (16,400 images/s on 256 x 44 computing cores), 44 before its loss to communication; others: assumed. In "
        "bf16: 150 on Zen 4; MLPerf v2.1 with AMX, 16 hosts, comes to 116 (8,570 images/s on 16 x 112 cores)",
    ),
    Reason(
        what=DECODED,
        value=", ".join(f"{name} {ns:g}" for name, ns in DECODING_NS.items()),
        why="measured in CPU time on an AMD EPYC, images of 204,000 (ImageNet's mean), 108,000 and 86,000 pixels: "
        "libjpeg-turbo 6.8, 7.1, 5.2; Pillow 15.8, 20.3, 18.1",
    ),
    Reason(
        what=REDUCED,
        value=f"{COMM_BYTES_PER_CORE_S / 1e9:g}, Xeon Phi {COMM_BYTES_PER_PHI_CORE_S / 1e9:g}",
        why="assumed, of receiving, adding and sending in an all-reduce: half of what one core reads from memory. "
        "oneCCL between two ranks of a host came to 2-3.4 on AMD EPYC, but with as many comm cores as that asks for, "
        "AlexNet on 2,048 packages is predicted 40 % too fast. Xeon Phi: four cores for 12.5 GB/s, as Intel Caffe",
    ),
)
UNITS = {TRAINING: 1.0, DECODED: 1.0, REDUCED: 1e9}  # of a rate in that of its figure


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRates:
    """What one core does: GFLOP/s of a training, images/s decoded, bytes/s in an all-reduce.

    `measured` are the names of those that this machine was measured for, with their dates. `assumed` tells that no
    rate of trainings is cited for its instructions, or that they are not known.
    """

    gflops: float
    decoded_per_s: float
    comm_bytes_per_s: float
    measured: dict[str, str]
    assumed: bool

    def since(self, what: str) -> str:
        """Where a rate is from, as an addition to a reason: " (measured on 2026-01-31)", "" if it is cited."""
        if what in self.measured:
            return f" (measured on {self.measured[what]})"
        if what == TRAINING and self.assumed:
            return f" (assumed: {self.gflops:g} GFLOP/s per core)"
        return ""


def core_rates(machine: Machine, workload: Workload, measured: Measured) -> CoreRates:
    """The rates for a workload on a machine."""
    known = {**CORE_GFLOPS, **(BF16_GFLOPS if workload.precision == "bf16" else {})}
    cited = max((known[flag] for flag in machine.isa if flag in known), default=LEAST_GFLOPS)
    comm = COMM_BYTES_PER_PHI_CORE_S if is_phi(machine) else COMM_BYTES_PER_CORE_S
    found = {what: rate for what, rate in _measured(workload, measured).items() if rate is not None}

    def value(what: str, otherwise: float) -> float:
        return found[what].value if what in found else otherwise

    return CoreRates(
        gflops=value(TRAINING, cited),
        decoded_per_s=1e9 / (value(DECODED, DECODING_NS[workload.decoder]) * workload.image_pixels),
        comm_bytes_per_s=value(REDUCED, comm),
        measured={what: rate.date for what, rate in found.items()},
        assumed=not {*known} & {*machine.isa},
    )


def measured_figures(workload: Workload, measured: Measured) -> dict[str, Reason]:
    """The figures above that were measured on this machine, by what they are, beside what is cited."""
    found: dict[str, Reason] = {}
    for figure in FIGURES:
        rate = _measured(workload, measured)[figure.what]
        if rate is not None:
            value, low, high = (each / UNITS[figure.what] for each in (rate.value, rate.low, rate.high))
            found[figure.what] = Reason(
                what=figure.what,
                value=f"{value:.3g} ({low:.3g}-{high:.3g})",
                why=f"measured here on {rate.date} by `{rate.command}`: {rate.name}; elsewhere {figure.value}",
            )
    return found


def _measured(workload: Workload, measured: Measured) -> dict[str, Rate | None]:
    own, standard = (training_name(name, workload.precision) for name in (workload.name, STANDARD))
    return {
        TRAINING: measured.rate(own, standard),
        DECODED: measured.rate(f"{DECODING} {workload.decoder}"),
        REDUCED: measured.rate(f"{ALL_REDUCE} ccl"),
    }
