"""The network of a recipe."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial

import torch
from torch import nn

from affinity.errors import InputError
from cputrain.models.batchnorm import GhostBatchNorm2d, RunningBatchNorm2d, SyncBatchNorm2d
from cputrain.models.freeze import freeze
from cputrain.models.networks import LeNet, Linear, MnistCnn, alexnet_bn
from cputrain.models.vision import import_torchvision
from cputrain.recipe.schema import ModelSection
from cputrain.recipe.schema.model import RESNETS, TORCHVISION

OWN_NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {"lenet": LeNet, "mnist-cnn": MnistCnn, "linear": Linear}
BATCHNORMS = {"local": GhostBatchNorm2d, "sync": SyncBatchNorm2d, "running": RunningBatchNorm2d}


def build_model(section: ModelSection, classes: int, side: int, features: int | None = None) -> nn.Module:
    """The network of a recipe, with its batch-norm, for `classes` outputs and images of side x side pixels.

    Input (N, 3, side, side) float32, output (N, classes) logits; with `features` a linear layer from (N, features).
    Raises InputError for a network that torchvision does not have, that needs larger images, or that is no classifier.
    """
    if section.classes is not None and section.classes < classes:
        raise InputError(
            f"model.classes={section.classes}, but the data has {classes} classes: set it to {classes} or null"
        )
    outputs = section.classes or classes
    if features is not None:
        model: nn.Module = Linear(outputs, side, features)
    elif section.name in OWN_NETWORKS:
        model = OWN_NETWORKS[section.name](outputs, side)
    elif section.name == "alexnet-bn":
        model = alexnet_bn(_torchvision("alexnet"), outputs)
    else:
        model = _torchvision(section.name.removeprefix(TORCHVISION))(num_classes=outputs)
    if section.name in RESNETS:
        _shape_blocks(model, section)
    for layer in batchnorms(model):
        layer.momentum = 1 - section.bn_decay
    if section.bn_stats != "local" or section.bn_ghost_batch is not None:
        for layer in batchnorms(model):
            layer.__class__ = BATCHNORMS[section.bn_stats]
            if isinstance(layer, GhostBatchNorm2d):
                layer.ghost_batch = section.bn_ghost_batch or 0
    if section.freeze_to is not None:
        freeze(model, section.freeze_to)
    if features is None:
        _check_forward(model, section.name, outputs, side)
    return model


def _check_forward(model: nn.Module, name: str, outputs: int, side: int) -> None:
    """Pass one image through the network, to find an unsuitable size before the training's first step."""
    model.eval()
    try:
        with torch.inference_mode():
            logits = model(torch.zeros(1, 3, side, side))
    except (RuntimeError, AssertionError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"data.crop={side}: {name} does not accept images of {side} x {side} pixels: {why}") from None
    finally:
        model.train()
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, outputs):
        raise InputError(f"model.name={name} does not return {outputs} logits per image: choose a classifier")


def _torchvision(name: str) -> Callable[..., nn.Module]:
    models = import_torchvision("models")
    known = models.list_models(module=models)
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.4)
        advice = f"nearest are {', '.join(near)}" if near else f"it has {', '.join(known[:5])} and others"
        raise InputError(f"model.name: torchvision has no classifier {name!r}: {advice}")
    build: Callable[..., nn.Module] = models.get_model_builder(name)
    # these two have auxiliary classifiers, whose losses the original papers add
    return partial(build, aux_logits=False) if name in ("googlenet", "inception_v3") else build


def _shape_blocks(model: nn.Module, section: ModelSection) -> None:
    """Set the stride and the initial gamma of a torchvision ResNet's blocks."""
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        blocks = list(stage.children())  # type: ignore[union-attr]
        first = blocks[0]
        if section.resnet_version == "v1":
            first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride
        zeroed = {"none": [], "last_of_block": blocks, "last_of_stage": blocks[-1:]}[section.zero_gamma]
        for block in zeroed:
            nn.init.zeros_((block.bn3 if hasattr(block, "bn3") else block.bn2).weight)


def batchnorms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """The batch-norm layers, in the model's order."""
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
