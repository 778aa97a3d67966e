"""Freezing of layers."""

from torch import nn

from affinity.errors import InputError
from cputrain.models.batchnorm import RunningBatchNorm2d


def freeze(model: nn.Module, last: str) -> None:
    """Freeze all layers up to and including `last`, in the model's order, with their batch-norm statistics.

    Raises InputError where there is no such layer, or no layer would be left to train.
    """
    names = [name for name, _ in model.named_modules() if name]
    if last not in names:
        top = ", ".join(name for name, _ in model.named_children())
        raise InputError(f"model.freeze_to={last}: the network has no such layer: choose {top}, or a layer inside one")
    end = max(i for i, name in enumerate(names) if name == last or name.startswith(f"{last}."))
    frozen = set(names[: end + 1])
    for name, module in model.named_modules():
        # a module that contains `last` keeps its own parameters trainable: layers after `last` may use them
        if name in frozen and not last.startswith(f"{name}."):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = RunningBatchNorm2d
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"model.freeze_to={last} leaves no layer to train: choose an earlier layer")
