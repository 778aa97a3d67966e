"""Plan, launch and train on CPUs. A script may use:

train                  train a network of its own, or a recipe's: train(network, loss, data, settings=[...])
optimize               native kernels for a network in any loop: optimize(model, optimizer, dtype=..., sample_input=...)
explain, restore       print which kernels compute a network's layers and why; undo optimize
cputrain.affinity      plan a machine and bind processes: find_machine, Request, plan_machine, bind_process
cputrain.checkpoint    save and resume any loop, bit for bit: AsyncCheckpoint
cputrain.comm          oneCCL for torch.distributed, gradients as bfloat16: import cputrain.comm.ccl, compress_bf16
cputrain.data          read images for a loop of its own: ImageLoader, Transform, Augmentation
cputrain.optim         optimizers for large batches: Lars, Lamb, AdagradDA, param_groups
cputrain.schedule      learning rates by step, a warm-up and a decay: Schedule, lr_at

Everything else is internal and may change. The command `cputrain --help` lists what needs no script.
"""

# No imports here: only __main__.py protects the command from a user's typing.py or enum.py.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "explain", "optimize", "restore", "train"]
FUNCTIONS = dict.fromkeys(("explain", "optimize", "restore"), "kernels") | {"train": "training.entry"}
PACKAGES = ("affinity", "checkpoint", "comm", "data", "optim", "schedule")


def __getattr__(name: str) -> "Any":
    """Import a function or a package for scripts at its first use; untyped, as the packages below import the version
    from here."""
    if name not in FUNCTIONS and name not in PACKAGES:
        raise AttributeError(f"module 'cputrain' has no attribute {name!r}")
    from importlib import import_module

    if name in PACKAGES:
        return import_module(f"cputrain.{name}")
    return getattr(import_module(f"cputrain.{FUNCTIONS[name]}"), name)


def __dir__() -> list[str]:
    """List what a script may use."""
    return [*__all__, *PACKAGES]
