"""Input of the planner: settings, published profiles, measurements of the machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isfinite
from typing import Annotated, Any

from msgspec import Meta

from cputrain.affinity.errors import RequestError
from cputrain.affinity.planner.workload import Workload
from cputrain.affinity.topology.machine import MAX_IDS, Count, Ids, Machine, OneOrMore, one_of, parse_list
from cputrain.affinity.wording import Number, join_or, numbers_of

SET = "set by the recipe or an option"  # the reason for a value that the user has set

WORKERS_PER_HOST = "workers per host"
COMM_CORES, LOADER_CORES = "comm cores per worker", "loader cores per worker"
"""Decisions that the predicted step time compares with others."""

TWO_WORKERS_A_PACKAGE = 28  # cores; the 24-core package of a Xeon 8160 had one worker
MIN_CORES_WITH_SERVERS = 8  # with fewer, two comm cores would be more than a quarter of a worker

DECODING, ALL_REDUCE, MEMORY = "decoding", "all-reduce", "memory"
BF16 = "convolution, bf16 to float32"
Speed = Annotated[float, Meta(gt=0)]
STANDARD = "resnet50 at 224 x 224"  # its training rate is used for networks without a measurement

# Kinds of options: a number or "auto", a number, Gbit/s, a CPU list as for taskset, one of several words, auto|on|off
# for a boolean field, and a flag.
NUMBER, COUNT, SPEED, CPUS, CHOICE, SWITCH, FLAG = "number", "count", "speed", "CPUs", "choice", "switch", "flag"
# Sections of --help.
WORKERS, RUNTIME, NETWORK = "Workers and cores", "OpenMP and memory", "Network and launcher"

TUNED = ("ppn", "comm_cores", "loader_cores")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A decision of the planner, or a figure that decisions are based on, with its reason.

    what: what was decided.
    value: the decision, with settings as in `why`.
    why: the reason. Settings are in braces: {balance=batch} is --balance batch on the command line.
    """

    what: str
    value: str
    why: Annotated[str, Meta(min_length=1)]

    @property
    def numbers(self) -> dict[str, Number]:
        """The numbers in its texts, by name, in base units; empty if it was read from a file."""
        return numbers_of(self.value, self.why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Allowed PUs that no worker uses.

    pus: the PUs.
    why: the reason. Settings are in braces: {balance=batch} is --balance batch on the command line.
    """

    pus: Ids
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Published settings: their source, and the request fields that they set for a machine and the requested ppn."""

    source: str
    decide: Callable[[Machine, int | None], dict[str, Any]]


def is_phi(machine: Machine) -> bool:
    """Whether the machine is a Xeon Phi."""
    return "Xeon Phi" in machine.model or "Xeon(R) Phi" in machine.model


def _bkm_2018(machine: Machine, ppn: int | None) -> dict[str, Any]:
    """A worker per package or quadrant with two communication servers (Phi: four); its other cores compute."""
    packages, cores = len({core.package for core in machine.allowed_cores}), len(machine.allowed_cores)
    nodes = len({core.numa_node for core in machine.allowed_cores})
    a_package = 4 if is_phi(machine) else 2 if cores // packages >= TWO_WORKERS_A_PACKAGE else 1
    ppn = ppn or min(cores, max(nodes, packages * a_package))
    servers = 4 if is_phi(machine) else 2
    large = cores // ppn >= MIN_CORES_WITH_SERVERS
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
    """A worker per package; eight communication threads on hyper-threads of compute cores."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A measured speed.

    name: what was measured: "training NETWORK, PRECISION" in GFLOP/s per core over whole steps; "decoding DECODER" in
        ns per pixel of a JPEG on one core; "all-reduce BACKEND" in bytes/s that a core receives, adds and sends;
        "memory" in bytes/s of the host; "convolution, bf16 to float32" as the ratio of their speeds.
    value: median of the repeats.
    low: lowest of the repeats.
    high: highest of the repeats.
    date: day of the measurement, as 2026-01-31.
    command: command that measured it.
    """

    name: str
    value: Speed
    low: Speed
    high: Speed
    date: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The fastest plan for a training on one host among those that `cputrain tune` tried.

    ppn: workers per host.
    comm_cores: cores per worker reserved for communication.
    loader_cores: cores per worker reserved for loading images; each of the other cores has a compute thread.
    allocator: the memory allocator.
    date: day of the measurement, as 2026-01-31.
    why: how much faster it is.
    """

    ppn: OneOrMore
    comm_cores: Count
    loader_cores: Count
    allocator: Annotated[str, one_of("auto", "glibc", "tcmalloc", "jemalloc")]
    date: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements that apply to a machine and a request.

    rates: measured speeds of the machine.
    tuned: the fastest plan that `cputrain tune` found for this training; None if it was not tuned.
    notes: measurements that are not used, with the reason.
    """

    rates: tuple[Rate, ...] = ()
    tuned: Tuned | None = None
    notes: tuple[str, ...] = ()

    def rate(self, *names: str) -> Rate | None:
        """Return the first of these rates that was measured; None if none was."""
        by_name = {rate.name: rate for rate in self.rates}
        return next((by_name[name] for name in names if name in by_name), None)


def training_name(workload: str, precision: str) -> str:
    """Return the name of a network's training rate: "training resnet50 at 224 x 224, float32"."""
    return f"training {workload}, {precision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A planning option; command-line options, recipe keys and reference pages are generated from it.

    `help` is shown in `section` of --help; `manual` documents the recipe key plan.NAME, "" if there is no such key.
    `least` is the smallest number; `choices` are the words, the recipe's default first.
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
        """The option on a command line: "--comm-cores"."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def default(self) -> str | bool:
        """The default of the recipe key."""
        if self.choices:
            return self.choices[0]
        return {NUMBER: "auto", CPUS: "all"}.get(self.kind, False)

    def requested(self, value: Any) -> Any:
        """Convert a value from a command line or recipe to the value of the `Request` field."""
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
        help="also compute on hyper-threads (SMT siblings)",
        manual="Whether to compute on hyper-threads (SMT siblings) too; auto: off.",
    ),
    Option(name="local_batch", kind=COUNT, help="images per step and worker, on average"),
    Option(
        name="cores",
        kind=CPUS,
        help="plan only these CPUs, numbered as for taskset (0-15,32); hyper-threads must be listed, too",
        manual="CPUs to plan with, numbered as for taskset: all, or a list such as 0-15,32. Their hyper-threads are "
        "used only if listed, too.",
    ),
    Option(
        name="e_cores",
        kind=CHOICE,
        choices=("auto", "off"),
        help="efficiency cores; auto: use them if that is faster",
        manual="Whether slower types of cores (efficiency cores) compute. auto: if that is faster; off: never.",
    ),
    Option(
        name="balance",
        kind=CHOICE,
        choices=("equal", "batch"),
        help="equal local batches, or local batches proportional to each worker's cores (batch)",
        manual="How a host's images are divided among its workers. equal: the same local batch for all; batch: in "
        "proportion to each worker's cores, with batch.local as the average.",
    ),
    Option(
        name="oversubscribe",
        kind=FLAG,
        help="allow more workers than physical cores",
        manual="Whether ppn may exceed the number of cores, so that workers share cores. For tests only: timings are "
        "meaningless.",
    ),
    Option(
        name="share",
        kind=FLAG,
        help="avoid cores in use by running processes of other plans",
        manual="Whether to share the host with running processes of other plans by avoiding the cores that they are "
        "bound to.",
    ),
    Option(
        name="profile",
        kind=CHOICE,
        choices=tuple(PROFILES),
        help="published settings for all options left at auto",
        manual="Published settings for all keys of this section left at auto. bkm-2018: SURFsara and Intel's "
        "best-known methods; mlperf-spr: Intel's MLPerf v2.1 submission; auto: the planner's own rules.",
    ),
    Option(
        name="openmp",
        kind=CHOICE,
        section=RUNTIME,
        choices=("auto", "libgomp", "libiomp5"),
        help="OpenMP runtime; auto: the profile's, else the one that Python loads",
        manual="OpenMP runtime to plan for: libgomp (GNU) or libiomp5 (Intel). auto: the profile's, else the one that "
        "this Python loads.",
    ),
    Option(
        name="allocator",
        kind=CHOICE,
        section=RUNTIME,
        choices=("auto", "glibc", "tcmalloc", "jemalloc"),
        help="memory allocator; auto: tcmalloc or jemalloc if installed",
        manual="Memory allocator of the workers. auto: tcmalloc, else jemalloc, if installed on this host, else "
        "glibc's.",
    ),
    Option(name="link_gbit", kind=SPEED, section=NETWORK, least=0.001, help="link speed of a host"),
)
"""The planning options in the order of --help; all but share, which depends on running processes, are fields of
`Request`."""
OPTION_OF = {option.name: option for option in OPTIONS}
RECIPE_OPTIONS = tuple(option for option in OPTIONS if option.manual)
# Options that are passed on from the command line of `cputrain job` to the job's hosts.
JOB_OPTIONS = tuple(option for option in RECIPE_OPTIONS if option.kind != FLAG and option.name != "ppn")
MIN_VALUES = {
    **{option.name: option.least for option in OPTIONS if option.kind in (NUMBER, COUNT, SPEED)},
    **{"nodes": 1, "global_batch": 1, "most_workers": 1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Settings of a plan; None lets the profile, a tuned plan or the rules decide.

    ppn: workers per host.
    threads: intra-op threads per worker.
    inter_op: inter-op threads per worker.
    comm_cores: cores per worker reserved for communication.
    loader_cores: cores per worker reserved for loading images.
    smt: compute on hyper-threads (SMT siblings), too.
    pin_threads: bind each OpenMP thread to its own PU. OpenMP then binds the process's main thread, too, and processes
        that it starts later (data loaders, for example) inherit that single PU unless they change their affinity mask.
    nodes: number of hosts in the job; with more than one, cores may be reserved for communication.
    link_gbit: link speed of a host in Gbit/s.
    fabric: the fabric between hosts, whose latency and all-reduce the predicted step time has.
    profile: published settings for all fields that are None.
    balance: "equal" local batches, or "batch": proportional to each worker's cores.
    local_batch: images per step and worker, the mean over the host's workers.
    workload: the network to train.
    openmp: the OpenMP runtime to plan for; "auto": the profile's, else the one that is loaded.
    allocator: the memory allocator; "auto": tcmalloc, else jemalloc, if installed, else glibc.
    oversubscribe: allow more workers than cores, so that workers share cores.
    occupied: PUs whose cores are reserved for other processes.
    cores: the PUs to plan with, numbered as for taskset; empty: all that the process may use.
    e_cores: "off" excludes cores slower than the fastest type; "auto" uses them if that is faster.
    global_batch: images per step over all workers of all hosts; local_batch is then the limit for one backward pass.
    accumulation: backward passes of a worker per step, without a global batch.
    most_workers: the limit on all hosts' workers together that the rules may choose.
    comm_threads: oneCCL threads per worker. Set by published profiles, like the next two fields, not by the rules.
    comm_siblings: number of oneCCL threads on hyper-threads of compute cores.
    reserve_last: reserve comm and loader cores at the end of a domain instead of its start.
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
    fabric: str = "opa"
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
    accumulation: OneOrMore = 1
    most_workers: int | None = None
    comm_threads: Count | None = None
    comm_siblings: Count = 0
    reserve_last: bool = False

    @property
    def most_per_host(self) -> int | None:
        """The limit on a host's workers that the rules may choose; None if there is none."""
        return None if self.most_workers is None else max(1, self.most_workers // self.nodes)


def check_request(request: Request) -> None:
    """Raise RequestError if a value is invalid on any machine."""
    for name, smallest in MIN_VALUES.items():
        value = getattr(request, name)
        if value is not None and value < smallest:
            raise RequestError(f"{{{name}={value}}}: must be {smallest} or more")
    if not isfinite(request.link_gbit):
        raise RequestError(f"{{link_gbit={request.link_gbit:g}}}: must be a number of Gbit/s")
    if request.ppn is not None and request.ppn > MAX_IDS:
        raise RequestError(f"{{ppn={request.ppn}}}: must be {MAX_IDS:,} or fewer, the most CPUs of a host")
    if request.profile not in PROFILES:
        near = get_close_matches(request.profile, PROFILES, n=1, cutoff=0.0)[0]
        raise RequestError(
            f"{{profile={request.profile}}}: did you mean {near}? The profiles are {', '.join(PROFILES)}"
        )
    for option in OPTIONS:
        if option.kind == CHOICE and (value := getattr(request, option.name)) not in option.choices:
            raise RequestError(f"{{{option.name}={value}}}: must be {join_or(option.choices)}")
    if request.balance == "batch" and request.local_batch is None:
        raise RequestError("{balance=batch} needs a batch to balance: train a recipe, or set {local_batch}")


def with_defaults(machine: Machine, request: Request, measured: Measured) -> tuple[Request, dict[str, str]]:
    """Fill in values of the profile or the tuned plan that the user has not set, and return the reasons by field."""
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
    """Return the values of a tuned plan for a request; empty if the request sets anything that contradicts the plan.

    Plans are tuned on a single whole host, so that only the number of workers is used for several hosts.
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
    """Return the key of a tuned plan: network, precision, decoder and batch; None if the network is unknown."""
    workload = request.workload
    if workload is None or workload.assumed or request.local_batch is None:
        return None
    batch = f"batch of {request.local_batch} a worker"
    if request.global_batch is not None:
        batch = f"global batch of {request.global_batch}, {request.local_batch} a worker at most"
    return f"{workload.name}, {workload.precision}, {workload.decoder}, {batch}"
