"""Real workers through affinity.bind: what each was given, where its pages lie, and which plans are refused."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from cputrain.affinity.__main__ import main as affinity_main
from cputrain.affinity.bound_plan import inspect_process
from cputrain.affinity.planner.openmp import Runtime
from cputrain.affinity.planner.plan import Plan, Request, WorkerPlan, plan_machine
from cputrain.affinity.topology.machine import Machine, format_list, parse_list
from cputrain.affinity.wording import MIB
from tests.lab.guest.scene import NotApplicableError, Scene, compact_memory, plan_here, set_online
from tests.lab.guest.workers import bound, nodes_of, running_workers

HUGE_MIB = 4  # what the probe touches in pages of 2 MiB
# How numa_maps names a policy.
POLICIES = {"bind": "bind", "interleave": "interleave", "preferred": "prefer", "default": "default"}


def workers(scene: Scene) -> None:
    """Each worker has its planned mask and policy, and pages of all sizes lie on its planned nodes."""
    compact_memory()
    for worker, (_, report) in zip(scene.plan.workers, running_workers(scene.plan), strict=True):
        as_planned(worker, report)
        free = Path("/proc/buddyinfo").read_text(encoding="ascii")
        assert report["transparent_kib"] >= 4096, f"no transparent huge pages: {free} {report}"


def as_planned(worker: WorkerPlan, report: dict) -> None:
    """A probe's report agrees with the worker's plan."""
    assert parse_list(report["cpus"]) == worker.pus, (worker.pus, report["cpus"])
    for name, mapping in report["mappings"].items():
        policy = mapping.split()[1]
        nodes = f":{format_list(worker.memory_nodes)}" if worker.memory_nodes else ""
        assert policy.replace("=static", "") == f"{POLICIES[worker.memory_policy]}{nodes}", (name, mapping)
        pages = nodes_of(mapping)
        assert pages, (name, mapping)
        if worker.memory_nodes:
            assert {*pages} <= {*worker.memory_nodes}, (name, mapping)
        if worker.memory_policy == "interleave" and name == "small":
            assert {*pages} == {*worker.memory_nodes}, (name, mapping)


def shown_as_planned(scene: Scene) -> None:
    """`affinity show` finds no difference in workers that are bound correctly, libraries and huge pages included."""
    running = running_workers(scene.plan)
    for started, _ in running:
        process = inspect_process(started.pid)
        assert process.worker is not None and not process.differs, process
    pids = [word for started, _ in running for word in ("--pid", str(started.pid))]
    assert affinity_main(["show", *pids], os.environ) == 0


def moved_by_taskset(scene: Scene) -> None:
    """A worker that taskset moves away is found."""
    (started, _), worker = running_workers(scene.plan)[-1], scene.plan.workers[-1]
    elsewhere = min({*scene.machine.allowed_pus} - {*worker.pus}, default=None)
    if elsewhere is None:
        raise NotApplicableError
    taskset = ("taskset", "-a", "-p", "-c", str(elsewhere), str(started.pid))
    subprocess.run(taskset, check=True, capture_output=True)
    assert inspect_process(started.pid).misplaced_threads
    assert affinity_main(["show", "--pid", str(started.pid)], os.environ) == 1


def moved_by_migratepages(scene: Scene) -> None:
    """Pages that migratepages moves to another node are found, all of them, huge pages too."""
    worker = next((w for w in scene.plan.workers if w.memory_policy == "bind"), None)
    targets = {*scene.memory_nodes} - {*(worker.memory_nodes if worker else ())}
    if worker is None or not targets:
        raise NotApplicableError
    started, _ = running_workers(scene.plan)[worker.local_rank]
    nodes = format_list(worker.memory_nodes)
    argv = ("migratepages", str(started.pid), nodes, str(min(targets)))
    subprocess.run(argv, check=True, capture_output=True)
    process = inspect_process(started.pid)
    shown = affinity_main(["show", "--pid", str(started.pid)], os.environ)
    assert shown == 1 and process.remote_bytes >= (8 + 4) * MIB, process
    assert process.memory_bytes[min(targets)] >= (8 + 4 + HUGE_MIB) * MIB, f"huge pages are not counted: {process}"


def foreign(machine: Machine) -> Machine:
    """A machine with the same CPU numbers and another layout: CPUs on other nodes, or with other siblings, or more
    memory than there is."""
    nodes = [node for node in machine.numa_nodes if node.pus]
    if len(nodes) > 1:
        after = {a.id: b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)}
        return replace(
            machine,
            cores=tuple(
                replace(core, numa_node=core.numa_node if core.numa_node is None else after[core.numa_node].id)
                for core in machine.cores
            ),
            numa_nodes=tuple(
                replace(node, pus=next((a.pus for a in nodes if after[a.id].id == node.id), node.pus))
                for node in machine.numa_nodes
            ),
        )
    return replace(
        machine, numa_nodes=tuple(replace(node, memory_bytes=2 * node.memory_bytes) for node in machine.numa_nodes)
    )


def plan_of_another_machine(scene: Scene) -> None:
    """A plan of a machine with the same CPU numbers is refused with the first difference, and taken where allowed."""
    plan = plan_machine(foreign(scene.machine), Request(ppn=1, threads=1), Runtime())
    refused = bound(plan, 0)
    _, status = os.waitpid(refused.pid, 0)
    text = refused.output.read_text()
    assert os.waitstatus_to_exitcode(status) == 2, text
    assert "the plan is for another machine" in text and "--allow-other-layout" in text and text.count("\n") == 1, text
    os.close(refused.waits_at)
    allowed = bound(plan, 0, "--allow-other-layout")
    allowed.report()
    allowed.end()


def taken_offline(scene: Scene) -> None:
    """A CPU that goes offline after the plan: its worker is refused with both masks; a new plan leaves it out."""
    worker = scene.plan.workers[-1]
    gone = worker.pus[-1]
    assert gone != 0, "CPU 0 cannot go offline"
    set_online(gone, online=False)
    try:
        refused(scene.plan, worker.local_rank)
        again = plan_here()
        assert gone not in again.machine.pus and all(gone not in w.pus for w in again.workers)
        started = bound(again, again.workers[-1].local_rank)
        as_planned(again.workers[-1], started.report())
        started.end()
    finally:
        set_online(gone, online=True)


def refused(plan: Plan, local_rank: int, **where: object) -> None:
    """The worker is not started: the kernel gave it something else than planned."""
    started = bound(plan, local_rank, **where)
    _, status = os.waitpid(started.pid, 0)
    os.close(started.waits_at)
    text = started.output.read_text()
    assert os.waitstatus_to_exitcode(status) == 1, text
    assert "plan" in text and len(text.strip().splitlines()[-1]) > 20, text
