"""Layers that stay as they are."""

from torch import nn

from affinity.errors import InputError
from cputrain.models.batchnorm import RunningBatchNorm2d


def freeze(model: nn.Module, last: str) -> None:
    """Take everything up to and with the layer `last` out of the training, batch-norm's statistics included.

    Order is the model's own. Raises InputError where there is no such layer, or nothing would be left to train.
    """
    names = [name for name, _ in model.named_modules() if name]
    if last not in names:
        top = ", ".join(name for name, _ in model.named_children())
        raise InputError(f"model.freeze_to={last}: the network has no such layer: {top}, or one inside them")
    ended = max(i for i, name in enumerate(names) if name == last or name.startswith(f"{last}."))
    frozen = set(names[: ended + 1])
    for name, module in model.named_modules():
        # of a module that holds `last`, only what comes before it is frozen: its own parameters wait for their turn
        if name in frozen and not last.startswith(f"{name}."):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = RunningBatchNorm2d
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"model.freeze_to={last} leaves nothing to train: name an earlier layer")
