"""Behind a plan: the plans for other numbers of workers, and the figures that the rules go by."""

from dataclasses import replace

from affinity.errors import InputError, Wording, as_field, describe
from affinity.planner import core_rates, layouts, memory, rules, worker_count, workload
from affinity.planner.plan import Plan, plan_machine
from affinity.planner.reasons import Reason
from affinity.planner.workload import RESNET50
from affinity.topology.cpuset import format_list


def alternatives(plan: Plan, wording: Wording = as_field) -> list[tuple[str, ...]]:
    """A table with a header: the plans for other numbers of workers, with their warnings and errors."""
    rows: list[tuple[str, ...]] = [("workers", "threads each", "comm", "loader", "memory", "")]
    for ppn in _candidates(plan):
        try:
            other = plan_machine(plan.machine, replace(plan.request, ppn=ppn), plan.runtime, plan.measured).worded(
                wording
            )
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


# Every figure that the rules go by without measurements, with its source.
FIGURES = (
    *worker_count.FIGURES,
    *layouts.FIGURES,
    *rules.FIGURES,
    *core_rates.FIGURES,
    *workload.FIGURES,
    *memory.FIGURES,
)


def figures(plan: Plan) -> tuple[Reason, ...]:
    """Every figure that the rules go by, with its source: as measured on this machine, else as assumed or cited."""
    rates = core_rates.measured_figures(plan.request.workload or RESNET50, plan.measured)
    return tuple(rates.get(figure.what, figure) for figure in FIGURES)
