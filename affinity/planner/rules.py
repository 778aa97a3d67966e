"""A worker's cores by role (computing, communication, loading), its threads, and its share of the batch, each with
its reason.

What a setting, a tuned plan or a profile gives comes first; these are the planner's own rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from cputrain.affinity.errors import RequestError
from cputrain.affinity.planner.domains import OTHER_TYPE, Domain
from cputrain.affinity.planner.request import (
    ALL_REDUCE,
    DECODING,
    RESNET50,
    SET,
    STANDARD,
    USUAL_BATCH,
    Measured,
    Rate,
    Reason,
    Request,
    Unused,
    Workload,
    is_phi,
    training_name,
)
from cputrain.affinity.topology.machine import Core, Machine
from cputrain.affinity.wording import formatted

CORE_GFLOPS = {"avx2": 50.0, "avx512f": 90.0}  # in a whole training step
BF16_GFLOPS = {"avx512_bf16": 150.0}  # AMX's processors have these instructions, too; without them bf16 is emulated
LEAST_GFLOPS = 20.0
DECODING_NS = {"libjpeg-turbo": 7.0, "Pillow": 18.0}  # per pixel of a JPEG, from which crops are decoded
COMM_BYTES_PER_CORE_S = 8e9
COMM_BYTES_PER_PHI_CORE_S = 3.2e9
TRAINING, DECODED, REDUCED = "training, GFLOP/s per core", "decoding, ns per pixel of an image", "GB/s per comm core"
CORE_RATE_FIGURES = (
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
    for figure in CORE_RATE_FIGURES:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSizes:
    """Cores that communicate and load, second threads of compute cores that communicate, threads; with reasons."""

    comm_cores: int
    loader_cores: int
    comm_siblings: int
    intra_op: int
    inter_op: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A domain's cores: those reserved for communication and loading, those that compute, spare ones without work."""

    reserved: tuple[Core, ...]
    compute: tuple[Core, ...]
    idle: tuple[Core, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRoles:
    """The PUs of a worker by role.

    `packed`: the worker's PUs in OpenMP's own order, first threads of all cores first, start with `compute`.
    """

    compute: tuple[int, ...]
    comm: tuple[int, ...]
    loader: tuple[int, ...]
    packed: bool
    unused: tuple[Unused, ...]

    @property
    def single_pu(self) -> bool:
        """Whether the worker has one PU: the process's mask alone then binds its one thread."""
        return len(self.compute) + len(self.comm) + len(self.loader) == 1


def reserve(domain: Domain, count: int, *, at_end: bool) -> Reserved:
    """Reserve `count` cores, spare ones first, then the domain's first ones (`at_end`: its last ones).

    At the start because a host's first cores also take its interrupts.
    """
    spare, taken = domain.spare[:count], max(0, count - len(domain.spare))
    kept = len(domain.cores) - taken
    own = domain.cores[kept:] if at_end else domain.cores[:taken]
    compute = domain.cores[:kept] if at_end else domain.cores[taken:]
    return Reserved(reserved=spare + own, compute=compute, idle=domain.spare[count:])


def compute_candidates(cores: tuple[Core, ...], *, smt: bool) -> tuple[int, ...]:
    """The PUs that may compute: the first thread of each core, with `smt` all of them."""
    return tuple(pu for core in cores for pu in (core.pus if smt else core.pus[:1]))


def second_threads(cores: tuple[Core, ...], compute: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Second threads of the first `count` compute cores. Raises RequestError where they compute themselves."""
    second = tuple(core.pus[1] for core in cores if len(core.pus) > 1 and core.pus[0] in compute)[:count]
    if not set(second).isdisjoint(compute):
        raise RequestError("communication on second hardware threads excludes computing on them: leave {smt} off")
    return second


def assign_roles(domain: Domain, sizes: WorkerSizes, request: Request) -> CoreRoles:
    """Give each PU of a domain its role: comm cores come first among the reserved ones, then loader cores."""
    cores = reserve(domain, sizes.comm_cores + sizes.loader_cores, at_end=request.reserve_last)
    compute = compute_candidates(cores.compute, smt=request.smt)[: sizes.intra_op]
    siblings = second_threads(cores.compute, compute, sizes.comm_siblings)
    comm = _first_threads_first(cores.reserved[: sizes.comm_cores]) + siblings
    loader = _pus(cores.reserved[sizes.comm_cores :])
    mask = {*compute, *comm, *loader}
    in_order = _first_threads_first(tuple(sorted(cores.compute + cores.reserved, key=lambda core: core.pus)))
    return CoreRoles(
        compute=compute,
        comm=comm,
        loader=loader,
        packed=tuple(pu for pu in in_order if pu in mask)[: sizes.intra_op] == compute,
        unused=_idle(cores, {*compute, *siblings}, sizes.intra_op),
    )


def _pus(cores: tuple[Core, ...]) -> tuple[int, ...]:
    return tuple(pu for core in cores for pu in core.pus)


def _first_threads_first(cores: tuple[Core, ...]) -> tuple[int, ...]:
    """The PUs of cores: the first thread of each, then the second of each, and so on."""
    threads = max((len(core.pus) for core in cores), default=0)
    return tuple(core.pus[i] for i in range(threads) for core in cores if i < len(core.pus))


def _idle(cores: Reserved, busy_pus: set[int], threads: int) -> tuple[Unused, ...]:
    """The PUs that have no work, and why."""
    busy = [core for core in cores.compute if not busy_pus.isdisjoint(core.pus)]
    siblings = tuple(pu for core in busy for pu in core.pus if pu not in busy_pus)
    beyond = tuple(pu for core in cores.compute if core not in busy for pu in core.pus)
    idle = (
        Unused(pus=siblings, why="second threads of compute cores: two would compete for one core's vector units"),
        Unused(pus=beyond, why=f"{{threads={threads}}} leaves them out"),
        Unused(pus=_pus(cores.idle), why=OTHER_TYPE),
    )
    return tuple(item for item in idle if item.pus)


CORES_TO_SPARE_ONE = 8
MOST_COMM_CORES = 4
NEGLIGIBLE = 0.005
RULE_FIGURES = (
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
) -> tuple[int, str]:
    """Cores of a domain reserved for communication: enough to keep a worker's share of the link busy; and why."""
    if nodes == 1:
        return 0, "one host: an all-reduce over loopback costs a few percent of a step, less than a core would"
    if not _to_spare(domain):
        return 0, formatted("a domain of {cores:core} is too small to spare one", cores=len(domain.cores))
    bytes_per_s = link_gbit * 1e9 / 8 / ppn
    wire_s = 2 * workload.gradient_bytes / bytes_per_s  # a ring sends every byte twice (Patarasuk and Yuan 2009)
    step_s = local_batch / (domain.capacity * rates.gflops / workload.gflop)
    if wire_s < NEGLIGIBLE * step_s:
        why = "{wire_s:ms .1f} ms of communication in a step of {step_s:.1f} s is not worth a core"
        return 0, formatted(why, wire_s=wire_s, step_s=step_s)
    return min(ceil(bytes_per_s / rates.comm_bytes_per_s), MOST_COMM_CORES, _to_spare(domain)), formatted(
        "several hosts: the all-reduce overlaps the backward pass; {link_gbit:g} Gbit/s per host is "
        "{link_bytes_per_s:GB .1f} GB/s per worker, and one core reduces about {core_bytes_per_s:GB .3g} GB/s{since}",
        link_gbit=link_gbit,
        link_bytes_per_s=bytes_per_s,
        core_bytes_per_s=rates.comm_bytes_per_s,
        since=rates.since(REDUCED),
    )


def loader_cores(domain: Domain, rates: CoreRates, workload: Workload) -> tuple[int, str]:
    """Cores of a domain reserved for loading images: enough to decode what the others train on; and why."""
    cores = len(domain.cores)
    if not _to_spare(domain):
        why = "a domain of {cores:core} is too small to spare one; decoding shares the compute cores"
        return 0, formatted(why, cores=cores)
    rate = domain.capacity * rates.gflops / workload.gflop
    return min(max(1, ceil(rate / rates.decoded_per_s)), _to_spare(domain)), formatted(
        "{network} trains at most {trained_per_s:,.0f} images/s{precision} on {cores:core}{trained_since}; one core "
        "decodes about {decoded_per_s:,.0f} images/s by {decoder}{decoded_since}",
        network=workload.name,
        trained_per_s=rate,
        precision="" if workload.precision == "float32" else f" in {workload.precision}",
        cores=cores,
        trained_since=rates.since(TRAINING),
        decoded_per_s=rates.decoded_per_s,
        decoder=workload.decoder,
        decoded_since=rates.since(DECODED),
    )


def _to_spare(domain: Domain) -> int:
    """Cores that a domain can do without: one in eight of those that compute, and all of other types."""
    return len(domain.cores) // CORES_TO_SPARE_ONE + len(domain.spare)


def inter_op_threads(intra_op: int, workload: Workload | None) -> tuple[int, str]:
    """Threads across operators, and why."""
    if intra_op >= CORES_TO_SPARE_ONE:
        return 2, "published practice on 24-core packages (intra-op 22, inter-op 2)"
    if workload is not None and not workload.assumed and workload.name.startswith("resnet"):
        return 1, "ResNet is a chain of operators: there is nothing to run in parallel"
    return 1, "few cores compute: a second operator beside one would take cores from it"


def most_per_pass(local_batch: int, global_batch: int | None, workers: int) -> int:
    """Images of a worker's largest backward pass: `local_batch`, or less where equal shares of a global batch over all
    workers need as few passes with less."""
    if global_batch is None:
        return local_batch
    passes = ceil(global_batch / (workers * local_batch))
    return ceil(ceil(global_batch / workers) / passes)


def local_batches(
    domains: tuple[Domain, ...], threads: tuple[int, ...], local_batch: int | None, *, proportional: bool
) -> tuple[int | None, ...]:
    """Images per step of each worker, local_batch on average, exactly local_batch x workers together.

    `proportional`: in proportion to what each worker's threads compute, at least 1, by largest remainders.
    """
    if local_batch is None or not proportional:
        return (local_batch,) * len(domains)
    speeds = [domain.cores[0].speed * count for domain, count in zip(domains, threads, strict=True)]
    total = local_batch * len(domains)
    exact = [total * speed / sum(speeds) for speed in speeds]
    batches = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (batches[i] - exact[i], i))
    for i in by_remainder[: max(0, total - sum(batches))]:
        batches[i] += 1
    while sum(batches) > total:
        batches[max(range(len(batches)), key=lambda i: (batches[i], -i))] -= 1
    return tuple(batches)


def worker_sizes(
    machine: Machine,
    request: Request,
    default_why: Mapping[str, str],
    domain: Domain,
    measured: Measured,
    *,
    local_rank: int,
    ppn: int,
) -> WorkerSizes:
    """The sizes of the worker that has this domain.

    `request` has the values of the profile or the tuned plan filled in, `default_why` the reason for each of those. A
    requested value that does not fit raises RequestError; one that was filled in is lowered to what the domain has.
    """
    rates = core_rates(machine, request.workload or RESNET50, measured)
    (comm, why_comm), (loader, why_loader) = _reserved_cores(rates, request, default_why, domain, ppn)
    if comm + loader - len(domain.spare) >= len(domain.cores):
        raise RequestError(
            f"{comm} comm and {loader} loader cores leave none of worker {local_rank}'s {len(domain.cores)} cores to "
            "compute: request fewer of them, or a smaller {ppn}"
        )
    compute = reserve(domain, comm + loader, at_end=request.reserve_last).compute
    candidates = compute_candidates(compute, smt=request.smt)
    if request.threads is not None and request.threads > len(candidates):
        raise RequestError(
            f"{{threads={request.threads}}}: worker {local_rank} has compute cores for {len(candidates)}: set "
            f"{{threads}} to {len(candidates)} or fewer"
        )
    each = f"one for each {'hardware thread' if request.smt else 'core'} of the domain that is not reserved"
    intra, why_intra = _chosen((len(candidates), each), request.threads, default_why.get("threads"))
    inter, why_inter = _chosen(inter_op_threads(intra, request.workload), request.inter_op, default_why.get("inter_op"))
    siblings = len(second_threads(compute, candidates[:intra], request.comm_siblings))
    if siblings:
        why_comm = default_why.get("comm_siblings", SET)
    comm_value = "{comm_cores} and {comm_siblings} second threads" if siblings else "{comm_cores}"
    found = (
        ("comm cores per worker", comm_value, why_comm),
        ("loader cores per worker", "{loader_cores}", why_loader),
        ("intra-op threads", "{intra_op}", why_intra),
        ("inter-op threads", "{inter_op}", why_inter),
    )
    sizes = {
        "comm_cores": comm,
        "loader_cores": loader,
        "comm_siblings": siblings,
        "intra_op": intra,
        "inter_op": inter,
    }
    return WorkerSizes(
        **sizes,
        reasons=tuple(Reason(what=what, value=formatted(value, **sizes), why=why) for what, value, why in found),
    )


def _reserved_cores(
    rates: CoreRates, request: Request, default_why: Mapping[str, str], domain: Domain, ppn: int
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Comm cores and why, loader cores and why."""
    workload, batch = request.workload or RESNET50, request.local_batch or USUAL_BATCH
    comm_rule = comm_cores(
        domain, rates, workload, ppn=ppn, nodes=request.nodes, link_gbit=request.link_gbit, local_batch=batch
    )
    loader_rule = loader_cores(replace(domain, spare=domain.spare[comm_rule[0] :]), rates, workload)
    most = len(domain.cores) + len(domain.spare) - 1  # what a default may take of a small domain
    loader = _chosen(loader_rule, request.loader_cores, default_why.get("loader_cores"), most)
    return _chosen(comm_rule, request.comm_cores, default_why.get("comm_cores"), most - loader[0]), loader


def _chosen(
    rule: tuple[int, str], requested: int | None, default_why: str | None, most: int | None = None
) -> tuple[int, str]:
    """The requested value, or the default, which is at most `most`, or the rule's; and why."""
    if requested is None:
        return rule
    value = requested if default_why is None or most is None else min(requested, most)
    return value, default_why or SET
