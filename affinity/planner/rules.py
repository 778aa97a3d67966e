"""Rules for a worker: cores by role (computing, communication, loading), threads, and its part of the batch.

Each value comes with its reason. Settings, tuned plans and profiles take precedence over these rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from cputrain.affinity.errors import RequestError
from cputrain.affinity.planner.domains import OTHER_TYPE, Domain
from cputrain.affinity.planner.request import (
    ALL_REDUCE,
    COMM_CORES,
    DECODING,
    LOADER_CORES,
    SET,
    STANDARD,
    Measured,
    Rate,
    Reason,
    Request,
    Unused,
    is_phi,
    training_name,
)
from cputrain.affinity.planner.workload import RESNET50, USUAL_BATCH, Workload
from cputrain.affinity.topology.machine import Core, Machine
from cputrain.affinity.wording import numbers_text, plural

CORE_GFLOPS = {"avx2": 50.0, "avx512f": 90.0}  # mean over a whole training step
BF16_GFLOPS = {"avx512_bf16": 150.0}  # processors with AMX have avx512_bf16, too; without it bf16 is emulated
# Of Arm cores: Neoverse N1 (asimd), V1 (sve), V2 (sve2); A64FX counts as sve. Sources are in CORE_RATE_FIGURES.
PHI_GFLOPS = 20.0  # of a Xeon Phi's core, which has AVX-512 as well, at 1.3 to 1.5 GHz
ASSUMED_GFLOPS = {"asimd": 20.0, "sve": 40.0, "sve2": 50.0}
MIN_GFLOPS = 20.0
DECODING_NS = {"libjpeg-turbo": 7.0, "Pillow": 18.0}  # per pixel of the JPEG for a training crop
COMM_BYTES_PER_CORE_S = 8e9
COMM_BYTES_PER_PHI_CORE_S = 3.2e9
TRAINING, DECODED, REDUCED = "training, GFLOP/s per core", "decoding, ns per pixel of an image", "GB/s per comm core"
CORE_RATE_FIGURES = (
    Reason(
        what=TRAINING,
        value=", ".join(
            f"{isa} {gflops:g}"
            for isa, gflops in {
                **CORE_GFLOPS,
                "Xeon Phi": PHI_GFLOPS,
                **ASSUMED_GFLOPS,
                "others": MIN_GFLOPS,
                **BF16_GFLOPS,
            }.items()
        ),
        why="measured in float32: 48 on Zen 3 (AVX2), 88 on Zen 4 (AVX-512); SURFsara-Intel 2018, 256 hosts: "
        "35 (16,400 images/s on 256 x 44 compute cores), 44 without communication; You et al. 2018, Xeon Phi 7250: 17 "
        "with 16 images per host, 25 with 64, without communication. Measured in bf16: 150 on Zen 4; MLPerf v2.1 with "
        "AMX, 16 hosts: 116 (8,570 images/s on 16 x 112 cores). Assumed: asimd, "
        "sve, sve2 and others; on Arm half of the published peak of a core, as on Zen 3: 83 on Graviton3 "
        "(github.com/aws/aws-graviton-getting-started issue 218), 105 on Grace (github.com/libxsmm/libxsmm issue 863, "
        "102 by a kernel of its own), 40 on Graviton2 and Altra by width and clock",
    ),
    Reason(
        what=DECODED,
        value=", ".join(f"{name} {ns:g}" for name, ns in DECODING_NS.items()),
        why="CPU time measured on an AMD EPYC for images of 204,000 (ImageNet's mean), 108,000 and 86,000 pixels: "
        "libjpeg-turbo 6.8, 7.1, 5.2; Pillow 15.8, 20.3, 18.1",
    ),
    Reason(
        what=REDUCED,
        value=f"{COMM_BYTES_PER_CORE_S / 1e9:g}, Xeon Phi {COMM_BYTES_PER_PHI_CORE_S / 1e9:g}",
        why="assumed for receiving, adding and sending in an all-reduce: half of one core's memory read bandwidth. "
        "Measured with oneCCL between two ranks of an AMD EPYC host: 2-3.4; `cputrain simulate` assumes 2, and "
        "--best tries more comm cores. Xeon Phi: four cores for 12.5 GB/s (Intel Caffe)",
    ),
)
UNITS = {TRAINING: 1.0, DECODED: 1.0, REDUCED: 1e9}  # of the figures, in units of the measured rates

CORES_TO_SPARE_ONE = 8
MAX_COMM_CORES = 4
NEGLIGIBLE = 0.005
RULE_FIGURES = (
    Reason(
        what="cores to spare",
        value=f"one in {CORES_TO_SPARE_ONE}",
        why="assumed: a smaller worker would lose more than communication and loading cost; SURFsara-Intel 2018, 256 "
        "hosts, reserved two in 24 for communication",
    ),
    Reason(what=COMM_CORES, value=f"at most {MAX_COMM_CORES}", why="published: Intel Caffe on Xeon Phi"),
    Reason(
        what="negligible communication",
        value=f"{NEGLIGIBLE:.1%} of a step",
        why="assumed: less communication is not worth a core, even of a large worker",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRates:
    """Speed of one core: GFLOP/s in training, decoded images/s, bytes/s in an all-reduce.

    `measured` has the dates of the rates that were measured on this machine, by name. `assumed` is True if no training
    rate is cited for the machine's vector extensions, or if they are unknown.
    """

    gflops: float
    decoded_per_s: float
    comm_bytes_per_s: float
    measured: dict[str, str]
    assumed: bool

    def since(self, what: str) -> str:
        """Return a rate's origin to append to a reason: " (measured on 2026-01-31)"; "" if it is cited."""
        if what in self.measured:
            return f" (measured on {self.measured[what]})"
        if what == TRAINING and self.assumed:
            return f" (assumed: {self.gflops:g} GFLOP/s per core)"
        return ""


