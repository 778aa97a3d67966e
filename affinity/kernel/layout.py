"""Whether a plan is of this host: its cores, caches and NUMA nodes compared with those that the kernel shows."""

from collections.abc import Callable, Hashable, Iterator
from itertools import chain

from affinity.errors import PlanOfAnotherMachineError
from affinity.planner.plan import Plan
from affinity.topology.cpuset import format_list
from affinity.topology.machine import Core, Machine, NumaNode
from affinity.units import GIB

OTHER_LAYOUT_VARIABLE = "AFFINITY_ALLOW_OTHER_LAYOUT"  # "1" allows what check_layout refuses, whatever the launcher
# The part of a node's planned memory that may be missing. What a kernel keeps for itself changes by some percent
# between boots, versions and crash-kernel sizes; a memory module less is mostly more than that.
MISSING_MEMORY = 0.1
# What PUs may share, by the field of a core that tells whether they do.
SHARED: tuple[tuple[str, Callable[[Core], Hashable]], ...] = (
    ("a core", lambda core: core.pus),
    ("a package", lambda core: core.package),
    ("an L3 cache", lambda core: core.l3),
    ("an L2 cache", lambda core: core.l2),
)


def check_layout(plan: Plan, host: Machine) -> None:
    """Raise PlanOfAnotherMachineError, with the first difference, where a plan's bindings mean something else here."""
    if difference := layout_difference(plan, host):
        raise PlanOfAnotherMachineError(
            f"the plan is of another machine ({plan.machine.name}, {plan.machine.model}): {difference}: plan again on "
            "this host, or continue with {allow_other_layout=true}"
        )


def layout_difference(plan: Plan, host: Machine) -> str | None:
    """The first difference between a plan's machine and this host; None where they are laid out alike.

    Only the PUs and nodes that both have are compared: a container, a control group or an offline CPU may hide others.
    The nodes of the plan's workers must exist. What one side does not know is no difference: caches of a synthetic
    machine, say, or memory of a catalog machine, whose size is a usual one. Neither is more memory than planned.
    """
    planned = plan.machine
    common = frozenset(planned.pus) & frozenset(host.pus)
    if not common:
        return f"it has CPUs {format_list(planned.pus)}, this host has CPUs {format_list(host.pus)}"
    return next(chain(_on_nodes(planned, host, common), _sharing(planned, host, common), _memory(plan, host)), None)


def _on_nodes(planned: Machine, host: Machine, common: frozenset[int]) -> Iterator[str]:
    """PUs on other NUMA nodes than planned."""
    there, here = ({pu: core.numa_node for core in machine.cores for pu in core.pus} for machine in (planned, host))
    for pu in sorted(common):
        if there[pu] is not None and here[pu] is not None and there[pu] != here[pu]:
            yield f"CPU {pu} is on NUMA node {there[pu]} in the plan, on node {here[pu]} here"


def _sharing(planned: Machine, host: Machine, common: frozenset[int]) -> Iterator[str]:
    """PUs that share a core, a package or a cache with other PUs than planned."""
    for what, shared in SHARED:
        there, here = (_together(machine, shared, common) for machine in (planned, host))
        for pu in sorted({*there} & {*here}):
            if there[pu] != here[pu]:
                with_there, with_here = (format_list(group - {pu}) or "none" for group in (there[pu], here[pu]))
                yield f"CPU {pu} shares {what} with CPUs {with_there} in the plan, with {with_here} here"


def _together(
    machine: Machine, shared: Callable[[Core], Hashable], common: frozenset[int]
) -> dict[int, frozenset[int]]:
    """PU -> the PUs in common that share the object with it; without those whose object is unknown."""
    groups: dict[Hashable, set[int]] = {}
    for core in machine.cores:
        if shared(core) is not None:
            groups.setdefault(shared(core), set()).update(common & {*core.pus})
    return {pu: frozenset(pus) for pus in groups.values() for pu in pus}


def _memory(plan: Plan, host: Machine) -> Iterator[str]:
    """Nodes that workers use and that are missing or of another kind, and nodes with less memory than planned."""
    here = {node.id: node for node in host.numa_nodes}
    used = {node for worker in plan.workers for node in worker.memory_nodes}
    for planned in plan.machine.numa_nodes:
        node = here.get(planned.id)
        if node is None:
            if planned.id in used:
                yield f"it uses NUMA node {planned.id}, this host has nodes {format_list(here)}"
        elif planned.id in used and _other_kind(planned, node):
            yield f"NUMA node {node.id} is {planned.kind} in the plan, {node.kind} here"
        elif planned.id in used and _elsewhere(planned, node):
            owners = f"{format_list(planned.near)} in the plan, to node {format_list(node.near)} here"
            yield f"NUMA node {node.id} is next to node {owners}"
        elif not planned.memory_assumed and node.memory_bytes < (1 - MISSING_MEMORY) * planned.memory_bytes:
            sizes = f"{planned.memory_bytes / GIB:.1f} GiB in the plan, {node.memory_bytes / GIB:.1f} GiB here"
            yield f"NUMA node {node.id} has {sizes}"


def _elsewhere(planned: NumaNode, here: NumaNode) -> bool:
    """Whether memory without PUs is next to other PUs than planned; a description may leave out some of several."""
    known = planned.near and here.near and not planned.pus and not here.pus
    return bool(known) and {*planned.near}.isdisjoint(here.near)


def _other_kind(planned: NumaNode, here: NumaNode) -> bool:
    """Whether both sides know a node's kind and differ: no kernel tells it of memory next to PUs (Xeon Max without DRAM
    is "dram" to it), and of other memory only where firmware has figures, which a description may have from elsewhere.
    """
    known = "unknown" not in (planned.kind, here.kind) and not planned.pus and not here.pus
    return known and planned.kind != here.kind
