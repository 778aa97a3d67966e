"""The planner's own rules: how many comm cores, loader cores and threads a worker gets, each with its reason."""

from math import ceil

from affinity.planner.core_rates import DECODED, REDUCED, TRAINING, CoreRates
from affinity.planner.domains import Domain
from affinity.planner.reasons import Reason
from affinity.planner.workload import Workload
from affinity.wording import counted

CORES_TO_SPARE_ONE = 8
MOST_COMM_CORES = 4
NEGLIGIBLE = 0.005
FIGURES = (
    Reason(
        what="cores to spare",
        value=f"one in {CORES_TO_SPARE_ONE}",
        why="assumed: a smaller worker would lose more than communication and loading cost; SURFsara-Intel 2018, 256 "
        "hosts, gave two in 24 to communication",
    ),
    Reason(what="comm cores per worker", value=f"at most {MOST_COMM_CORES}", why="published: Intel Caffe on Xeon Phi"),
    Reason(
        what="negligible communication",
        value=f"{NEGLIGIBLE:.1%} of a step",
        why="assumed: less is not worth a core, however small a part of the cores that is",
    ),
)


def comm_cores(
    domain: Domain, rates: CoreRates, workload: Workload, *, ppn: int, nodes: int, link_gbit: float, local_batch: int
) -> tuple[int, Reason]:
    """Cores of a domain reserved for communication: enough to keep a worker's share of the link busy."""
    if nodes == 1:
        return _comm(0, "one host: an all-reduce over loopback costs a few percent of a step, less than a core would")
    if not _to_spare(domain):
        return _comm(0, f"a domain of {counted(len(domain.cores), 'core')} is too small to spare one")
    bytes_per_s = link_gbit * 1e9 / 8 / ppn
    wire_s = 2 * workload.gradient_bytes / bytes_per_s  # a ring sends every byte twice (Patarasuk and Yuan 2009)
    step_s = local_batch / (domain.capacity * rates.gflops / workload.gflop)
    if wire_s < NEGLIGIBLE * step_s:
        return _comm(0, f"{wire_s * 1e3:.1f} ms of communication in a step of {step_s:.1f} s is not worth a core")
    per_core = rates.comm_bytes_per_s
    return _comm(
        min(ceil(bytes_per_s / per_core), MOST_COMM_CORES, _to_spare(domain)),
        f"several hosts: the all-reduce overlaps the backward pass; {link_gbit:g} Gbit/s per host is "
        f"{bytes_per_s / 1e9:.1f} GB/s per worker, and one core reduces about {per_core / 1e9:.3g} GB/s"
        + rates.since(REDUCED),
    )


def _comm(count: int, why: str) -> tuple[int, Reason]:
    return count, Reason(what="comm cores per worker", value=str(count), why=why)


def loader_cores(domain: Domain, rates: CoreRates, workload: Workload) -> tuple[int, Reason]:
    """Cores of a domain reserved for loading images: enough to decode what the others train on."""
    cores = len(domain.cores)
    rate = domain.capacity * rates.gflops / workload.gflop
    if _to_spare(domain):
        count = min(max(1, ceil(rate / rates.decoded_per_s)), _to_spare(domain))
        why = (
            f"{workload.name} trains at most {rate:,.0f} images/s{_in(workload)} on {counted(cores, 'core')}"
            f"{rates.since(TRAINING)}; "
            f"one core decodes about {rates.decoded_per_s:,.0f} images/s by {workload.decoder}{rates.since(DECODED)}"
        )
    else:
        count, why = (
            0,
            f"a domain of {counted(cores, 'core')} is too small to spare one; decoding shares the compute cores",
        )
    return count, Reason(what="loader cores per worker", value=str(count), why=why)


def _in(workload: Workload) -> str:
    return "" if workload.precision == "float32" else f" in {workload.precision}"


def _to_spare(domain: Domain) -> int:
    """Cores that a domain can do without: one in eight of those that compute, and all of other types."""
    return len(domain.cores) // CORES_TO_SPARE_ONE + len(domain.spare)


def intra_op_threads(room: int, *, smt: bool) -> tuple[int, Reason]:
    """Compute threads of a worker that has room for so many."""
    why = f"one for each {'hardware thread' if smt else 'core'} of the domain that is not reserved"
    return room, Reason(what="intra-op threads", value=str(room), why=why)


def inter_op_threads(intra_op: int, workload: Workload | None) -> tuple[int, Reason]:
    """Threads across operators."""
    if intra_op < CORES_TO_SPARE_ONE:
        chain = workload is not None and not workload.assumed and workload.name.startswith("resnet")
        known = "ResNet is a chain of operators: there is nothing to run in parallel"
        few = "few cores compute: a second operator beside one would take cores from it"
        count, why = 1, known if chain else few
    else:
        count, why = 2, "published practice on 24-core packages (intra-op 22, inter-op 2)"
    return count, Reason(what="inter-op threads", value=str(count), why=why)
