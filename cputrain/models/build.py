"""A recipe's network."""

from torch import nn

from cputrain.models.vision import import_torchvision
from cputrain.recipe import ModelSection


def build_model(section: ModelSection, classes: int) -> nn.Module:
    """torchvision's network with `classes` outputs, its BN decay and the start of its residual blocks as asked.

    Input (N, 3, H, W) float32, output (N, classes) logits.
    """
    build = getattr(import_torchvision("models"), section.name)
    model: nn.Module = build(num_classes=classes, zero_init_residual=section.zero_gamma == "last_of_block")
    for module in batchnorms(model):
        module.momentum = 1 - section.bn_decay
    return model


def batchnorms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """The batch-norm layers, in the model's order."""
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
