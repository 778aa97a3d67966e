"""Intel's extension for PyTorch as an engine: whether it fits this torch, and its optimization of a training.

Its releases ended with torch 2.8, and each works with the torch of its own number only: imported beside another one it
ends the process. So the versions are compared before.
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
    """The extension's version. Raises InputError where it is not installed or does not fit torch."""
    found = installed_version(PACKAGE)
    check_pair(found, installed_version("torch") or "none")
    assert found is not None
    return found


def check_pair(extension: str | None, torch: str) -> None:
    """Raise InputError where these versions do not work together: their first two numbers have to be the same."""
    pair = f"torch {NEWEST} and {PACKAGE} {NEWEST} fit"
    if extension is None:
        raise InputError(f"engine=ipex: {PACKAGE} is not installed: {pair}: {INSTALL}")
    if _release(extension) != _release(torch):
        raise InputError(f"engine=ipex: {PACKAGE} {extension} does not work with torch {torch}: {pair}: {INSTALL}")


def has_ipex() -> bool:
    """Whether the extension can be used."""
    try:
        check_ipex()
    except InputError:
        return False
    return True


def optimize(network: "nn.Module", optimizer: "Optimizer") -> "tuple[nn.Module, Optimizer]":
    """The network and its optimizer as the extension runs them in training, in place; bfloat16 is autocast's.

    Weights keep their layout and stay float32, so that gradients, checkpoints and comparisons of ranks stay the same:
    with dtype=bfloat16 the optimizer would have other tensors than the network, without gradients.
    """
    import torch

    extension: Any = importlib.import_module(PACKAGE.replace("-", "_"))
    logging.getLogger("IPEX").setLevel(logging.ERROR)  # it warns of its own arguments, in every rank
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
