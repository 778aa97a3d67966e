"""How many threads, comm and loader cores a worker gets, and why. Every rule answers with its reason."""

from dataclasses import dataclass
from math import ceil

from affinity.errors import InputError
from affinity.planner.domains import Domain
from affinity.planner.profiles import is_phi
from affinity.planner.workload import Workload, images_per_core_s
from affinity.topology.machine import Machine, narrowed

# Below this many cores a worker cannot spare one: communication and loading share the compute cores.
CORES_TO_SPARE_ONE = 8
MOST_COMM_CORES = 4  # Intel Caffe's servers per worker on Xeon Phi, the most that was published
# What one core receives, adds and sends in an all-reduce, bytes/s: about half of what it reads from memory alone.
COMM_BYTES_PER_CORE_S = 8e9
COMM_BYTES_PER_PHI_CORE_S = 3.2e9
# ImageNet JPEGs to 224 x 224 crops by PIL, per core; measured 211-240 on Zen 3.
DECODED_PER_CORE_S = 200.0
# Communication below this share of a step is not worth a core, however small a share of the cores that is.
NEGLIGIBLE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One decided number: what it is, its value as shown, and why."""

    what: str
    value: str
    why: str


def beside(machine: Machine, taken: tuple[int, ...]) -> tuple[Machine, tuple[int, ...], list[Reason]]:
    """The machine without the cores of taken PUs, their PUs, and why. Raises InputError where none is left."""
    if not taken:
        return machine, (), []
    cores = machine.allowed_cores
    busy = {pu for core in machine.cores if not {*core.pus}.isdisjoint(taken) for pu in core.pus}
    kept = tuple(core for core in cores if busy.isdisjoint(core.pus))
    if not kept:
        raise InputError(
            f"share: processes that other plans have bound have all {len(cores)} cores that host {machine.name} lends: "
            "wait for them to end, or plan without share"
        )
    pus = frozenset(pu for core in kept for pu in core.pus)
    why = "the others belong to running processes that other plans have bound (share)"
    reason = Reason(what="cores used", value=f"{len(kept)} of {len(cores)}", why=why)
    return narrowed(machine, pus, None), tuple(pu for pu in machine.allowed_pus if pu not in pus), [reason]


def within_quota(machine: Machine) -> tuple[Machine, tuple[int, ...], list[Reason]]:
    """The machine without the cores that its CPU quota could not feed, their PUs, and why."""
    cores, quota = machine.allowed_cores, machine.cpu_quota
    if quota is None or max(1, int(quota)) >= len(cores):
        return machine, (), []
    kept = cores[: max(1, int(quota))]
    pus = frozenset(pu for core in kept for pu in core.pus)
    why = (
        f"control groups grant {quota:g} cores' worth of CPU time: more threads would be throttled, all of them at once"
    )
    reason = Reason(what="cores used", value=f"{len(kept)} of {len(cores)}", why=why)
    return narrowed(machine, pus, None), tuple(pu for pu in machine.allowed_pus if pu not in pus), [reason]


def comm_cores(
    domain: Domain, machine: Machine, workload: Workload, *, ppn: int, nodes: int, link_gbit: float, local_batch: int
) -> tuple[int, str]:
    """Cores of a domain kept for communication, and why: enough to keep a worker's share of the link busy."""
    cores = len(domain.cores)
    if nodes == 1:
        return 0, "one host: adding up gradients over loopback costs a few percent of a step, less than a core would"
    if not _to_spare(domain):
        return 0, f"{cores} cores: too few to keep one from computing"
    bytes_per_s = link_gbit * 1e9 / 8 / ppn
    wire_s = 2 * workload.gradient_bytes / bytes_per_s  # a ring sends every byte twice (Patarasuk and Yuan 2009)
    step_s = local_batch / (domain.capacity * images_per_core_s(workload, machine.isa))
    if wire_s < NEGLIGIBLE * step_s:
        return 0, f"{wire_s * 1e3:.1f} ms of communication in a step of {step_s:.1f} s: not worth a core"
    per_core = COMM_BYTES_PER_PHI_CORE_S if is_phi(machine) else COMM_BYTES_PER_CORE_S
    count = min(ceil(bytes_per_s / per_core), MOST_COMM_CORES, _to_spare(domain))
    return count, (
        f"several hosts: all-reduce progresses beside the backward pass; {link_gbit:g} Gbit/s a host are "
        f"{bytes_per_s / 1e9:.1f} GB/s a worker, a core moves and adds about {per_core / 1e9:g}"
    )


def loader_cores(domain: Domain, machine: Machine, workload: Workload) -> tuple[int, str]:
    """Cores of a domain kept for loading images, and why: enough to decode what the others train on."""
    cores = len(domain.cores)
    rate = domain.capacity * images_per_core_s(workload, machine.isa)
    need = rate / DECODED_PER_CORE_S
    if not _to_spare(domain):
        return 0, f"{cores} core(s): too few to spare one; decoding shares the compute cores"
    count = min(max(1, ceil(need)), _to_spare(domain))
    return count, (
        f"{workload.name} trains at most {rate:.0f} images/s on {cores} cores; "
        f"one core decodes about {DECODED_PER_CORE_S:g}, at a pace of its own"
    )


def _to_spare(domain: Domain) -> int:
    """Cores that a domain can do without: one of every few that compute, and all that do not."""
    return len(domain.cores) // CORES_TO_SPARE_ONE + len(domain.free)


def intra_op_threads(room: int, local_rank: int, asked: int | None, smt: bool) -> tuple[int, str]:
    """Compute threads of a worker with room for so many, and why. Raises InputError when more are asked for."""
    if asked is None:
        return room, f"one for each {'hardware thread' if smt else 'core'} of the domain that is left to compute"
    if asked > room:
        raise InputError(
            f"threads={asked}: worker {local_rank} has compute cores for {room}: set threads to {room} or fewer"
        )
    return asked, "asked for"


def inter_op_threads(intra_op: int) -> tuple[int, str]:
    """Threads across operators, and why."""
    if intra_op < CORES_TO_SPARE_ONE:
        return 1, "ResNet is a chain of operators: nothing to run side by side"
    return 2, "published practice on 24-core packages (intra-op 22, inter-op 2)"
