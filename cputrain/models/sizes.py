"""Sizes of the networks, for plans and predictions without torch. Tests measure each one on the real network."""

from dataclasses import dataclass, replace

from cputrain.affinity.planner.request import IMAGE_PIXELS, RESNET50, Workload
from cputrain.recipe.schema import LINE, OptimSection, Recipe

SIDE, CLASSES = 224, 1000  # of the sizes below
BF16_KEPT = 0.55  # bytes kept for the backward pass with bf16, over float32's: 0.51 to 0.59, by network


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSize:
    """A network's parameters with 1000 classes, and the input features of its last layer.

    Per image of 224 x 224: the GFLOP of forward and backward pass, and the bytes kept for the backward pass in float32,
    by torch's operators and by native kernels alike.
    """

    parameters: int
    features: int
    gflop: float
    activation_bytes: int


SIZES = {
    "resnet18": NetworkSize(parameters=11_689_512, features=512, gflop=10.65, activation_bytes=22_200_000),
    "resnet34": NetworkSize(parameters=21_797_672, features=512, gflop=21.75, activation_bytes=32_300_000),
    "resnet50": NetworkSize(parameters=25_557_032, features=2048, gflop=24.30, activation_bytes=86_100_000),
    "resnet101": NetworkSize(parameters=44_549_160, features=2048, gflop=46.57, activation_bytes=127_300_000),
    "resnet152": NetworkSize(parameters=60_192_808, features=2048, gflop=68.85, activation_bytes=178_000_000),
    "alexnet": NetworkSize(parameters=61_100_840, features=4096, gflop=4.14, activation_bytes=3_740_000),
    "alexnet-bn": NetworkSize(parameters=61_103_144, features=4096, gflop=4.14, activation_bytes=5_690_000),
}
# Tensors of the weights' size that an optimizer keeps.
COPIES = {
    "sgd": 0,
    "momentum": 1,
    "lars": 1,
    "lamb": 2,
    "adam": 2,
    "adamw": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "adadelta": 2,
    "adagrad_da": 3,
}


def workload_of(recipe: Recipe, classes: int = CLASSES) -> Workload:
    """The computation of one worker under a recipe; FLOPs and activations grow with the area of the crop.

    A torchvision network without a size above counts as ResNet-50, and the workload's name says so.
    """
    name, side = recipe.model.name, recipe.data.crop
    classes = recipe.model.classes or classes
    if recipe.data.path == LINE:
        side, classes = 1, 1
    network = _network(name, side, classes)
    kept = network.activation_bytes * (BF16_KEPT if recipe.precision == "bf16" else 1.0)
    return replace(
        network,
        activation_bytes=round(kept),
        decoder="Pillow" if recipe.data.decoder == "pillow" else "libjpeg-turbo",
        # Images of other data sets are assumed to be as much larger than their crops as ImageNet's.
        image_pixels=max(1, round(IMAGE_PIXELS * (side / SIDE) ** 2)),
        optimizer_copies=_copies(recipe.optim) + (recipe.ema_decay is not None),
        precision=recipe.precision,
    )


def _network(name: str, side: int, classes: int) -> Workload:
    size, area = SIZES.get(name), (side / SIDE) ** 2
    label = f"{name} at {side} x {side}"
    if size is not None:
        return Workload(
            name=label,
            parameters=size.parameters + (classes - CLASSES) * (size.features + 1),
            gflop=size.gflop * area,
            activation_bytes=round(size.activation_bytes * area),
        )
    if name == "mnist-cnn":
        flat = 64 * (side // 4) ** 2
        first, second, dense = side**2 * 75 * 32, (side // 2) ** 2 * 800 * 64, flat * 1024 + 1024 * classes
        return Workload(
            name=label,
            parameters=76 * 32 + 801 * 64 + (flat + 1) * 1024 + 1025 * classes,
            gflop=(4 * first + 6 * (second + dense)) / 1e9,  # without the gradients of the images
            activation_bytes=round(364 * side**2),
        )
    if name == "lenet":
        half = (side - 4) // 2
        flat = 50 * ((half - 4) // 2) ** 2
        first, second, dense = (side - 4) ** 2 * 75 * 20, (half - 4) ** 2 * 500 * 50, 500 * (flat + classes)
        return Workload(
            name=label,
            parameters=76 * 20 + 501 * 50 + (flat + 1) * 500 + 501 * classes,
            gflop=(4 * first + 6 * (second + dense)) / 1e9,
            activation_bytes=round(146 * side**2),
        )
    if name == "linear":
        inputs = 3 * side**2
        weights = (inputs + 1) * classes
        return Workload(
            name=label, parameters=weights, gflop=4 * inputs * classes / 1e9, activation_bytes=round(4 * inputs)
        )
    return replace(RESNET50, name=f"{label}, size assumed as ResNet-50's")


def _copies(optim: OptimSection) -> int:
    return COPIES[optim.name] + (optim.name == "rmsprop" and optim.momentum > 0)
