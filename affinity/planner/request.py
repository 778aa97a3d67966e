"""A request for a plan."""

from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite

from affinity.errors import RequestError
from affinity.planner.profiles import PROFILES
from affinity.planner.workload import Workload
from affinity.topology.cpuset import MOST_IDS

SMALLEST = {
    "ppn": 1,
    "threads": 1,
    "inter_op": 1,
    "comm_cores": 0,
    "loader_cores": 0,
    "nodes": 1,
    "local_batch": 1,
    "global_batch": 1,
    "most_workers": 1,
    "link_gbit": 0.001,
}
BALANCES = ("equal", "batch")
OPENMP = ("auto", "libgomp", "libiomp5")
ALLOCATOR = ("auto", "glibc", "tcmalloc", "jemalloc")
E_CORES = ("auto", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a plan should be like; None lets the profile, a tuned plan or the rules decide.

    ppn: workers per host.
    threads, inter_op: intra-op and inter-op threads per worker.
    comm_cores, loader_cores: cores per worker reserved for communication and for loading images.
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
    cores: the PUs to plan with, as taskset numbers them; (): all that the process may use.
    e_cores: "off" leaves out cores slower than the fastest ones; "auto": they compute where that is faster.
    global_batch: images per step of all workers of all hosts; local_batch is then the most in one backward pass.
    most_workers: the most workers of all hosts together that the rules may choose.

    The last three are what published profiles do and the rules do not: oneCCL's threads per worker, how many of them
    run on second threads of compute cores, and comm and loader cores at the end of a domain instead of its start.
    """

    ppn: int | None = None
    threads: int | None = None
    inter_op: int | None = None
    comm_cores: int | None = None
    loader_cores: int | None = None
    smt: bool = False
    pin_threads: bool = True
    nodes: int = 1
    link_gbit: float = 100.0
    profile: str = "auto"
    balance: str = "equal"
    local_batch: int | None = None
    workload: Workload | None = None
    openmp: str = "auto"
    allocator: str = "auto"
    oversubscribe: bool = False
    occupied: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    e_cores: str = "auto"
    global_batch: int | None = None
    most_workers: int | None = None
    comm_threads: int | None = None
    comm_siblings: int = 0
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
    if request.balance not in BALANCES:
        raise RequestError(f"{{balance={request.balance}}}: must be {' or '.join(BALANCES)}")
    if request.openmp not in OPENMP:
        raise RequestError(f"{{openmp={request.openmp}}}: must be {', '.join(OPENMP[:-1])} or {OPENMP[-1]}")
    if request.allocator not in ALLOCATOR:
        raise RequestError(f"{{allocator={request.allocator}}}: must be {', '.join(ALLOCATOR[:-1])} or {ALLOCATOR[-1]}")
    if request.e_cores not in E_CORES:
        raise RequestError(f"{{e_cores={request.e_cores}}}: must be {' or '.join(E_CORES)}")
    if request.balance == "batch" and request.local_batch is None:
        raise RequestError("{balance=batch} has no batch to balance: train a recipe, or set {local_batch}")
