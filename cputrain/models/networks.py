"""Networks of recipes: our own and other libraries', batch-norm variants, frozen layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import plural
from cputrain.models.vision import build_of_library, import_torchvision
from cputrain.recipe.schema import RESNETS, TIMM, DataSection, ModelSection

DROPOUT = 0.5


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


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Batch-norm over ghost batches (Hoffer et al. 2017, arXiv:1705.08741): in training, the batch is split into parts
    of at most `ghost_batch` images, each normalized separately.

    The running statistics are updated with the mean over the ghost batches.
    """

    ghost_batch: int

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        if not self.training or len(input) <= self.ghost_batch:
            return super().forward(input)
        ghosts = torch.tensor_split(input, -(-len(input) // self.ghost_batch))
        assert self.running_mean is not None
        statistics = self.running_mean.new_zeros(len(ghosts), 2, self.num_features)
        normalized = [
            # with momentum 1 the buffers become the statistics of this ghost batch
            functional.batch_norm(
                ghost, own[0], own[1], self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
            )
            for ghost, own in zip(ghosts, statistics, strict=True)
        ]
        update_running_stats(self, *statistics.mean(0))
        return torch.cat(normalized)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Batch-norm with the statistics over all ranks in training; torch's SyncBatchNorm does not run on CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W). N may differ between ranks."""
        if not self.training:
            return super().forward(input)
        apply: Any = _Normalize.apply
        normalized, mean, variance, count = apply(input, self.weight, self.bias, self.eps)
        update_running_stats(self, mean, variance * count / (count - 1))
        return cast(Tensor, normalized)


class RunningBatchNorm2d(nn.BatchNorm2d):
    """Batch-norm with the running statistics also in training, without updating them."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )


@torch.no_grad()
def update_running_stats(layer: nn.BatchNorm2d, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics with a step's mean and (unbiased) variance, as BatchNorm2d does."""
    assert layer.running_mean is not None and layer.running_var is not None and layer.momentum is not None
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), layer.momentum)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), layer.momentum)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)


def over_all_ranks(statistics: Tensor, count: float) -> float:
    """Replace mean and variance (2, C) of this rank's `count` values by all ranks' and return their number."""
    mean, variance = statistics
    packed = torch.cat([count * mean, count * (variance + mean.square()), mean.new_tensor([count])])
    dist.all_reduce(packed)
    total = float(packed[-1])
    mean_of_all, square = packed[:-1].view(2, -1) / total
    statistics[0] = mean_of_all
    statistics[1] = (square - mean_of_all.square()).clamp_(min=0)
    return total


class _Normalize(torch.autograd.Function):
    """Batch normalization (Ioffe and Szegedy 2015, arXiv:1502.03167) over all ranks, with two all-reduces per layer."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Any, ...]:
        own = images.numel() // images.shape[1]
        # in float64: the mean of squares minus the square of the mean is a small difference of large numbers
        own_variance, own_mean = torch.var_mean(images, (0, 2, 3), correction=0)
        statistics = torch.stack([own_mean, own_variance]).double()
        count = over_all_ranks(statistics, own)
        mean, variance = statistics
        scale = (variance + eps).rsqrt()
        narrow = [value.to(weight.dtype) for value in (mean, scale)]
        ctx.save_for_backward(images, weight, *narrow)
        ctx.count = count
        normalized = functional.batch_norm(
            images, narrow[0], variance.to(weight.dtype), weight, bias, training=False, eps=eps
        )
        ctx.mark_non_differentiable(mean, variance)
        return normalized, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dL/dx = scale w (g - mean(g) - xhat mean(g xhat)), g = dL/dy, with means over all ranks."""
        images, weight, mean, scale = ctx.saved_tensors
        gradient = gradients[0]

        def by_channel(values: Tensor) -> Tensor:
            return values.view(1, -1, 1, 1)

        centered = images - by_channel(mean)
        own_bias, own_weight = gradient.sum((0, 2, 3)), (gradient * centered).sum((0, 2, 3))
        # Of the same size and dtype as the native layer's, which another rank may use for its images.
        sums = torch.cat([own_bias, own_weight]).double()
        dist.all_reduce(sums)
        mean_g, mean_gx = (sums / ctx.count).to(scale.dtype).view(2, -1)
        input_gradient = gradient - by_channel(mean_g) - centered * by_channel(scale.square() * mean_gx)
        return input_gradient * by_channel(scale * weight), own_weight * scale, own_bias, None


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
BATCHNORMS = {"local": GhostBatchNorm2d, "sync": SyncBatchNorm2d, "running": RunningBatchNorm2d}


def build_model(section: ModelSection, classes: int, side: int, features: int | None = None) -> nn.Module:
    """Build a recipe's network for `classes` outputs and images of side x side pixels.

    Input (N, 3, side, side) float32, output (N, classes) logits; with `features`, a linear layer from (N, features).
    Raises InputError if the library does not have the network, it does not accept this image size, or it is not a
    classifier.
    """
    if section.classes is not None and section.classes < classes:
        raise InputError(
            f"model.classes={section.classes}, but the data has {plural(classes, 'class')}: set it to {classes} or null"
        )
    outputs = section.classes or classes
    if features is not None:
        model: nn.Module = Linear(outputs, side, features)
    elif section.name in OWN_NETWORKS:
        model = OWN_NETWORKS[section.name](outputs, side)
    elif section.name == "alexnet-bn":
        model = alexnet_bn(import_torchvision("models").alexnet, outputs)
    else:
        library, _, network = section.name.rpartition(":")
        with _size_accepted(section.name, side):
            model = build_of_library(library or "torchvision", network, outputs, side)
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


BRACKETS = str.maketrans("()", "[]", " ")


def inputs_note(network: nn.Module, name: str, data: DataSection) -> str | None:
    """Return a line with the settings of the images that timm trained a network with, None if `data` has the same."""
    trained: Any = getattr(network, "pretrained_cfg", None)
    if not name.startswith(TIMM) or not trained:
        return None
    theirs = {"crop": trained["input_size"][-1], "mean": tuple(trained["mean"]), "std": tuple(trained["std"])}
    differing = [
        f"data.{key}={str(value).translate(BRACKETS)}" for key, value in theirs.items() if getattr(data, key) != value
    ]
    return f"{name} was trained by timm with {' '.join(differing)}" if differing else None


def _shape_blocks(model: nn.Module, section: ModelSection) -> None:
    """Set the strides and the initial gamma of the blocks of a torchvision ResNet."""
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        blocks = list(stage.children())  # type: ignore[union-attr]
        first = blocks[0]
        if section.resnet_version == "v1":
            first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride
        zeroed = {"none": [], "last_of_stage": blocks[-1:]}.get(section.zero_gamma, blocks)
        for block in zeroed:
            nn.init.zeros_((block.bn3 if hasattr(block, "bn3") else block.bn2).weight)


def batchnorms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """Return the batch-norm layers, in the model's order."""
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
