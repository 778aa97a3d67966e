"""What the user asks of a plan, and what a profile makes of it."""

from dataclasses import dataclass, replace
from difflib import get_close_matches

from affinity.errors import InputError
from affinity.planner.profiles import PROFILES
from affinity.planner.workload import Workload
from affinity.topology.machine import Machine

LEAST = {
    "ppn": 1,
    "threads": 1,
    "inter_op": 1,
    "comm_cores": 0,
    "loader_cores": 0,
    "nodes": 1,
    "local_batch": 1,
    "link_gbit": 0.001,
}
BALANCES = ("equal", "batch")
OPENMP = ("auto", "libgomp", "libiomp5")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asks of a plan; None means that profile and rules decide.

    `pin_threads`: bind each OpenMP thread to a PU of its own. OpenMP then binds the process's first thread too, and
    all that it starts later (loader processes, say) inherits that one PU unless it moves itself. `nodes` is the
    number of hosts of the job: with more than one, communication gets cores of its own; `link_gbit` is the speed of a
    host's link in Gbit/s. `local_batch` is the images a step of a worker, on average over the host's workers where
    `balance` is "batch": each then gets them in proportion to its cores. `workload` is what it trains. `openmp` is the
    OpenMP runtime to plan for; "auto": the profile's, else the one that is loaded. `oversubscribe` allows more workers
    than cores, which then share cores. `taken` are PUs whose cores are left to other processes.

    The last three are what published profiles do and the rules do not: oneCCL's threads per worker, how many of them
    run on second threads of compute cores, and comm and loader cores at the end of a domain, not its start.
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
    oversubscribe: bool = False
    taken: tuple[int, ...] = ()
    comm_threads: int | None = None
    comm_siblings: int = 0
    spare_last: bool = False


def check_request(request: Request) -> None:
    """Raise InputError where a value has no sense on any machine."""
    for what, least in LEAST.items():
        value = getattr(request, what)
        if value is not None and value < least:
            raise InputError(f"{what}={value}: must be {least} or more")
    if request.profile not in PROFILES:
        near = get_close_matches(request.profile, PROFILES, n=1, cutoff=0.0)[0]
        raise InputError(f"profile={request.profile}: did you mean {near}? There are {', '.join(PROFILES)}")
    if request.balance not in BALANCES:
        raise InputError(f"balance={request.balance}: must be {' or '.join(BALANCES)}")
    if request.openmp not in OPENMP:
        raise InputError(f"openmp={request.openmp}: must be {', '.join(OPENMP[:-1])} or {OPENMP[-1]}")
    if request.balance == "batch" and request.local_batch is None:
        raise InputError("balance=batch has no batch to balance: give a recipe or local_batch")


def with_profile(machine: Machine, request: Request) -> tuple[Request, dict[str, str]]:
    """The request with the profile's answers where it asks nothing, and why, by field."""
    profile, blank = PROFILES[request.profile], Request()
    decided = profile.decide(machine, request.ppn)
    changes = {name: value for name, value in decided.items() if getattr(request, name) == getattr(blank, name)}
    return replace(request, **changes), dict.fromkeys(changes, f"profile {request.profile}: {profile.source}")
