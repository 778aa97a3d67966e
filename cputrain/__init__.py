"""Plan, launch and train on CPUs. A script may use, each part without the others:

plan         find_machine, Request, plan_machine, Plan, WorkerPlan, Picture, read_plan, plan_to_json, bind_process
predict      compare_plan (for plan_machine: the next best by the predicted step time)
kernels      optimize, explain, restore, KernelPlan
data         ImageLoader, Transform, Augmentation
optimizers   Lars, Lamb, AdagradDA, param_groups
schedules    Schedule, lr_at
comm         the backend "ccl" (import cputrain.comm.ccl), compress_bf16, reduce_float32
checkpoints  AsyncCheckpoint, Restored
training     train, TrainResult, Accuracy
errors       InputError, RunError

Everything else is internal and may change. The command `cputrain --help` lists what needs no script.
"""

# Nothing is imported here: before __main__.py protects the command, a user's typing.py would replace Python's.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__version__ = "0.1.0"
NAMES = {
    "affinity": (
        *("find_machine", "Request", "plan_machine", "Plan", "WorkerPlan", "Picture", "read_plan", "plan_to_json"),
        *("bind_process", "InputError", "RunError"),
    ),
    "predict.next_best": ("compare_plan",),
    "kernels.apply": ("optimize", "explain", "restore"),
    "kernels.plan": ("KernelPlan",),
    "data.loader": ("ImageLoader",),
    "data.pixels": ("Transform",),
    "data.settings": ("Augmentation",),
    "optim": ("Lars", "Lamb", "AdagradDA", "param_groups"),
    "schedule": ("Schedule", "lr_at"),
    "comm.hooks": ("compress_bf16", "reduce_float32"),
    "checkpoint.async_checkpoint": ("AsyncCheckpoint", "Restored"),
    "training.user_code": ("train",),
    "training.step": ("TrainResult", "Accuracy"),
}
"""The public names by the module that defines them."""

IN_KERNELS = {"enable": "kernels.operators", "disable": "kernels.operators"}
"""Public names of cputrain.kernels alone, by the module that defines them."""

HOME = {name: module for module, names in NAMES.items() for name in names}
PACKAGES = [*dict.fromkeys(module.partition(".")[0] for module in NAMES)]
__all__ = ["__version__", *sorted(HOME)]  # noqa: PLE0604  strings, as mypy knows


def __getattr__(name: str) -> "Any":
    """Import a public name, or a package of one, at its first use; untyped, as the packages below import the version
    from here."""
    if name not in HOME and name not in PACKAGES:
        raise AttributeError(f"module 'cputrain' has no attribute {name!r}")
    return _imported(HOME.get(name, name), name)


def __dir__() -> list[str]:
    """List what a script may use."""
    return [*__all__, *PACKAGES]


def lazy_names(package: str) -> "Callable[[str], Any]":
    """Return a `__getattr__` that gives a package, as "cputrain.data", its public names: scripts import them from
    there, too."""

    def find(name: str) -> "Any":
        home = (HOME | IN_KERNELS).get(name, "")
        if home.partition(".")[0] != package.partition(".")[2]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return _imported(home, name)

    return find


def _imported(module: str, name: str) -> "Any":
    """Import a module of this package; return it, or the attribute of this name."""
    from importlib import import_module

    imported = import_module(f"cputrain.{module}")
    return imported if module == name else getattr(imported, name)