def core_rates(machine: Machine, workload: Workload, measured: Measured) -> CoreRates:
    """Return a core's rates for a workload: measured if possible, else cited or assumed."""
    cited = {**CORE_GFLOPS, **(BF16_GFLOPS if workload.precision == "bf16" else {})}
    gflops_by_flag = {**ASSUMED_GFLOPS, **cited}
    gflops = max((gflops_by_flag[flag] for flag in machine.isa if flag in gflops_by_flag), default=MIN_GFLOPS)
    gflops = min(gflops, PHI_GFLOPS) if is_phi(machine) else gflops
    comm = COMM_BYTES_PER_PHI_CORE_S if is_phi(machine) else COMM_BYTES_PER_CORE_S
    rates = {what: rate for what, rate in _measured_rates(workload, measured).items() if rate is not None}

    def value(what: str, default: float) -> float:
        return rates[what].value if what in rates else default

    return CoreRates(
        gflops=value(TRAINING, gflops),
        decoded_per_s=1e9 / (value(DECODED, DECODING_NS[workload.decoder]) * workload.image_pixels),
        comm_bytes_per_s=value(REDUCED, comm),
        measured={what: rate.date for what, rate in rates.items()},
        assumed=not {*cited} & {*machine.isa},
    )


def measured_figures(workload: Workload, measured: Measured) -> dict[str, Reason]:
    """Return the figures that were measured on this machine, by name, with the cited value in the reason."""
    reasons: dict[str, Reason] = {}
    for figure in CORE_RATE_FIGURES:
        rate = _measured_rates(workload, measured)[figure.what]
        if rate is not None:
            value, low, high = (bound / UNITS[figure.what] for bound in (rate.value, rate.low, rate.high))
            reasons[figure.what] = Reason(
                what=figure.what,
                value=f"{value:.3g} ({low:.3g}-{high:.3g})",
                why=f"measured here on {rate.date} by `{rate.command}` ({rate.name}); elsewhere {figure.value}",
            )
    return reasons


