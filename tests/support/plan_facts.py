"""Facts in the texts of a plan, computed again from only the plan's values."""

from collections import Counter
from dataclasses import dataclass, replace
from math import inf

from cputrain.affinity.planner.plan import Plan, WorkerPlan, plan_machine
from cputrain.affinity.planner.request import Reason
from cputrain.affinity.planner.workload import USUAL_BATCH
from cputrain.affinity.topology.machine import Core, NumaNode

GIB = 1 << 30
CORE_IMAGES_S = 50 / 24.3  # AVX2, ResNet-50: GFLOP/s over GFLOP per image


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts that the texts state about a plan and one of its workers, computed from only the plan's values."""

    plan: Plan
    worker: WorkerPlan

    @property
    def ranks(self) -> int:
        return len(self.plan.workers)

    @property
    def usable(self) -> list[Core]:
        """Cores that no process of another plan uses, before the quota."""
        occupied = {*self.plan.request.occupied}
        busy = {pu for core in self.plan.machine.cores if occupied & {*core.pus} for pu in core.pus}
        return [core for core in self.plan.machine.allowed_cores if not busy & {*core.pus}]

    @property
    def kept(self) -> list[Core]:
        """Those cores for which the CPU quota suffices, without the ones that the plan put beyond it."""
        beyond = {pu for item in self.plan.unused if item.why == "beyond the CPU quota" for pu in item.pus}
        return [core for core in self.usable if not beyond >= {*core.pus}]

    def cores(self, worker: WorkerPlan) -> list[Core]:
        """The worker's cores of the type that computes, or of all types if it computes on several: those of one of them
        may all be reserved."""
        several = any(reason.what == "core types" and "on several types" in reason.why for reason in self.plan.reasons)
        speeds = {core.speed for core in self.usable if several or {*core.pus} & {*worker.compute_pus}}
        return [core for core in self.usable if {*core.pus} & {*worker.pus} and core.speed in speeds]

    @property
    def comm_cores(self) -> int:
        return self.cores_of(self.worker.comm_pus) - self.comm_siblings

    @property
    def comm_siblings(self) -> int:
        """Second hardware threads of compute cores that are used for communication."""
        computing = {pu for core in self.usable if {*core.pus} & {*self.worker.compute_pus} for pu in core.pus}
        return len(computing & {*self.worker.comm_pus})

    @property
    def loader_cores(self) -> int:
        return self.cores_of(self.worker.loader_pus)

    def cores_of(self, pus: tuple[int, ...]) -> int:
        return sum(not {*core.pus}.isdisjoint(pus) for core in self.usable)

    @property
    def own(self) -> list[Core]:
        return self.cores(self.worker)

    @property
    def sizes(self) -> list[int]:
        return [len(self.cores(worker)) for worker in self.plan.workers]

    @property
    def groups(self) -> Counter[tuple[int | None, float]]:
        """Number of computing cores by NUMA node and type."""
        return Counter((core.numa_node, core.speed) for worker in self.plan.workers for core in self.cores(worker))

    @property
    def nodes(self) -> int:
        return len({node for node, _ in self.groups if node is not None})

    @property
    def packages_without_node(self) -> int:
        """Packages of computing cores that belong to no NUMA node."""
        computing = [core for worker in self.plan.workers for core in self.cores(worker)]
        return len({core.package for core in computing if core.numa_node is None})

    @property
    def spanning(self) -> int:
        return sum(len({core.numa_node for core in self.cores(worker)}) > 1 for worker in self.plan.workers)

    @property
    def caches(self) -> list[set[int | None]]:
        return [{core.l3 for core in self.cores(worker)} for worker in self.plan.workers]

    def caches_of(self, shared: bool) -> int:
        users = Counter(cache for used in self.caches for cache in used)
        return sum(count > 1 for count in users.values()) if shared else len(users)

    @property
    def batch(self) -> int:
        """Mean number of images in a worker's pass, as the rules assume it."""
        return sum(self.images) // self.ranks or USUAL_BATCH

    @property
    def images(self) -> list[int]:
        return [worker.local_batch or 0 for worker in self.plan.workers]

    @property
    def rate(self) -> float:
        """Images/s that the worker's cores train."""
        return sum(core.speed for core in self.own) * CORE_IMAGES_S

    @property
    def link(self) -> float:
        """Bytes/s of a worker's share of the link."""
        return self.plan.request.link_gbit * 1e9 / 8 / self.ranks

    def near(self, worker: WorkerPlan) -> list[NumaNode]:
        """Memory close to the worker: its nodes and the HBM beside them."""
        own = {core.numa_node for core in self.cores(worker)}
        return [node for node in self.plan.machine.numa_nodes if own & {*node.near} and node.kind in ("dram", "hbm")]

    def part(self, node: NumaNode) -> float:
        """Bytes of a node for each of the workers next to it, or for every worker if there are none."""
        return node.memory_bytes * 0.95 / (sum(node in self.near(w) for w in self.plan.workers) or self.ranks)

    @property
    def spare(self) -> list[NumaNode]:
        """Nodes with PUs that are next to no worker."""
        used = [node for worker in self.plan.workers for node in self.near(worker)]
        return [node for node in self.plan.machine.numa_nodes if node.pus and node not in used]

    @property
    def near_dram(self) -> float:
        return sum(self.part(node) for node in self.near(self.worker) if node.kind == "dram")

    @property
    def room(self) -> float:
        """Bytes that the worker may use under its memory policy."""
        bound = [node for node in self.plan.machine.numa_nodes if node.id in self.worker.memory_nodes]
        room = sum(map(self.part, bound)) if bound else self.near_dram
        if self.worker.memory_policy == "preferred":
            room += self.near_dram if bound[0].kind == "hbm" else sum(map(self.part, self.spare))
        limit = self.plan.machine.memory_limit_bytes
        return min(room, inf if limit is None else limit / self.ranks)


def reason_of(plan: Plan, what: str) -> Reason:
    """Return the first reason for a decision."""
    return next(reason for reason in plan.reasons if reason.what == what)


def every(plan: Plan) -> list[Facts]:
    """Return the facts from each worker's view."""
    return [Facts(plan=plan, worker=worker) for worker in plan.workers]


def workers_with_plenty_of_memory(facts: Facts) -> int:
    nodes = tuple(replace(node, memory_bytes=1 << 50) for node in facts.plan.machine.numa_nodes)
    machine = replace(facts.plan.machine, numa_nodes=nodes, memory_limit_bytes=None)
    return len(plan_machine(machine, facts.plan.request, facts.plan.runtime).workers)
