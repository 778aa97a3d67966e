"""Published trainings on clusters of CPUs: rates that predictions start from, and points to compare them with."""

from dataclasses import dataclass
from functools import partial

GB = 1e9
# bytes/s that a package's memory reaches by the name of its processor: 80 % of the nominal speed of its channels
# (McCalpin's STREAM reaches about that), for Xeon Phi STREAM with MCDRAM as cache.
MEMORY_BYTES_PER_S = {
    "8160": 102 * GB,  # 6 x DDR4-2666
    "8180": 102 * GB,
    "8376H": 113 * GB,  # 6 x DDR4-2933
    "8480+": 246 * GB,  # 8 x DDR5-4800
    "7250": 330 * GB,
}
# FLOP/s of all cores for each byte/s of memory, where the memory is not known; that of a Xeon 8160 in training.
FLOP_PER_BYTE = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published training of a network, on `hosts` of a machine of the catalog with `workers` each.

    `images_per_s` are those of all hosts; `derived`: images x epochs / time, else the source prints them. `family`
    names what runs have in common: processor, framework, fabric. `gbit` is the link's speed where it is not the
    fabric's usual one. `processor` is how the machine's model names it.
    """

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


SURFSARA, CAFFE, PHI = "TensorFlow, Xeon 8160, Omni-Path", "Intel Caffe, Xeon 8160, Omni-Path", "Intel Caffe, Xeon Phi"
V05, V10, V21 = "MLPerf v0.5, Xeon 8180", "MLPerf v1.0, Xeon 8376H", "MLPerf v2.1, Xeon 8480+"
_BKM = "SURFsara-Intel best known methods, 2018"
_YOU = "You et al. 2018, Table 4 (arXiv:1709.05011)"
_SKX = partial(Run, machine="skx-8160-2s", processor="8160", fabric="opa")
_KNL = partial(Run, machine="knl-7250-quad-cache", processor="7250", fabric="opa")
_CPX = partial(Run, machine="cpx-8376h-8s", processor="8376H", fabric="psm3")

RUNS = (
    _SKX(
        family=SURFSARA, source=f"{_BKM}: 16,400 images/s / 256 / 81 %",
        hosts=1, workers=2, local_batch=48, images_per_s=79.1,
    ),
    _SKX(
        family=SURFSARA, source=_BKM,
        hosts=256, workers=2, local_batch=48, images_per_s=16_400, derived=False, efficiency=0.81,
    ),
    _SKX(
        family=CAFFE, source="SURFsara's Caffe, resnet50_custom_lr",
        hosts=64, workers=2, local_batch=32, images_per_s=6_303, derived=False,
    ),
    _SKX(
        family=CAFFE, source=f"{_YOU}: 90 epochs in 52 min",
        hosts=512, workers=2, local_batch=16, optimizer="lars", images_per_s=36_957,
    ),
    _SKX(
        family=CAFFE, source=f"{_YOU}: 90 epochs in 31 min",
        hosts=800, workers=2, local_batch=10, optimizer="lars", images_per_s=61_992,
    ),
    _SKX(
        family=CAFFE, source="You et al. 2018: AlexNet-BN, 100 epochs in 11 min", network="alexnet-bn",
        hosts=1024, workers=2, local_batch=16, crop=227, optimizer="lars", images_per_s=194_000,
    ),
    _KNL(
        family=PHI, source=f"{_YOU}: 90 epochs in 45 h",
        hosts=16, workers=1, local_batch=16, images_per_s=712,
    ),
    _KNL(
        family=PHI, source=f"{_YOU}: 90 epochs in 20 min",
        hosts=2048, workers=1, local_batch=16, optimizer="lars", images_per_s=96_100,
    ),
    _KNL(
        family=PHI, source=f"{_YOU}: 64 epochs in 14 min",
        hosts=2048, workers=1, local_batch=16, optimizer="lars", images_per_s=97_613,
    ),
    Run(
        family=V05, source="Intel's submission: 61 epochs in 10,300 min", machine="skx-8180-2s", processor="8180",
        fabric="ethernet", gbit=10, hosts=1, workers=4, local_batch=32, images_per_s=130.6,
    ),
    Run(
        family=V05, source="Intel's submission: 61 epochs in 1,312 min", machine="skx-8180-2s", processor="8180",
        fabric="ethernet", gbit=10, hosts=8, workers=4, local_batch=32, images_per_s=992, efficiency=0.95,
    ),
    _CPX(
        family=V10, source="Intel's submission: 36 epochs in 590 min", precision="bf16", optimizer="lars",
        hosts=2, workers=16, local_batch=102, images_per_s=1_306,
    ),
    _CPX(
        family=V10, source="Intel's submission: 48 epochs in 214 min", precision="bf16", optimizer="lars",
        hosts=8, workers=16, local_batch=64, images_per_s=4_792, efficiency=0.92,
    ),
    Run(
        family=V21, source="Intel's submission, its log's epochs 33-35", machine="spr-8480plus-2s", processor="8480+",
        fabric="ib", hosts=16, workers=2, local_batch=102, optimizer="lars", precision="bf16",
        images_per_s=8_570, derived=False,
    ),
)  # fmt: skip


def starting_run(model: str, precision: str) -> Run | None:
    """The published run that predictions for a processor start from: the one on the fewest hosts."""
    known = [run for run in RUNS if run.processor in model and run.precision == precision]
    return min(known, key=lambda run: run.hosts, default=None)


def memory_of(model: str) -> float | None:
    """bytes/s that a package of this processor reads from memory; None where it is not known."""
    return next((speed for name, speed in MEMORY_BYTES_PER_S.items() if name in model), None)
