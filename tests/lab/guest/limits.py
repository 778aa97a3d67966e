"""Control groups (v2): plans stay inside cpuset, cpu.max and memory.max, and a cpuset that shrank is noticed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Request, plan_machine
from cputrain.affinity.planner.plan_file import plan_from_dict, plan_to_dict
from cputrain.affinity.planner.workload import RESNET50, USUAL_BATCH
from cputrain.affinity.topology.machine import format_list
from cputrain.affinity.wording import MIB
from tests.lab.guest.binding import as_planned, refused
from tests.lab.guest.scene import Scene, plan_here
from tests.lab.guest.workers import all_bound, in_group

GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def group(**limits: str) -> Iterator[Path]:
    """A control group with these limits: `cpuset_cpus` is the file cpuset.cpus."""
    (GROUPS / "cgroup.subtree_control").write_text("+cpuset +cpu +memory")
    folder = GROUPS / "lab"
    folder.mkdir()
    try:
        for name, value in limits.items():
            (folder / name.replace("_", ".")).write_text(value)
        yield folder
    finally:
        folder.rmdir()


def cpuset(scene: Scene) -> None:
    """Inside a cpuset the plan uses its CPUs and memory alone, and its workers bind."""
    node = max((n for n in scene.machine.numa_nodes if n.pus and n.memory_bytes), key=lambda n: n.id)
    pus = node.pus[: max(2, len(node.pus) // 2)]
    with group(cpuset_cpus=format_list(pus), cpuset_mems=str(node.id)) as folder:
        plan = plan_from_dict(in_group(folder, lambda: plan_to_dict(plan_here())))
        assert plan.machine.allowed_pus == pus and plan.machine.allowed_nodes == (node.id,), plan.machine
        assert all({*worker.pus} <= {*pus} for worker in plan.workers)
        with all_bound(plan, group=folder) as running:
            for worker, (_, report) in zip(plan.workers, running, strict=True):
                as_planned(worker, report)


def shrunk_cpuset(scene: Scene) -> None:
    """A cpuset that loses a CPU, or a node, after the plan: the worker that had it is refused."""
    worker = scene.plan.workers[-1]
    left = tuple(pu for pu in scene.machine.allowed_pus if pu != worker.pus[-1])
    with group(cpuset_cpus=format_list(left)) as folder:
        refused(scene.plan, worker.local_rank, group=folder)
    nodes = {*scene.memory_nodes} - {*worker.memory_nodes}
    if worker.memory_policy != "default" and nodes:
        with group(cpuset_mems=format_list(nodes)) as folder:
            refused(scene.plan, worker.local_rank, group=folder)


def quotas(scene: Scene) -> None:
    """A CPU quota and a memory limit are read: the plan uses no more cores than the quota pays for, those next to
    memory that it may use, and warns of a training that does not fit."""
    memory, node = 256 * MIB, max(n.id for n in scene.machine.numa_nodes if n.pus and n.memory_bytes)
    with group(cpu_max="200000 100000", memory_max=str(memory), cpuset_mems=str(node)) as folder:
        plan = plan_from_dict(in_group(folder, lambda: plan_to_dict(plan_here())))
        assert plan.machine.cpu_quota == 2.0 and plan.machine.memory_limit_bytes == memory, plan.machine
        core_of = {pu: core for core in scene.machine.cores for pu in core.pus}
        cores = {core_of[pu] for worker in plan.workers for pu in worker.pus}
        assert len(cores) <= 2 and {core.numa_node for core in cores} == {node}, plan.workers
        training = Request(workload=RESNET50, local_batch=USUAL_BATCH)
        warnings = plan_machine(plan.machine, training, Runtime()).warnings
        assert any("would not fit in memory" in text for text in warnings), warnings
        with all_bound(plan, group=folder) as running:
            for worker, (_, report) in zip(plan.workers, running, strict=True):
                as_planned(worker, report)
