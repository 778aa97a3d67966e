"""Bind a training's workers to the cores and memory of one host: read the machine, plan, apply the plan.

    >>> from cputrain.affinity import Request, find_machine, plan_machine
    >>> plan = plan_machine(find_machine("skx-8160-2s"), Request(ppn=2, nodes=16))
    >>> [(worker.intra_op, worker.comm_pus, worker.memory_nodes) for worker in plan.workers]
    [(22, (0, 48), (0,)), (22, (24, 72), (1,))]

`Picture(plan)` shows a plan in a notebook; `plan_to_json` and `read_plan` save and load it. `bind_process` binds this
process as one of the plan's workers, `python -m cputrain.affinity.bind` any command. Never imports torch.
"""

TYPE_CHECKING = False  # typing is not imported before isolate() of start.py
if TYPE_CHECKING:
    from typing import Any

    from cputrain.affinity.binding import bind_process
    from cputrain.affinity.errors import InputError, RunError
    from cputrain.affinity.planner.openmp import Runtime, find_runtime, target_of
    from cputrain.affinity.planner.plan import Plan, Request, WorkerPlan, plan_machine
    from cputrain.affinity.planner.plan_file import plan_to_json, read_plan
    from cputrain.affinity.planner.workload import Workload
    from cputrain.affinity.topology.catalog import find_machine, machine_names
    from cputrain.affinity.topology.machine import Machine
    from cputrain.affinity.views import Picture

__all__ = [
    "InputError",
    "Machine",
    "Picture",
    "Plan",
    "Request",
    "RunError",
    "Runtime",
    "WorkerPlan",
    "Workload",
    "bind_process",
    "find_machine",
    "find_runtime",
    "machine_names",
    "plan_machine",
    "plan_to_json",
    "read_plan",
    "target_of",
]

# Lazy imports: `import cputrain.affinity` alone loads none of these modules.
_MODULES = {
    "cputrain.affinity.errors": ("InputError", "RunError"),
    "cputrain.affinity.binding": ("bind_process",),
    "cputrain.affinity.planner.plan": ("Plan", "Request", "WorkerPlan", "plan_machine"),
    "cputrain.affinity.planner.plan_file": ("plan_to_json", "read_plan"),
    "cputrain.affinity.planner.openmp": ("Runtime", "find_runtime", "target_of"),
    "cputrain.affinity.planner.workload": ("Workload",),
    "cputrain.affinity.topology.catalog": ("find_machine", "machine_names"),
    "cputrain.affinity.topology.machine": ("Machine",),
    "cputrain.affinity.views": ("Picture",),
}


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'cputrain.affinity' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
