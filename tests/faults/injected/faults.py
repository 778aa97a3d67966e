"""Faults inside a process that nobody can cause from outside. Python runs this file first inside `injected_faults` of
tests/support/injection.py, where FAULT_RANK is set.

In rank FAULT_RANK: FAULT_FLIP=STEP flips a bit of a weight after that step, FAULT_VERSION=TEXT is another version of
cputrain, FAULT_TORCH=TEXT of torch.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec


def flip(replicas):
    """Flip a bit of the first weight after a step, before the comparison."""
    compare = replicas.ReplicaCheck.after_step

    def after_step(self, step, *of_step):
        import torch

        if step == int(os.environ["FAULT_FLIP"]) and os.environ["RANK"] == os.environ["FAULT_RANK"]:
            weight = next(self.network.parameters())
            replicas.in_memory_order(weight.detach()).view(torch.int32)[0] ^= 1 << 20
        compare(self, step, *of_step)

    replicas.ReplicaCheck.after_step = after_step


def other_version(name):
    """Another version of a package."""

    def change(package):
        if os.environ.get("RANK") == os.environ["FAULT_RANK"]:
            package.__version__ = os.environ[name]

    return change


CHANGES = {
    "FAULT_FLIP": ("cputrain.training.watchers.replicas", flip),
    "FAULT_VERSION": ("cputrain", other_version("FAULT_VERSION")),
    "FAULT_TORCH": ("torch", other_version("FAULT_TORCH")),
}


class _AfterImport(MetaPathFinder):
    """Calls a function with a module when it has been imported."""

    def __init__(self, module, change):
        self._module, self._change = module, change

    def find_spec(self, name, path, target=None):
        if name != self._module:
            return None
        sys.meta_path.remove(self)  # asked again, it would not end
        spec = find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


for variable, (module, change) in CHANGES.items():
    if variable in os.environ and module in sys.modules:  # in a forked rank
        change(sys.modules[module])
    elif variable in os.environ:
        sys.meta_path.insert(0, _AfterImport(module, change))