def _measured_rates(workload: Workload, measured: Measured) -> dict[str, Rate | None]:
    this, standard = (training_name(name, workload.precision) for name in (workload.name, STANDARD))
    return {
        TRAINING: measured.rate(this, standard),
        DECODED: measured.rate(f"{DECODING} {workload.decoder}"),
        REDUCED: measured.rate(f"{ALL_REDUCE} ccl"),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSizes:
    """Numbers of comm cores, loader cores, comm threads on compute cores' hyper-threads, and threads; with reasons."""

    comm_cores: int
    loader_cores: int
    comm_siblings: int
    intra_op: int
    inter_op: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A domain's cores: reserved for communication and loading, for computing, and idle."""

    reserved: tuple[Core, ...]
    compute: tuple[Core, ...]
    idle: tuple[Core, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRoles:
    """A worker's PUs by role.

    `packed`: in OpenMP's default order, first threads of all cores first, the worker's PUs start with `compute`.
    """

    compute: tuple[int, ...]
    comm: tuple[int, ...]
    loader: tuple[int, ...]
    packed: bool
    unused: tuple[Unused, ...]

    @property
    def single_pu(self) -> bool:
        """Whether the worker has a single PU, to which the process's affinity mask binds its only thread."""
        return len(self.compute) + len(self.comm) + len(self.loader) == 1


def reserve(domain: Domain, count: int, *, at_end: bool) -> Reserved:
    """Reserve `count` cores: spare cores first, then the domain's first cores (`at_end`: its last cores).

    First cores, because a host's first cores also handle its interrupts.
    """
    spare, from_compute = domain.spare[:count], max(0, count - len(domain.spare))
    computing = len(domain.cores) - from_compute
    reserved = domain.cores[computing:] if at_end else domain.cores[:from_compute]
    compute = domain.cores[:computing] if at_end else domain.cores[from_compute:]
    return Reserved(reserved=spare + reserved, compute=compute, idle=domain.spare[count:])


def compute_candidates(cores: tuple[Core, ...], *, smt: bool) -> tuple[int, ...]:
    """Return the PUs that may compute: the first hardware thread of each core, or with `smt` all of them."""
    return tuple(pu for core in cores for pu in (core.pus if smt else core.pus[:1]))


def second_threads(cores: tuple[Core, ...], compute: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the hyper-threads of the first `count` compute cores. Raises RequestError if they compute themselves."""
    second = tuple(core.pus[1] for core in cores if len(core.pus) > 1 and core.pus[0] in compute)[:count]
    if not set(second).isdisjoint(compute):
        raise RequestError("hyper-threads cannot both communicate and compute: leave {smt} off")
    return second


def assign_roles(domain: Domain, sizes: WorkerSizes, request: Request) -> CoreRoles:
    """Assign a role to each PU of a domain; the first reserved cores are comm cores, the others loader cores."""
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
    """Return the PUs of cores: the first hardware thread of each core, then the second of each, and so on."""
    threads = max((len(core.pus) for core in cores), default=0)
    return tuple(core.pus[i] for i in range(threads) for core in cores if i < len(core.pus))


def _idle(cores: Reserved, busy_pus: set[int], threads: int) -> tuple[Unused, ...]:
    """List the idle PUs, with the reason."""
    busy = [core for core in cores.compute if not busy_pus.isdisjoint(core.pus)]
    siblings = tuple(pu for core in busy for pu in core.pus if pu not in busy_pus)
    beyond = tuple(pu for core in cores.compute if core not in busy for pu in core.pus)
    idle = (
        Unused(pus=siblings, why="hyper-threads of compute cores, which would compete for the cores' vector units"),
        Unused(pus=beyond, why=f"{{threads={threads}}} leaves them out"),
        Unused(pus=_pus(cores.idle), why=OTHER_TYPE),
    )
    return tuple(item for item in idle if item.pus)


def comm_cores(
    domain: Domain, rates: CoreRates, workload: Workload, *, ppn: int, nodes: int, link_gbit: float, local_batch: int
) -> tuple[int, str]:
    """Return the number of comm cores, enough to saturate a worker's part of the link, and the reason."""
    if nodes == 1:
        why = "on one host an all-reduce over loopback costs a few percent of a step on Xeon and EPYC, less than a core"
        return 0, f"{why} would"
    if not _to_spare(domain):
        return 0, numbers_text("a worker of {cores:core} has none to spare", cores=len(domain.cores))
    bytes_per_s = link_gbit * 1e9 / 8 / ppn
    wire_s = 2 * workload.gradient_bytes / bytes_per_s  # a ring sends every byte twice (Patarasuk and Yuan 2009)
    step_s = local_batch / (domain.capacity * rates.gflops / workload.gflop)
    if wire_s < NEGLIGIBLE * step_s:
        why = "{wire_s:ms .1f} ms of communication in a step of {step_s:.1f} s is not worth a core"
        return 0, numbers_text(why, wire_s=wire_s, step_s=step_s)
    return min(ceil(bytes_per_s / rates.comm_bytes_per_s), MAX_COMM_CORES, _to_spare(domain)), numbers_text(
        "on several hosts the all-reduce overlaps the backward pass; {link_gbit:g} Gbit/s per host is "
        "{link_bytes_per_s:GB .1f} GB/s per worker, and one core reduces about {core_bytes_per_s:GB .3g} GB/s{since}",
        link_gbit=link_gbit,
        link_bytes_per_s=bytes_per_s,
        core_bytes_per_s=rates.comm_bytes_per_s,
        since=rates.since(REDUCED),
    )


def loader_cores(domain: Domain, rates: CoreRates, workload: Workload) -> tuple[int, str]:
    """Return the number of loader cores, enough to decode the images for the compute cores, and the reason."""
    cores = len(domain.cores)
    if not _to_spare(domain):
        why = "a worker of {cores:core} has none to spare; images are decoded on the compute cores"
        return 0, numbers_text(why, cores=cores)
    rate = domain.capacity * rates.gflops / workload.gflop
    return min(max(1, ceil(rate / rates.decoded_per_s)), _to_spare(domain)), numbers_text(
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
    """Return how many cores may be reserved: one in eight of the domain's cores, and all spare cores."""
    return len(domain.cores) // CORES_TO_SPARE_ONE + len(domain.spare)


def inter_op_threads(intra_op: int, workload: Workload | None) -> tuple[int, str]:
    """Return the number of inter-op threads, and the reason."""
    if intra_op >= CORES_TO_SPARE_ONE:
        return 2, "published practice on 24-core packages (intra-op 22, inter-op 2)"
    if workload is not None and not workload.assumed and workload.network.startswith("resnet"):
        return 1, "ResNet is a chain of operators, so nothing can run in parallel"
    return 1, "with few compute cores, operators in parallel would compete for them"


def passes_of(local_batch: int, global_batch: int, workers: int) -> int:
    """Return the backward passes of a worker in which workers compute a global batch, each at most `local_batch`."""
    return ceil(global_batch / (workers * local_batch))


def most_per_pass(local_batch: int, global_batch: int | None, workers: int) -> int:
    """Return the most images of a worker's backward pass: `local_batch`, or less if equal parts of a global batch need
    no more passes with less."""
    if global_batch is None:
        return local_batch
    return ceil(ceil(global_batch / workers) / passes_of(local_batch, global_batch, workers))


def local_batches(
    domains: tuple[Domain, ...], threads: tuple[int, ...], local_batch: int | None, *, proportional: bool
) -> tuple[int | None, ...]:
    """Return each worker's images per step, which add up to exactly local_batch x workers.

    `proportional`: in proportion to the speed of each worker's threads, at least 1, by largest remainders.
    """
    if local_batch is None or not proportional:
        return (local_batch,) * len(domains)
    speeds = [min(core.speed for core in domain.cores) * count for domain, count in zip(domains, threads, strict=True)]
    total = local_batch * len(domains)
    exact = [total * speed / sum(speeds) for speed in speeds]
    batches = [max(1, int(size)) for size in exact]
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
    """Choose the numbers of cores and threads of the worker with this domain.

    `request` includes the values of the profile or tuned plan, `default_why` their reasons. Such values are lowered to
    fit the domain; a requested value that does not fit raises RequestError.
    """
    rates = core_rates(machine, request.workload or RESNET50, measured)
    (comm, why_comm), (loader, why_loader) = _reserved_cores(rates, request, default_why, domain, ppn)
    if comm + loader - len(domain.spare) >= len(domain.cores):
        raise RequestError(
            f"{comm} comm and {loader} loader cores leave none of worker {local_rank}'s "
            f"{plural(len(domain.cores), 'core')} for computing: reserve fewer cores, or set a smaller {ppn}"
        )
    compute = reserve(domain, comm + loader, at_end=request.reserve_last).compute
    candidates = compute_candidates(compute, smt=request.smt)
    if request.threads is not None and request.threads > len(candidates):
        raise RequestError(
            f"{{threads={request.threads}}}: worker {local_rank} has compute cores for {len(candidates)}; set "
            f"{{threads}} to {len(candidates)} or fewer"
        )
    placement = f"one for each {'hardware thread' if request.smt else 'core'} that is not reserved"
    intra, why_intra = _chosen((len(candidates), placement), request.threads, default_why.get("threads"))
    inter, why_inter = _chosen(inter_op_threads(intra, request.workload), request.inter_op, default_why.get("inter_op"))
    siblings = len(second_threads(compute, candidates[:intra], request.comm_siblings))
    if siblings:
        why_comm = default_why.get("comm_siblings", SET)
    comm_value = "{comm_cores} and {comm_siblings} hyper-threads" if siblings else "{comm_cores}"
    decisions = (
        (COMM_CORES, comm_value, why_comm),
        (LOADER_CORES, "{loader_cores}", why_loader),
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
        reasons=tuple(Reason(what=what, value=numbers_text(value, **sizes), why=why) for what, value, why in decisions),
    )


def _reserved_cores(
    rates: CoreRates, request: Request, default_why: Mapping[str, str], domain: Domain, ppn: int
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Choose the numbers of comm cores and loader cores, each with its reason."""
    workload, batch = request.workload or RESNET50, request.local_batch or USUAL_BATCH
    comm_rule = comm_cores(
        domain, rates, workload, ppn=ppn, nodes=request.nodes, link_gbit=request.link_gbit, local_batch=batch
    )
    loader_rule = loader_cores(replace(domain, spare=domain.spare[comm_rule[0] :]), rates, workload)
    limit = len(domain.cores) + len(domain.spare) - 1  # limits a default on a small domain
    loader = _chosen(loader_rule, request.loader_cores, default_why.get("loader_cores"), limit)
    return _chosen(comm_rule, request.comm_cores, default_why.get("comm_cores"), limit - loader[0]), loader


def _chosen(
    rule: tuple[int, str], requested: int | None, default_why: str | None, limit: int | None = None
) -> tuple[int, str]:
    """Choose the requested value, else the default limited to `limit`, else the rule's, with the reason."""
    if requested is None:
        return rule
    value = requested if default_why is None or limit is None else min(requested, limit)
    return value, default_why or SET
