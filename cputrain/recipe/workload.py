"""A recipe's training as the planner and the cost model know it: layers, operations, memory and optimizer state."""

from dataclasses import replace

from cputrain.affinity.planner.workload import IMAGE_PIXELS, RESNET50, Workload
from cputrain.data.settings import LINE
from cputrain.optim_settings import TAKE_NORMS
from cputrain.predict.layers import CLASSES, LayerSize, early_strides, gflop_of, layers_at, read_network
from cputrain.recipe.schema import Recipe

SIDE = 224  # image side of all traced networks
BF16_KEPT = 0.55  # memory of activations with bf16 relative to float32; 0.51 to 0.59, depending on the network


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
        optimizer_copies=recipe.optim.state_copies + (recipe.ema_decay is not None),
        precision=recipe.precision,
        norms=recipe.optim.name in TAKE_NORMS,
        backend="gloo" if recipe.comm.backend == "gloo" else "ccl",
        compression=recipe.comm.compression,
        bucket_mib=None if recipe.comm.bucket_mib == "auto" else recipe.comm.bucket_mib,
    )
