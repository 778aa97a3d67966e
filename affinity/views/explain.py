"""Behind a plan: the plans for other numbers of workers, and the figures that the rules assume."""

from dataclasses import replace

from affinity.errors import InputError, Wording, as_field, describe
from affinity.planner import layouts, memory, rules, worker_count, workload
from affinity.planner.plan import Plan, plan_machine
from affinity.planner.reasons import Reason
from affinity.topology.cpuset import format_list


def alternatives(plan: Plan, wording: Wording = as_field) -> list[tuple[str, ...]]:
    """A table with a header: the plans for other numbers of workers, with their warnings and errors."""
    rows: list[tuple[str, ...]] = [("workers", "threads each", "comm", "loader", "memory", "")]
    for ppn in _candidates(plan):
        try:
            other = plan_machine(plan.machine, replace(plan.request, ppn=ppn), plan.runtime).worded(wording)
        except InputError as error:
            rows.append((str(ppn), "", "", "", "", f"impossible: {describe(error, wording)}"))
            continue
        threads = sorted({worker.intra_op for worker in other.workers})
        first = other.workers[0]
        notes = ["this plan"] if ppn == len(plan.workers) else []
        rows.append(
            (
                str(ppn),
                format_list(threads),
                str(sum(len(worker.comm_pus) for worker in other.workers)),
                str(sum(len(worker.loader_pus) for worker in other.workers)),
                first.memory_policy,
                "; ".join([*notes, *other.warnings]),
            )
        )
    return rows


def _candidates(plan: Plan) -> list[int]:
    """Plausible numbers of workers: one per host, package, NUMA node or cache, and twice as many."""
    cores = plan.machine.allowed_cores
    packages = len({core.package for core in cores})
    nodes = len({core.numa_node for core in cores})
    caches = len({(core.package, core.l3) for core in cores if core.l3 is not None})
    numbers = {1, packages, 2 * packages, nodes, 2 * nodes, caches, len(plan.workers)}
    return sorted(number for number in numbers if 1 <= number <= max(len(cores), len(plan.workers)))


ASSUMPTIONS = (
    Reason(
        what="cores per worker",
        value=f"at most {worker_count.MOST_CORES_PER_WORKER}",
        why="published: the 256-node run (24), MLPerf v0.5 on 2 x 28 cores (14)",
    ),
    Reason(
        what="hosts with a worker per core",
        value=f"at most {worker_count.SMALL_HOST_CORES} cores",
        why="measured on 2 cores: 2 x 1 thread train ResNet-50 1.2-1.35 times as fast as 1 x 2",
    ),
    Reason(
        what="lost by remote memory",
        value=f"{layouts.LOST_BY_REMOTE_MEMORY:.0%}",
        why="assumed, of the speed of a worker whose memory is all on other NUMA nodes",
    ),
    Reason(
        what="training, GFLOP/s per core",
        value=", ".join(f"{isa} {gflops:g}" for isa, gflops in workload.CORE_GFLOPS.items()),
        why="measured: 48 on Zen 3, 88 on Zen 4; the 256-node run comes to 35, and 44 before its loss to communication",
    ),
    Reason(
        what="decoding, ns per pixel of an image",
        value=", ".join(f"{name} {ns:g}" for name, ns in workload.DECODING_NS.items()),
        why=f"measured on an AMD EPYC, images of 86,000 to 204,000 pixels; ImageNet's have {workload.IMAGE_PIXELS:,}",
    ),
    Reason(
        what="GB/s per comm core",
        value=f"{rules.COMM_BYTES_PER_CORE_S / 1e9:g}, Xeon Phi {rules.COMM_BYTES_PER_PHI_CORE_S / 1e9:g}",
        why="assumed: half of what one core reads from memory",
    ),
    Reason(
        what="peak memory / activations kept",
        value=f"{workload.PEAK_OVER_KEPT:g}",
        why="measured with torch 2.13: ResNet-50 1.45, ResNet-18 1.6",
    ),
    Reason(
        what="usable share of memory", value=f"{memory.USABLE:.0%}", why="the kernel and the page cache keep the rest"
    ),
)
