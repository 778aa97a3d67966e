"""The shipped networks layer by layer: weights, operations and bytes of activations, in the order of the forward pass.

Tests compare the tables with torch's own networks.
"""

from dataclasses import dataclass

from affinity.errors import InputError
from affinity.wording import either
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.data import LINE

BYTES = 4  # float32
BLOCKS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
NETWORKS = (*BLOCKS, "alexnet", "alexnet-bn", "lenet", "mnist-cnn", "linear")
ALEXNET = ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False))
ALEXNET_LAST = (256, 3, 1, 1, True)  # channels, kernel, stride, padding, whether a pooling layer follows
# Times that a layer's tensor is read or written, forward and backward. Batch-norm reads its input for the statistics
# and again to normalize; its backward pass reads input and gradient twice. ReLU is in place; a sum adds two tensors.
NORM_PASSES, RELU_PASSES, SUM_PASSES = (3, 5), (2, 3), (3, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer: values of each weight tensor, in the order of registration; the rest is per image.

    `flop` are those of the forward and of the backward pass, `moved_bytes` the float32 activations read and written.
    `reordered`: oneDNN copies the weights into another layout in each pass. `slowness`: how much longer the passes take
    than the model says, as far as they were measured.
    """

    name: str
    weights: tuple[int, ...] = ()
    flop: tuple[float, float] = (0.0, 0.0)
    moved_bytes: tuple[float, float]
    reordered: bool = False
    slowness: tuple[float, float] = (1.0, 1.0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in float32, and of their gradients."""
        return BYTES * sum(self.weights)


def layers_of(recipe: Recipe, classes: int = 1000) -> tuple[Layer, ...]:
    """The layers of a recipe's network. Raises InputError for a network of torchvision without a table here."""
    name, side = recipe.model.name, recipe.data.crop
    classes = recipe.model.classes or classes
    if recipe.data.path == LINE:
        return (_linear("fc", 1, 1, first=True),)
    if name in BLOCKS:
        return _resnet(name, side, classes, early_stride=recipe.model.resnet_version == "v1")
    if name in ("alexnet", "alexnet-bn"):
        return _alexnet(side, classes, norms=name == "alexnet-bn")
    if name == "lenet":
        half = (side - 4) // 2
        flat = 50 * ((half - 4) // 2) ** 2
        return (
            _conv("conv1", 3, 20, 5, side, side - 4, bias=True, first=True),
            _conv("conv2", 20, 50, 5, half, half - 4, bias=True),
            _linear("fc1", flat, 500),
            _linear("fc", 500, classes),
        )
    if name == "mnist-cnn":
        return (
            _conv("conv1", 3, 32, 5, side, side, bias=True, first=True),
            _conv("conv2", 32, 64, 5, side // 2, side // 2, bias=True),
            _linear("fc1", 64 * (side // 4) ** 2, 1024),
            _linear("fc", 1024, classes),
        )
    if name == "linear":
        return (_linear("fc", 3 * side**2, classes, first=True),)
    raise InputError(f"model.name={name}: its layers are not known to simulate: set model.name to {either(NETWORKS)}")


def _conv(
    name: str,
    inputs: int,
    outputs: int,
    kernel: int,
    before: int,
    after: int,
    *,
    bias: bool = False,
    first: bool = False,
) -> Layer:
    """A convolution from maps of before x before to after x after; the first layer has no gradient of its input."""
    weights = kernel * kernel * inputs * outputs
    forward = 2.0 * weights * after * after
    moved = float(BYTES * (inputs * before * before + outputs * after * after))
    return Layer(
        name=name,
        weights=(weights, outputs) if bias else (weights,),
        flop=(forward, forward if first else 2 * forward),
        moved_bytes=(moved, moved if first else 2 * moved),
        reordered=True,
    )


def _linear(name: str, inputs: int, outputs: int, *, first: bool = False) -> Layer:
    forward, moved = 2.0 * inputs * outputs, float(BYTES * (inputs + outputs))
    return Layer(
        name=name,
        weights=(inputs * outputs, outputs),
        flop=(forward, forward if first else 2 * forward),
        moved_bytes=(moved, moved if first else 2 * moved),
    )


def _norm(name: str, channels: int, side: int, *, relu: bool = True) -> Layer:
    """Batch-norm, with the ReLU after it."""
    tensor = BYTES * channels * side * side
    forward, backward = (norm + relu * extra for norm, extra in zip(NORM_PASSES, RELU_PASSES, strict=True))
    return Layer(
        name=name, weights=(channels, channels), moved_bytes=(float(forward * tensor), float(backward * tensor))
    )


def _passes(name: str, channels: int, side: int, passes: tuple[int, int]) -> Layer:
    tensor = BYTES * channels * side * side
    return Layer(name=name, moved_bytes=(float(passes[0] * tensor), float(passes[1] * tensor)))


def _halved(side: int) -> int:
    return (side + 1) // 2


def _resnet(name: str, side: int, classes: int, *, early_stride: bool) -> tuple[Layer, ...]:
    """A torchvision ResNet; `early_stride`: a bottleneck block halves the image in its first convolution (v1)."""
    bottleneck = name not in ("resnet18", "resnet34")
    after = _halved(side)
    layers = [
        _conv("conv1", 3, 64, 7, side, after, first=True),
        _norm("bn1", 64, after),
        _passes("maxpool", 64, after, (1, 2)),
    ]
    side, channels = _halved(after), 64
    for stage, blocks in enumerate(BLOCKS[name]):
        width = 64 << stage
        for block in range(blocks):
            halves = stage > 0 and block == 0
            made, side, channels = _block(
                f"layer{stage + 1}.{block}",
                (side, channels, width),
                halves=halves,
                bottleneck=bottleneck,
                early_stride=early_stride,
            )
            layers += made
    return (*layers, _linear("fc", channels, classes))


def _block(
    name: str, sizes: tuple[int, int, int], *, halves: bool, bottleneck: bool, early_stride: bool
) -> tuple[list[Layer], int, int]:
    """A residual block's layers, the side of its maps and their channels; `sizes`: side, channels before, width."""
    side, inputs, width = sizes
    after = _halved(side) if halves else side
    outputs = 4 * width if bottleneck else width
    if bottleneck:
        inner = after if early_stride else side
        layers = [
            _conv(f"{name}.conv1", inputs, width, 1, side, inner),
            _norm(f"{name}.bn1", width, inner),
            _conv(f"{name}.conv2", width, width, 3, inner, after),
            _norm(f"{name}.bn2", width, after),
            _conv(f"{name}.conv3", width, outputs, 1, after, after),
            _norm(f"{name}.bn3", outputs, after, relu=False),
        ]
    else:
        layers = [
            _conv(f"{name}.conv1", inputs, width, 3, side, after),
            _norm(f"{name}.bn1", width, after),
            _conv(f"{name}.conv2", width, outputs, 3, after, after),
            _norm(f"{name}.bn2", outputs, after, relu=False),
        ]
    if halves or inputs != outputs:
        layers += [
            _conv(f"{name}.downsample.0", inputs, outputs, 1, side, after),
            _norm(f"{name}.downsample.1", outputs, after, relu=False),
        ]
    sums = tuple(a + b for a, b in zip(SUM_PASSES, RELU_PASSES, strict=True))
    return [*layers, _passes(f"{name}.add", outputs, after, (sums[0], sums[1]))], after, outputs


def _alexnet(side: int, classes: int, *, norms: bool) -> tuple[Layer, ...]:
    layers, channels = [], 3
    for number, (outputs, kernel, stride, padding, pools) in enumerate((*ALEXNET, ALEXNET_LAST), start=1):
        after = (side + 2 * padding - kernel) // stride + 1
        layers.append(_conv(f"conv{number}", channels, outputs, kernel, side, after, bias=True, first=number == 1))
        if norms:
            layers.append(_norm(f"bn{number}", outputs, after))
        else:
            layers.append(_passes(f"relu{number}", outputs, after, RELU_PASSES))
        if pools:
            layers.append(_passes(f"pool{number}", outputs, after, (1, 2)))
        side, channels = (after - 3) // 2 + 1 if pools else after, outputs
    return (*layers, _linear("fc6", 256 * 36, 4096), _linear("fc7", 4096, 4096), _linear("fc8", 4096, classes))
