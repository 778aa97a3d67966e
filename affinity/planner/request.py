"""What a plan is asked for: settings, the network's sizes, published profiles, what was measured on the machine."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isfinite
from typing import Annotated, Any

from msgspec import Meta

from cputrain.affinity.errors import RequestError
from cputrain.affinity.filesystem import shipped
from cputrain.affinity.topology.machine import MOST_IDS, Count, Ids, Machine, OneOrMore, one_of, parse_list
from cputrain.affinity.wording import Number, either, numbers_of

SET = "set by the recipe or an option"  # the reason for a value that neither a profile, a tuned plan nor a rule chose


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One decision, or a figure behind decisions; planner stages return their values together with these.

    what: what was decided.
    value: the decision, as shown.
    why: why. Settings are in braces: {balance=batch} is --balance batch on the command line.
    """

    what: str
    value: str
    why: Annotated[str, Meta(min_length=1)]

    @property
    def numbers(self) -> dict[str, Number]:
        """The numbers of its texts, by name, in plain units; none where it was read from a file."""
        return numbers_of(self.value, self.why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Allowed PUs that no worker gets.

    pus: their numbers.
    why: why. Settings are in braces: {balance=batch} is --balance batch on the command line.
    """

    pus: Ids
    why: str


TWO_WORKERS_A_PACKAGE = 28  # cores; the 24 of a Xeon 8160 stayed one worker
FEWEST_CORES_WITH_SERVERS = 8  # with fewer, two comm cores would be more than a quarter of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A source to cite, and the request fields that it sets for a machine and the requested ppn, if any."""

    source: str
    decide: Callable[[Machine, int | None], dict[str, Any]]


def is_phi(machine: Machine) -> bool:
    """Whether the machine is a Xeon Phi."""
    return "Xeon Phi" in machine.model or "Xeon(R) Phi" in machine.model


def _bkm_2018(machine: Machine, ppn: int | None) -> dict[str, Any]:
    """Workers by package or quadrant, two communication servers each (Phi: four); the other cores compute."""
    packages, cores = len({core.package for core in machine.allowed_cores}), len(machine.allowed_cores)
    nodes = len({core.numa_node for core in machine.allowed_cores})
    a_package = 4 if is_phi(machine) else 2 if cores // packages >= TWO_WORKERS_A_PACKAGE else 1
    ppn = ppn or min(cores, max(nodes, packages * a_package))
    servers = 4 if is_phi(machine) else 2
    large = cores // ppn >= FEWEST_CORES_WITH_SERVERS
    return {
        "ppn": ppn,
        "comm_cores": servers if large else 0,
        "loader_cores": 0,
        "inter_op": 2 if large else 1,
        "comm_threads": servers if large else 0,
        "reserve_last": True,
        "openmp": "libiomp5",  # TensorFlow with MKL: KMP_AFFINITY=granularity=fine,compact,1,0, KMP_BLOCKTIME=1
    }


def _mlperf_spr(machine: Machine, ppn: int | None) -> dict[str, Any]:
    """One worker a package; eight communication threads on the second threads of cores that compute."""
    ppn = ppn or len({core.package for core in machine.allowed_cores})
    spare = len(machine.allowed_cores) // ppn > 1
    has_siblings = all(len(core.pus) > 1 for core in machine.allowed_cores)
    siblings = max(0, min(8, len(machine.allowed_cores) // ppn - 1)) if has_siblings else 0
    return {
        "ppn": ppn,
        "comm_cores": 0,
        "loader_cores": 1 if spare else 0,
        "comm_siblings": siblings,
        "comm_threads": siblings,
    }


PROFILES = {
    "auto": Profile(source="the planner's own rules", decide=lambda machine, ppn: {}),
    "bkm-2018": Profile(
        source="Intel's best known methods of 2018 for several workers per node; Intel Caffe; SURFsara-Intel 2018, "
        "256 hosts",
        decide=_bkm_2018,
    ),
    "mlperf-spr": Profile(source="Intel's MLPerf v2.1 submission on Sapphire Rapids", decide=_mlperf_spr),
}


BYTES = 4  # float32
PROCESS_BYTES = 750_000_000
PEAK_OVER_KEPT = 1.6  # peak resident memory over what backward keeps: gradients of activations, reordered copies
IMAGE_PIXELS = 204_000  # mean of ImageNet's images, which crops of 224 x 224 are taken from
USUAL_BATCH = 32  # images per step of a worker, where no batch is set
WORKLOAD_FIGURES = (
    Reason(
        what="memory of a process without a network",
        value=f"{PROCESS_BYTES / 1e9:g} GB",
        why="measured: Python with torch, oneDNN and the loader's batches 0.3-0.4 GB, Winograd's scratch 0.1 GB; "
        "a CUDA build of torch, which pip installs on Linux, 0.36 GB more",
    ),
    Reason(
        what="peak memory / activations kept",
        value=f"{PEAK_OVER_KEPT:g}",
        why="measured with torch 2.13: ResNet-50 1.45 (4 to 32 images of 224 x 224), ResNet-18 1.6",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A network in training.

    name: the network and its input.
    parameters: number of its weights.
    gflop: floating-point operations of forward and backward pass in 1e9, per image.
    activation_bytes: bytes that the forward pass keeps for the backward pass, per image.
    optimizer_copies: the optimizer's state in copies of the weights (momentum: 1, Adam: 2).
    assumed: whether it stands for an unknown network: no plan is refused because of it.
    decoder: what decodes the images.
    image_pixels: pixels of an image before it is cropped.
    precision: precision of the computation.
    """

    name: str
    parameters: int
    gflop: float
    activation_bytes: int
    optimizer_copies: int = 1
    assumed: bool = False
    decoder: str = "libjpeg-turbo"
    image_pixels: int = IMAGE_PIXELS
    precision: str = "float32"

    @property
    def gradient_bytes(self) -> int:
        """Bytes that each worker contributes to an all-reduce."""
        return self.parameters * BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """A worker's memory in bytes, by what it is for."""

    process: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.process + self.weights + self.gradients + self.optimizer + self.activations


def _resnet50() -> Workload:
    """ResNet-50 as tools/network_table.py has traced it."""
    traced = json.loads((shipped("networks") / "resnet50.json").read_text(encoding="utf-8"))
    sizes = {key: traced[key] for key in ("parameters", "gflop", "activation_bytes")}
    return Workload(name="ResNet-50 at 224 x 224", assumed=True, **sizes)


RESNET50 = _resnet50()


def footprint(workload: Workload, local_batch: int) -> Footprint:
    """Peak memory of a worker with `local_batch` images per step; gradients count twice, for DDP's buckets.

    With bf16 there is a copy of the weights in bfloat16, which the backward pass needs.
    """
    weights = workload.parameters * BYTES
    return Footprint(
        process=PROCESS_BYTES,
        weights=weights + (weights // 2 if workload.precision == "bf16" else 0),
        gradients=2 * weights,
        optimizer=workload.optimizer_copies * weights,
        activations=round(PEAK_OVER_KEPT * workload.activation_bytes * local_batch),
    )


def largest_batch(workload: Workload, room_bytes: int) -> int:
    """The most images per step whose footprint fits; 0 when not even the weights do."""
    left = room_bytes - footprint(workload, 0).total
    return max(0, int(left / (PEAK_OVER_KEPT * workload.activation_bytes)))


DECODING, ALL_REDUCE, MEMORY = "decoding", "all-reduce", "memory"
BF16 = "convolution, bf16 to float32"
Speed = Annotated[float, Meta(gt=0)]
STANDARD = "resnet50 at 224 x 224"  # its training rate stands for networks that have none


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A speed that was measured.

    name: with its unit: "training NETWORK, PRECISION" GFLOP/s of a core in whole steps; "decoding DECODER" ns of a core
        per pixel of a JPEG; "all-reduce BACKEND" bytes/s that a core receives, adds and sends; "memory" bytes/s of the
        host; "convolution, bf16 to float32" the one's speed relative to the other's.
    value: the median of the repeats.
    low: the lowest of the repeats.
    high: the highest of the repeats.
    date: the day: 2026-01-31.
    command: the command that has measured it.
    """

    name: str
    value: Speed
    low: Speed
    high: Speed
    date: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The fastest plan of one host for a training among those that `cputrain tune` has tried.

    ppn: workers per host.
    comm_cores: cores per worker reserved for communication.
    loader_cores: cores per worker reserved for loading images; each of the others has a thread.
    allocator: the memory allocator.
    date: the day: 2026-01-31.
    why: by how much it is faster.
    """

    ppn: OneOrMore
    comm_cores: Count
    loader_cores: Count
    allocator: Annotated[str, one_of("auto", "glibc", "tcmalloc", "jemalloc")]
    date: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements that count for a machine and a request.

    rates: speeds of the machine.
    tuned: the fastest plan of those that `cputrain tune` has tried for this training; None: none were tried.
    notes: measurements that are not used, and why.
    """

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


# Kinds of options: a number that the planner may choose, a number, Gbit/s, CPUs as taskset numbers them, one of several
# words, auto|on|off for a field that is true or false, and what is on or off.
NUMBER, COUNT, SPEED, CPUS, CHOICE, SWITCH, FLAG = "number", "count", "speed", "CPUs", "choice", "switch", "flag"
# Sections of --help.
WORKERS, RUNTIME, NETWORK = "Workers and cores", "OpenMP and memory", "Network and launcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A planning option, from which the command lines' options, the recipe's key and the references are made.

    `help` stands in `section` of --help; `manual` describes the recipe's key plan.NAME, "" where there is none. `least`
    is the smallest number; `choices` are words, the recipe's default first.
    """

    name: str
    kind: str
    help: str
    manual: str = ""
    section: str = WORKERS
    least: float = 1
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """Its name on a command line: "--comm-cores"."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def default(self) -> str | bool:
        """The value of the recipe's key that is not set."""
        if self.choices:
            return self.choices[0]
        return {NUMBER: "auto", CPUS: "all"}.get(self.kind, False)

    def requested(self, value: Any) -> Any:
        """The value of the field of `Request` for a value on a command line or in a recipe."""
        if self.kind == NUMBER:
            return None if value == "auto" else value
        if self.kind == CPUS and isinstance(value, str):
            return () if value == "all" else parse_list(value)
        return value == "on" if self.kind == SWITCH else value


OPTIONS = (
    Option(name="ppn", kind=NUMBER, help="workers per host", manual="Number of workers per host (processes per node)."),
    Option(
        name="threads",
        kind=NUMBER,
        help="intra-op threads per worker",
        manual="Number of intra-op threads per worker: the OpenMP threads that compute.",
    ),
    Option(
        name="inter_op",
        kind=NUMBER,
        help="inter-op threads per worker",
        manual="Number of inter-op threads per worker, for operators that torch runs at the same time.",
    ),
    Option(
        name="comm_cores",
        kind=NUMBER,
        least=0,
        help="cores per worker reserved for communication",
        manual="Number of cores per worker reserved for communication threads; 0 reserves none.",
    ),
    Option(
        name="loader_cores",
        kind=NUMBER,
        least=0,
        help="cores per worker reserved for loading images",
        manual="Number of cores per worker reserved for decoding images; 0 decodes on the compute cores.",
    ),
    Option(
        name="smt",
        kind=SWITCH,
        choices=("auto", "on", "off"),
        help="compute on the second hardware thread of each core, too",
        manual="Whether to compute on the second hardware thread of each core too; auto: off.",
    ),
    Option(name="local_batch", kind=COUNT, help="images per step of a worker, on average"),
    Option(
        name="cores",
        kind=CPUS,
        help="plan with these CPUs alone, numbered as in taskset: 0-15,32; hyper-threads only where listed too",
        manual="CPUs to plan with, as taskset numbers them: all, or a list such as 0-15,32. Their hyper-threads are "
        "used only where they are listed too.",
    ),
    Option(
        name="e_cores",
        kind=CHOICE,
        choices=("auto", "off"),
        help="slower cores; auto: they compute where that is faster",
        manual="Whether slower types of cores (efficiency cores) compute: auto uses them where that is faster; off "
        "leaves them out.",
    ),
    Option(
        name="balance",
        kind=CHOICE,
        choices=("equal", "batch"),
        help="equal local batches, or (batch) in proportion to each worker's cores",
        manual="How a host's images are divided among its workers. equal: the same number each; batch: in proportion "
        "to each worker's cores, with batch.local as the average.",
    ),
    Option(
        name="oversubscribe",
        kind=FLAG,
        help="allow more workers than cores; they share cores",
        manual="Whether ppn may exceed the number of cores, so that workers share them. For trials only: timings mean "
        "nothing.",
    ),
    Option(
        name="share",
        kind=FLAG,
        help="avoid cores that are used by running processes of other plans",
        manual="Whether to leave out cores to which other plans have bound running processes, to share the host with "
        "them.",
    ),
    Option(
        name="profile",
        kind=CHOICE,
        choices=tuple(PROFILES),
        help="published settings for everything left at auto",
        manual="Published set of choices to use wherever this section has auto. bkm-2018: SURFsara and Intel's "
        "best-known methods; mlperf-spr: Intel's MLPerf v2.1 submission; auto: the planner's own rules.",
    ),
    Option(
        name="openmp",
        kind=CHOICE,
        section=RUNTIME,
        choices=("auto", "libgomp", "libiomp5"),
        help="OpenMP runtime; auto: the profile's, or the one that is loaded",
        manual="OpenMP runtime to plan for: libgomp (GNU) or libiomp5 (Intel). auto takes the profile's, or else the "
        "one that this Python loads.",
    ),
    Option(
        name="allocator",
        kind=CHOICE,
        section=RUNTIME,
        choices=("auto", "glibc", "tcmalloc", "jemalloc"),
        help="memory allocator; auto: tcmalloc or jemalloc where found",
        manual="Memory allocator of the workers. auto takes tcmalloc, or else jemalloc, where this host has it, or "
        "else glibc's own.",
    ),
    Option(name="link_gbit", kind=SPEED, section=NETWORK, least=0.001, help="link speed of a host"),
)
"""The planning options in the order of --help. All but share, which depends on running processes, are fields of
`Request`."""
OPTION_OF = {option.name: option for option in OPTIONS}
RECIPE_OPTIONS = tuple(option for option in OPTIONS if option.manual)
# Those that a job's hosts take from the command line that made the job.
JOB_OPTIONS = tuple(option for option in RECIPE_OPTIONS if option.kind != FLAG and option.name != "ppn")
SMALLEST = {
    **{option.name: option.least for option in OPTIONS if option.kind in (NUMBER, COUNT, SPEED)},
    **{"nodes": 1, "global_batch": 1, "most_workers": 1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a plan should be like; None lets the profile, a tuned plan or the rules decide.

    ppn: workers per host.
    threads: intra-op threads per worker.
    inter_op: inter-op threads per worker.
    comm_cores: cores per worker reserved for communication.
    loader_cores: cores per worker reserved for loading images.
    smt: second hardware threads compute, too.
    pin_threads: bind each OpenMP thread to a PU of its own. OpenMP then binds the process's first thread, too, and
        whatever it starts later (loader processes, say) inherits that one PU unless it moves itself.
    nodes: hosts of the job; with more than one, communication gets cores of its own.
    link_gbit: speed of a host's link in Gbit/s.
    profile: published practice that decides what is None here.
    balance: "equal" local batches, or "batch": in proportion to each worker's cores.
    local_batch: images per step of a worker, the mean over the host's workers.
    workload: what it trains.
    openmp: the OpenMP runtime to plan for; "auto": the profile's, else the one that is loaded.
    allocator: the memory allocator; "auto": tcmalloc, else jemalloc, where found, else glibc.
    oversubscribe: allow more workers than cores, which then share cores.
    occupied: PUs whose cores are left to other processes.
    cores: the PUs to plan with, as taskset numbers them; none: all that the process may use.
    e_cores: "off" leaves out cores slower than the fastest ones; "auto": they compute where that is faster.
    global_batch: images per step of all workers of all hosts; local_batch is then the most in one backward pass.
    most_workers: the most workers of all hosts together that the rules may choose.
    comm_threads: threads of oneCCL per worker. Published profiles set this and the next two, the rules do not.
    comm_siblings: how many of oneCCL's threads run on second threads of compute cores.
    reserve_last: comm and loader cores are at the end of a domain instead of its start.
    """

    ppn: Count | None = None
    threads: Count | None = None
    inter_op: Count | None = None
    comm_cores: Count | None = None
    loader_cores: Count | None = None
    smt: bool = False
    pin_threads: bool = True
    nodes: OneOrMore = 1
    link_gbit: float = 100.0
    profile: str = "auto"
    balance: str = "equal"
    local_batch: Count | None = None
    workload: Workload | None = None
    openmp: str = "auto"
    allocator: str = "auto"
    oversubscribe: bool = False
    occupied: Ids = ()
    cores: Ids = ()
    e_cores: str = "auto"
    global_batch: int | None = None
    most_workers: int | None = None
    comm_threads: Count | None = None
    comm_siblings: Count = 0
    reserve_last: bool = False


def check_request(request: Request) -> None:
    """Raise RequestError where a value is wrong on any machine."""
    for name, smallest in SMALLEST.items():
        value = getattr(request, name)
        if value is not None and value < smallest:
            raise RequestError(f"{{{name}={value}}}: must be {smallest} or more")
    if not isfinite(request.link_gbit):
        raise RequestError(f"{{link_gbit={request.link_gbit:g}}}: must be a number of Gbit/s")
    if request.ppn is not None and request.ppn > MOST_IDS:
        raise RequestError(f"{{ppn={request.ppn}}}: must be {MOST_IDS:,} or fewer, the most CPUs of a host")
    if request.profile not in PROFILES:
        near = get_close_matches(request.profile, PROFILES, n=1, cutoff=0.0)[0]
        raise RequestError(
            f"{{profile={request.profile}}}: did you mean {near}? The profiles are {', '.join(PROFILES)}"
        )
    for option in OPTIONS:
        if option.kind == CHOICE and (value := getattr(request, option.name)) not in option.choices:
            raise RequestError(f"{{{option.name}={value}}}: must be {either(option.choices)}")
    if request.balance == "batch" and request.local_batch is None:
        raise RequestError("{balance=batch} has no batch to balance: train a recipe, or set {local_batch}")


TUNED = ("ppn", "comm_cores", "loader_cores")


def with_defaults(machine: Machine, request: Request, measured: Measured) -> tuple[Request, dict[str, str]]:
    """The request with the profile's values, or those of the tuned plan, where the user set none; and why, by field."""
    if request.profile != "auto":
        profile = PROFILES[request.profile]
        return _filled(request, profile.decide(machine, request.ppn), f"profile {request.profile}: {profile.source}")
    if measured.tuned is not None and measured.tuned.ppn <= len(machine.allowed_cores):
        return _filled(request, tuned_values(measured.tuned, request), measured.tuned.why)
    return request, {}


def _filled(request: Request, values: dict[str, Any], why: str) -> tuple[Request, dict[str, str]]:
    blank = Request()
    changes = {name: value for name, value in values.items() if getattr(request, name) == getattr(blank, name)}
    return replace(request, **changes), dict.fromkeys(changes, why)


def tuned_values(tuned: Tuned, request: Request) -> dict[str, Any]:
    """The values of a tuned plan for a request; empty where the request asks for anything else than that plan.

    It was measured on a whole host: for a job of several hosts only its number of workers counts.
    """
    other_cores = request.occupied or request.cores or request.e_cores != "auto" or request.oversubscribe
    if other_cores or request.smt or request.threads is not None or request.balance != "equal":
        return {}
    if request.most_workers is not None and tuned.ppn * request.nodes > request.most_workers:
        return {}
    if any(getattr(request, name) not in (None, getattr(tuned, name)) for name in TUNED):
        return {}
    if request.nodes > 1:
        return {"ppn": tuned.ppn}
    return {**{name: getattr(tuned, name) for name in TUNED}, "allocator": tuned.allocator}


def tuning_name(request: Request) -> str | None:
    """What a tuned plan is for: network, precision, decoder and batch; None where the network is unknown."""
    workload = request.workload
    if workload is None or workload.assumed or request.local_batch is None:
        return None
    batch = f"batch of {request.local_batch} a worker"
    if request.global_batch is not None:
        batch = f"global batch of {request.global_batch}, {request.local_batch} a worker at most"
    return f"{workload.name}, {workload.precision}, {workload.decoder}, {batch}"
