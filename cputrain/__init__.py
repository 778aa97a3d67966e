"""Plan, launch and train on CPUs. A script may use, each part without the others:

plan         find_machine, Request, plan_machine, Plan, WorkerPlan, Picture, read_plan, plan_to_json, bind_process
predict      compare_plan (for plan_machine: the next best by the predicted step time)
kernels      optimize, explain, restore, KernelPlan
data         ImageLoader, Transform, Augmentation
optimizers   Lars, Lamb, AdagradDA, param_groups
schedules    Schedule, lr_at
comm         the backend "ccl" (import cputrain.comm.ccl), compress_bf16
checkpoints  AsyncCheckpoint, Restored
training     train, TrainResult, Accuracy
errors       InputError, RunError

Everything else is internal and may change. The command `cputrain --help` lists what needs no script.
"""

# No imports here: only __main__.py protects the command from a user's typing.py or enum.py.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"
NAMES = {
    "affinity": (
        *("find_machine", "Request", "plan_machine", "Plan", "WorkerPlan", "Picture", "read_plan", "plan_to_json"),
        *("bind_process", "InputError", "RunError"),
    ),
    "predict": ("compare_plan",),
    "kernels": ("optimize", "explain", "restore", "KernelPlan"),
    "data": ("ImageLoader", "Transform", "Augmentation"),
    "optim": ("Lars", "Lamb", "AdagradDA", "param_groups"),
    "schedule": ("Schedule", "lr_at"),
    "comm": ("compress_bf16",),
    "checkpoint": ("AsyncCheckpoint", "Restored"),
    "training": ("train", "TrainResult", "Accuracy"),
}
"""The public names by the package that defines them."""

HOME = {name: package for package, names in NAMES.items() for name in names}
__all__ = ["__version__", *sorted(HOME)]  # noqa: PLE0604  strings, as mypy knows


def __getattr__(name: str) -> "Any":
    """Import a public name, or a package of one, at its first use; untyped, as the packages below import the version
    from here."""
    if name not in HOME and name not in NAMES:
        raise AttributeError(f"module 'cputrain' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"cputrain.{HOME.get(name, name)}")
    return getattr(module, name) if name in HOME else module


def __dir__() -> list[str]:
    """List what a script may use."""
    return [*__all__, *NAMES]
