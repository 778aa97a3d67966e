"""Intel Extension for PyTorch (IPEX) as an engine: version check, and optimization of network and optimizer.

Its last release is for torch 2.8, and each release works only with the torch of the same version: importing it with
another torch ends the process. So versions are compared before the import.
"""

import importlib
import logging
import re
from typing import TYPE_CHECKING, Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.filesystem import installed_version

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

PACKAGE = "intel-extension-for-pytorch"
NEWEST = "2.8"
INSTALL = "pip install 'cputrain[ipex]' into an environment of its own, or set engine=native"


def check_ipex() -> str:
    """Return the extension's version. Raises InputError if it is not installed or does not match torch."""
    found = installed_version(PACKAGE)
    check_pair(found, installed_version("torch") or "none")
    assert found is not None
    return found


def check_pair(extension: str | None, torch: str) -> None:
    """Raise InputError unless major and minor version of extension and torch are the same."""
    needs = f"engine=ipex needs {PACKAGE} and torch of the same release, at most {NEWEST}"
    if extension is None:
        raise InputError(f"{needs}, but {PACKAGE} is not installed: {INSTALL}")
    if _release(extension) != _release(torch):
        raise InputError(f"{needs}, but {PACKAGE} {extension} and torch {torch} are installed: {INSTALL}")


def has_ipex() -> bool:
    """Return whether the extension can be used."""
    try:
        check_ipex()
    except InputError:
        return False
    return True


def optimize(network: "nn.Module", optimizer: "Optimizer") -> "tuple[nn.Module, Optimizer]":
    """Optimize network and optimizer in place for training with the extension; bf16 remains autocast's task.

    Weights keep their layout and stay float32, so that gradients, checkpoints and replica checks work as with other
    engines. With dtype=bfloat16 the optimizer would hold separate tensors without gradients.
    """
    import torch

    extension: Any = importlib.import_module(PACKAGE.replace("-", "_"))
    logging.getLogger("IPEX").setLevel(logging.ERROR)  # it warns about its default arguments on every rank
    optimized: tuple[nn.Module, Optimizer] = extension.optimize(
        network.train(),
        optimizer=optimizer,
        dtype=torch.float32,
        inplace=True,
        weights_prepack=False,
    )
    return optimized


def _release(text: str) -> str:
    found = re.match(r"\d+\.\d+", text)
    return found[0] if found else text
