"""Build a network: our own and other libraries', batch-norm variants, frozen layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import plural
from cputrain.kernels.norms import GhostBatchNorm2d, RunningBatchNorm2d, SyncBatchNorm2d, batchnorms
from cputrain.models.settings import RESNETS, TIMM, ModelSettings
from cputrain.models.vision import build_of_library, check_has_network, import_torchvision

DROPOUT = 0.5
BATCHNORMS = {"local": GhostBatchNorm2d, "sync": SyncBatchNorm2d, "running": RunningBatchNorm2d}
BRACKETS = str.maketrans("()", "[]", " ")


def alexnet_bn(alexnet: Callable[..., nn.Module], classes: int) -> nn.Module:
    """Build AlexNet with batch-norm after each convolution, B. Ginsburg's network for batches of 32K (You et al. 2018,
    section 4).

    Layers are torchvision's; the batch-norm layers between them shift their indices in `features`.
    """
    model = alexnet(num_classes=classes)
    layers: list[nn.Module] = []
    for layer in model.features.children():  # type: ignore[union-attr]
        layers.append(layer)
        if isinstance(layer, nn.Conv2d):
            layers.append(nn.BatchNorm2d(layer.out_channels))
    model.features = nn.Sequential(*layers)
    return model


class LeNet(nn.Module):
    """LeNet (LeCun et al. 1998) as in Caffe: 5 x 5 convolutions of 20 and 50 channels, 500 units, no batch-norm."""

    def __init__(self, classes: int, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool = nn.MaxPool2d(2)
        last_side = ((side - 4) // 2 - 4) // 2  # side of the last feature maps, 4 for images of 28 x 28
        self.fc1 = nn.Linear(50 * last_side**2, 500)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(500, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, side, side) -> (N, classes)."""
        maps = self.pool(self.conv2(self.pool(self.conv1(images))))
        logits: Tensor = self.fc(self.relu(self.fc1(maps.flatten(1))))
        return logits


class MnistCnn(nn.Module):
    """5 x 5 convolutions of 32 and 64 channels with pooling, 1,024 units, dropout (TensorFlow's "Deep MNIST")."""

    def __init__(self, classes: int, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.pool = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.fc1 = nn.Linear(64 * (side // 4) ** 2, 1024)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(DROPOUT)
        self.fc = nn.Linear(1024, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, side, side) -> (N, classes)."""
        maps = self.pool(self.conv2(self.pool(self.conv1(images))))
        logits: Tensor = self.fc(self.dropout(self.relu(self.fc1(maps.flatten(1)))))
        return logits


class Linear(nn.Module):
    """A single linear layer from pixels to classes (softmax regression), or from `features` values to outputs."""

    def __init__(self, classes: int, side: int, features: int | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(features or 3 * side * side, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, side, side) or (N, features) -> (N, classes)."""
        logits: Tensor = self.fc(images.flatten(1))
        return logits


def check_network(name: str) -> None:
    """Raise InputError if LIBRARY:NAME is not installed or not a network of this library, as `build_model` does."""
    library, _, network = name.rpartition(":")
    if library:
        check_has_network(library, network)


def freeze(model: nn.Module, last: str) -> None:
    """Freeze all layers up to and including `last`, in the model's order, with their batch-norm statistics.

    Raises InputError if there is no such layer, or if no layer would remain trainable.
    """
    names = [name for name, _ in model.named_modules() if name]
    if last not in names:
        top = ", ".join(name for name, _ in model.named_children())
        raise InputError(f"model.freeze_to={last} is not a layer of the network: choose {top}, or a layer inside one")
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
        raise InputError(f"model.freeze_to={last} freezes all layers: choose an earlier layer")


OWN_NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {"lenet": LeNet, "mnist-cnn": MnistCnn, "linear": Linear}


def build_model(settings: ModelSettings, classes: int, side: int, features: int | None = None) -> nn.Module:
    """Build a network for `classes` outputs and images of side x side pixels.

    Input (N, 3, side, side) float32, output (N, classes) logits; with `features`, a linear layer from (N, features).
    Raises InputError if the library does not have the network, it does not accept this image size, or it is not a
    classifier.
    """
    if settings.classes is not None and settings.classes < classes:
        raise InputError(
            f"model.classes={settings.classes}, but the data has {plural(classes, 'class')}: set it to {classes} or "
            "null"
        )
    outputs = settings.classes or classes
    if features is not None:
        model: nn.Module = Linear(outputs, side, features)
    elif settings.name in OWN_NETWORKS:
        model = OWN_NETWORKS[settings.name](outputs, side)
    elif settings.name == "alexnet-bn":
        model = alexnet_bn(import_torchvision("models").alexnet, outputs)
    else:
        library, _, network = settings.name.rpartition(":")
        with _size_accepted(settings.name, side):
            model = build_of_library(library or "torchvision", network, outputs, side)
    if settings.name in RESNETS:
        _shape_blocks(model, settings)
    for layer in batchnorms(model):
        layer.momentum = 1 - settings.bn_decay
    if settings.bn_stats != "local" or settings.bn_ghost_batch is not None:
        for layer in batchnorms(model):
            layer.__class__ = BATCHNORMS[settings.bn_stats]
            if isinstance(layer, GhostBatchNorm2d):
                layer.ghost_batch = settings.bn_ghost_batch or 0
    if settings.freeze_to is not None:
        freeze(model, settings.freeze_to)
    if features is None:
        _check_forward(model, settings.name, outputs, side)
    return model


@contextmanager
def _size_accepted(name: str, side: int) -> Iterator[None]:
    """Raise InputError in place of the errors of networks for images of an unsuitable size."""
    try:
        yield
    except NotImplementedError:  # of torch's meta device, on which networks are traced
        raise
    except (RuntimeError, AssertionError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"data.crop={side}: {name} does not accept images of {side} x {side} pixels ({why})") from None


def _check_forward(model: nn.Module, name: str, outputs: int, side: int) -> None:
    """Run one image through the network, to detect an unsuitable size before the first training step."""
    model.eval()
    with _size_accepted(name, side), torch.inference_mode():
        logits = model(torch.zeros(1, 3, side, side))
    model.train()
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, outputs):
        raise InputError(f"model.name={name} does not return {outputs} logits per image: choose a classifier")


def inputs_note(network: nn.Module, name: str, crop: int, mean: Sequence[float], std: Sequence[float]) -> str | None:
    """Return a line with the settings of the images that timm trained a network with, None if they are the given crop,
    mean and std."""
    trained: Any = getattr(network, "pretrained_cfg", None)
    if not name.startswith(TIMM) or not trained:
        return None
    ours = {"crop": crop, "mean": mean, "std": std}
    theirs = {"crop": trained["input_size"][-1], "mean": tuple(trained["mean"]), "std": tuple(trained["std"])}
    differing = [f"data.{key}={str(value).translate(BRACKETS)}" for key, value in theirs.items() if ours[key] != value]
    return f"{name} was trained by timm with {' '.join(differing)}" if differing else None


def _shape_blocks(model: nn.Module, settings: ModelSettings) -> None:
    """Set the strides and the initial gamma of the blocks of a torchvision ResNet."""
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        blocks = list(stage.children())  # type: ignore[union-attr]
        first = blocks[0]
        if settings.resnet_version == "v1":
            first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride
        zeroed = {"none": [], "last_of_stage": blocks[-1:]}.get(settings.zeroed_gamma, blocks)
        for block in zeroed:
            nn.init.zeros_((block.bn3 if hasattr(block, "bn3") else block.bn2).weight)
