"""The planner's own rules: how many comm cores, loader cores and threads a worker gets, each with its reason."""

from math import ceil

from affinity.planner.domains import Domain
from affinity.planner.profiles import is_phi
from affinity.planner.reasons import Reason
from affinity.planner.workload import Workload, images_per_core_s
from affinity.topology.machine import Machine
from affinity.wording import counted

CORES_TO_SPARE_ONE = 8
MOST_COMM_CORES = 4
COMM_BYTES_PER_CORE_S = 8e9
COMM_BYTES_PER_PHI_CORE_S = 3.2e9
NEGLIGIBLE = 0.005
FIGURES = (
    Reason(
        what="cores to spare",
        value=f"one in {CORES_TO_SPARE_ONE}",
        why="assumed: a smaller worker would lose more than communication and loading cost; the 256-node run gave two "
        "in 24 to communication",
    ),
    Reason(what="comm cores per worker", value=f"at most {MOST_COMM_CORES}", why="published: Intel Caffe on Xeon Phi"),
    Reason(
        what="GB/s per comm core",
        value=f"{COMM_BYTES_PER_CORE_S / 1e9:g}, Xeon Phi {COMM_BYTES_PER_PHI_CORE_S / 1e9:g}",
        why="assumed, of receiving, adding and sending in an all-reduce: half of what one core reads from memory",
    ),
    Reason(
        what="negligible communication",
        value=f"{NEGLIGIBLE:.1%} of a step",
        why="assumed: less is not worth a core, however small a part of the cores that is",
    ),
)


def comm_cores(
    domain: Domain, machine: Machine, workload: Workload, *, ppn: int, nodes: int, link_gbit: float, local_batch: int
) -> tuple[int, Reason]:
    """Cores of a domain reserved for communication: enough to keep a worker's share of the link busy."""
    if nodes == 1:
        return _comm(0, "one host: an all-reduce over loopback costs a few percent of a step, less than a core would")
    if not _to_spare(domain):
        return _comm(0, f"a domain of {counted(len(domain.cores), 'core')} is too small to spare one")
    bytes_per_s = link_gbit * 1e9 / 8 / ppn
    wire_s = 2 * workload.gradient_bytes / bytes_per_s  # a ring sends every byte twice (Patarasuk and Yuan 2009)
    step_s = local_batch / (domain.capacity * images_per_core_s(workload, machine.isa))
    if wire_s < NEGLIGIBLE * step_s:
        return _comm(0, f"{wire_s * 1e3:.1f} ms of communication in a step of {step_s:.1f} s is not worth a core")
    per_core = COMM_BYTES_PER_PHI_CORE_S if is_phi(machine) else COMM_BYTES_PER_CORE_S
    return _comm(
        min(ceil(bytes_per_s / per_core), MOST_COMM_CORES, _to_spare(domain)),
        f"several hosts: the all-reduce overlaps the backward pass; {link_gbit:g} Gbit/s per host is "
        f"{bytes_per_s / 1e9:.1f} GB/s per worker, and one core reduces about {per_core / 1e9:g} GB/s",
    )


def _comm(count: int, why: str) -> tuple[int, Reason]:
    return count, Reason(what="comm cores per worker", value=str(count), why=why)


def loader_cores(domain: Domain, machine: Machine, workload: Workload) -> tuple[int, Reason]:
    """Cores of a domain reserved for loading images: enough to decode what the others train on."""
    cores = len(domain.cores)
    rate = domain.capacity * images_per_core_s(workload, machine.isa)
    if _to_spare(domain):
        count = min(max(1, ceil(rate / workload.decoded_per_core_s)), _to_spare(domain))
        why = (
            f"{workload.name} trains at most {rate:,.0f} images/s on {counted(cores, 'core')}; one core decodes about "
            f"{workload.decoded_per_core_s:,.0f} images/s by {workload.decoder}"
        )
    else:
        count, why = (
            0,
            f"a domain of {counted(cores, 'core')} is too small to spare one; decoding shares the compute cores",
        )
    return count, Reason(what="loader cores per worker", value=str(count), why=why)


def _to_spare(domain: Domain) -> int:
    """Cores that a domain can do without: one in eight of those that compute, and all of other types."""
    return len(domain.cores) // CORES_TO_SPARE_ONE + len(domain.spare)


def intra_op_threads(room: int, *, smt: bool) -> tuple[int, Reason]:
    """Compute threads of a worker that has room for so many."""
    why = f"one for each {'hardware thread' if smt else 'core'} of the domain that is not reserved"
    return room, Reason(what="intra-op threads", value=str(room), why=why)


def inter_op_threads(intra_op: int) -> tuple[int, Reason]:
    """Threads across operators."""
    if intra_op < CORES_TO_SPARE_ONE:
        count, why = 1, "ResNet is a chain of operators: there is nothing to run in parallel"
    else:
        count, why = 2, "published practice on 24-core packages (intra-op 22, inter-op 2)"
    return count, Reason(what="inter-op threads", value=str(count), why=why)
