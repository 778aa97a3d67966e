"""Published trainings on clusters of CPUs: rates that predictions start from, and points to compare them with."""

from dataclasses import dataclass
from functools import partial

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


SURFSARA, CAFFE = "SURFsara, TensorFlow, Xeon 8160, Omni-Path", "SURFsara, Intel Caffe, Xeon 8160, Omni-Path"
YOU, PHI = "You et al., Intel Caffe, Xeon 8160, Omni-Path", "You et al., Intel Caffe, Xeon Phi, Omni-Path"
V05, V10, V21 = "MLPerf v0.5, Xeon 8180", "MLPerf v1.0, Xeon 8376H", "MLPerf v2.1, Xeon 8480+"
_BKM = "SURFsara-Intel best known methods, 2018"
_YOU = "You et al. 2018, Table 4 (arXiv:1709.05011)"
_EARLIER = "You et al. 2017, earlier versions of arXiv:1709.05011"
_SKX = partial(PublishedRun, machine="skx-8160-2s", processor="8160", fabric="opa")
_KNL = partial(PublishedRun, machine="knl-7250-quad-cache", processor="7250", fabric="opa")
_CPX = partial(PublishedRun, machine="cpx-8376h-8s", processor="8376H", fabric="psm3")

RUNS = (
    _SKX(
        name="tf-8160-1",
        family=SURFSARA, source=f"{_BKM}: 16,400 images/s / 256 / 81 %",
        hosts=1, workers=2, local_batch=48, images_per_s=79.1,
    ),
    _SKX(
        name="tf-8160-256",
        family=SURFSARA, source=_BKM,
        hosts=256, workers=2, local_batch=48, images_per_s=16_400, derived=False, efficiency=0.81,
    ),
    _SKX(
        name="caffe-8160-64",
        family=CAFFE, source="SURFsara's Caffe, resnet50_custom_lr",
        hosts=64, workers=2, local_batch=32, images_per_s=6_303, derived=False,
    ),
    _SKX(
        name="caffe-8160-448",
        family=CAFFE, source="SURFsara's Caffe, resnet50_448nodes: 8,040 steps in about 60 min",
        hosts=448, workers=2, local_batch=16, images_per_s=32_000,
    ),
    _SKX(
        name="you-8160-512",
        family=YOU, source=f"{_YOU}: 90 epochs in 52 min",
        hosts=512, workers=2, local_batch=16, optimizer="lars", images_per_s=36_957,
    ),
    _SKX(
        name="you-8160-800",
        family=YOU, source=f"{_YOU}: 90 epochs in 31 min",
        hosts=800, workers=2, local_batch=10, optimizer="lars", images_per_s=61_992,
    ),
    _SKX(
        name="you-8160-1024-alexnet",
        family=YOU, source="You et al. 2018: AlexNet-BN, 100 epochs in 11 min on 2,048 packages", network="alexnet-bn",
        hosts=1024, workers=2, local_batch=16, crop=227, optimizer="lars", images_per_s=194_000,
    ),
    _SKX(
        name="you-8160-512-batch-32",
        family=YOU, source=f"{_EARLIER}: 90 epochs in 48 min on 1,024 CPUs, batch 32,768",
        hosts=512, workers=2, local_batch=32, optimizer="lars", images_per_s=40_036,
    ),
    _KNL(
        name="you-7250-16",
        family=PHI, source=f"{_YOU}: 90 epochs in 45 h",
        hosts=16, workers=1, local_batch=16, images_per_s=712,
    ),
    _KNL(
        name="you-7250-2048",
        family=PHI, source=f"{_YOU}: 90 epochs in 20 min",
        hosts=2048, workers=1, local_batch=16, optimizer="lars", images_per_s=96_100,
    ),
    _KNL(
        name="you-7250-2048-64epochs",
        family=PHI, source=f"{_YOU}: 64 epochs in 14 min",
        hosts=2048, workers=1, local_batch=16, optimizer="lars", images_per_s=97_613,
    ),
    _KNL(
        name="you-7250-512",
        family=PHI, source=f"{_EARLIER}: 90 epochs in an hour, batch 32,768, read as 512 hosts",
        hosts=512, workers=1, local_batch=64, optimizer="lars", images_per_s=32_029,
    ),
    _KNL(
        name="you-7250-512-alexnet",
        family=PHI, source=f"{_EARLIER}: AlexNet-BN, 100 epochs in 24 min, batch 32,768, read as 512 hosts",
        network="alexnet-bn", hosts=512, workers=1, local_batch=64, crop=227, optimizer="lars", images_per_s=88_970,
    ),
    PublishedRun(
        name="mlperf-8180-1",
        family=V05, source="Intel's submission: 61 epochs in 10,300 min", machine="skx-8180-2s", processor="8180",
        fabric="ethernet", gbit=10, hosts=1, workers=4, local_batch=32, images_per_s=130.6,
    ),
    PublishedRun(
        name="mlperf-8180-8",
        family=V05, source="Intel's submission: 61 epochs in 1,312 min", machine="skx-8180-2s", processor="8180",
        fabric="ethernet", gbit=10, hosts=8, workers=4, local_batch=32, images_per_s=992, efficiency=0.95,
    ),
    PublishedRun(
        name="mlperf-8180-4-of-4",
        family=V05, source="Intel's submission, hosts of four packages, its log's epoch 60", machine="skx-8180-4s",
        processor="8180", fabric="ethernet", gbit=10, hosts=4, workers=8, local_batch=32, images_per_s=982,
    ),
    _CPX(
        name="mlperf-8376h-2",
        family=V10, source="Intel's submission: 36 epochs in 590 min", precision="bf16", optimizer="lars",
        hosts=2, workers=16, local_batch=102, images_per_s=1_306,
    ),
    _CPX(
        name="mlperf-8376h-8",
        family=V10, source="Intel's submission: 48 epochs in 214 min", precision="bf16", optimizer="lars",
        hosts=8, workers=16, local_batch=64, images_per_s=4_792, efficiency=0.92,
    ),
    PublishedRun(
        name="mlperf-8480-16",
        family=V21, source="Intel's submission, its log's epochs 33-35", machine="spr-8480plus-2s", processor="8480+",
        fabric="ib", hosts=16, workers=2, local_batch=102, optimizer="lars", precision="bf16",
        images_per_s=8_570, derived=False,
    ),
)  # fmt: skip


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


EFFICIENCIES = (
    PublishedEfficiency(
        source="Jain et al. 2019 (Cluster): 125 times as fast on 128 Skylake hosts, read as 8160s, 4 workers of 64, "
        "no cores kept for communication",
        start="tf-8160-1", network="resnet152", machine="skx-8160-2s", fabric="opa",
        hosts=128, workers=4, local_batch=64, comm_cores=0, efficiency=125 / 128,
    ),
)  # fmt: skip


def runs_on(model: str, precision: str) -> tuple[PublishedRun, ...]:
    """The published runs of a processor in a precision, those on the fewest hosts first."""
    known = [run for run in RUNS if run.processor in model and run.precision == precision]
    return tuple(sorted(known, key=lambda run: run.hosts))


def starting_run(model: str, precision: str) -> PublishedRun | None:
    """The published run that predictions for a processor start from: the one on the fewest hosts."""
    return next(iter(runs_on(model, precision)), None)


def machines_with_rates(precision: str) -> tuple[str, ...]:
    """The machines of the catalog that have a published rate to start from, by name."""
    return tuple(sorted({run.machine for run in RUNS if run.precision == precision}))
