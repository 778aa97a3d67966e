"""A recipe's training as the planner and the cost model know it: layers, operations, memory and optimizer state."""

from dataclasses import replace

from cputrain.affinity.planner.workload import IMAGE_PIXELS, RESNET50, Workload
from cputrain.predict.layers import CLASSES, LayerSize, early_strides, gflop_of, layers_at, read_network
from cputrain.recipe.schema import LINE, OptimSection, Recipe

SIDE = 224  # image side of all traced networks
BF16_KEPT = 0.55  # memory of activations with bf16 relative to float32; 0.51 to 0.59, depending on the network
# Tensors of the weights' size in an optimizer's state, with default options.
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
TAKE_NORMS = ("lars", "lamb")  # optimizers that read weights and gradients once more, for their norms


def layer_sizes(recipe: Recipe) -> tuple[LayerSize, ...] | None:
    """Return the layers of a recipe's network at its crop; None if the network was not traced."""
    if recipe.data.path == LINE:
        return (LayerSize(name="fc", kind="linear", weights=(1, 1), inputs=1, outputs=1, flop=(2, 2)),)
    network = read_network(recipe.model.name)
    if network is None:
        return None
    layers = layers_at(network, recipe.data.crop, recipe.model.classes or CLASSES)
    return early_strides(layers) if recipe.model.resnet_version == "v1" else layers


def workload_of(recipe: Recipe) -> Workload:
    """Return the computation of one worker under a recipe; activations grow with the area of the crop.

    A network that was not traced is assumed to have ResNet-50's size, as stated in the workload's name.
    """
    name, side = recipe.model.name, 1 if recipe.data.path == LINE else recipe.data.crop
    layers, network = layer_sizes(recipe), read_network(name)
    workload = replace(RESNET50, name=f"{name} at {side} x {side}, size assumed as ResNet-50's", network="", side=side)
    if layers is not None and network is not None:
        workload = Workload(
            name=f"{name} at {side} x {side}",
            network=name,
            side=side,
            parameters=sum(sum(layer.weights) for layer in layers),
            gflop=gflop_of(layers),
            activation_bytes=round(network["activation_bytes"] * (side / network["side"]) ** 2),
        )
    kept = workload.activation_bytes * (BF16_KEPT if recipe.precision == "bf16" else 1.0)
    return replace(
        workload,
        activation_bytes=round(kept),
        decoder="Pillow" if recipe.data.decoder == "pillow" else "libjpeg-turbo",
        # Images of other data sets are assumed to have ImageNet's ratio of image to crop size.
        image_pixels=max(1, round(IMAGE_PIXELS * (side / SIDE) ** 2)),
        optimizer_copies=state_copies(recipe.optim) + (recipe.ema_decay is not None),
        precision=recipe.precision,
        norms=recipe.optim.name in TAKE_NORMS,
        backend="gloo" if recipe.comm.backend == "gloo" else "ccl",
        compression=recipe.comm.compression,
        bucket_mib=None if recipe.comm.bucket_mib == "auto" else recipe.comm.bucket_mib,
    )


def state_copies(optim: OptimSection) -> int:
    """Return the number of tensors of the weights' size in an optimizer's state."""
    if optim.name == "momentum" and optim.momentum == 0:
        return 0
    return COPIES[optim.name] + (optim.name == "rmsprop" and optim.momentum > 0)
