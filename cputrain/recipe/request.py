"""What a recipe asks of the planner and the cost model, the recipe of an evaluation or a measurement, and advice after
a shortage of memory."""

from dataclasses import replace

from cputrain.affinity.planner.memory import USABLE
from cputrain.affinity.planner.request import RECIPE_OPTIONS, Request
from cputrain.affinity.planner.workload import IMAGE_PIXELS, RESNET50, Workload, largest_batch
from cputrain.data.settings import LINE, DataSettings
from cputrain.models.settings import ModelSettings
from cputrain.mpi.supervise.processes import OutOfMemory
from cputrain.optim_settings import TAKE_NORMS
from cputrain.predict.layers import CLASSES, LayerSize, early_strides, gflop_of, layers_at, read_network
from cputrain.recipe.derivation import images_per_step, largest_local_batch
from cputrain.recipe.schema import BatchSection, EvaluateSection, Recipe, SweepSection

SIDE = 224  # image side of all traced networks
BF16_KEPT = 0.55  # memory of activations with bf16 relative to float32; 0.51 to 0.59, depending on the network


def request_of(recipe: Recipe, images: int | None = None) -> Request:
    """Return a recipe's request for the planner on one host, with its number of training images if known."""
    fields = {
        option.name: option.requested(getattr(recipe.plan, option.name))
        for option in RECIPE_OPTIONS
        if option.name in Request.__slots__
    }
    return Request(
        **fields,
        local_batch=recipe.batch.local,
        global_batch=recipe.batch.global_,
        accumulation=recipe.batch.accumulation,
        most_workers=_most_workers(recipe.batch, recipe.data, images),
        workload=workload_of(recipe),
    )


def _most_workers(batch: BatchSection, data: DataSettings, images: int | None) -> int | None:
    """Return the most workers that each get an image in every step and an epoch a full step; None if unlimited."""
    if batch.global_ is not None:
        return batch.global_
    epoch = data.images_per_epoch or images or data.train_images
    return None if epoch is None else max(1, epoch // (batch.local * batch.accumulation))


def layer_sizes(model: ModelSettings, data: DataSettings) -> tuple[LayerSize, ...] | None:
    """Return the layers of a network at the crop of its images; None if the network was not traced."""
    if data.path == LINE:
        return (LayerSize(name="fc", kind="linear", weights=(1, 1), inputs=1, outputs=1, flop=(2, 2)),)
    network = read_network(model.name)
    if network is None:
        return None
    layers = layers_at(network, data.crop, model.classes or CLASSES)
    return early_strides(layers) if model.resnet_version == "v1" else layers


def workload_of(recipe: Recipe) -> Workload:
    """Return the computation of one worker under a recipe; activations grow with the area of the crop.

    A network that was not traced is assumed to have ResNet-50's size, as stated in the workload's name.
    """
    name, side = recipe.model.name, 1 if recipe.data.path == LINE else recipe.data.crop
    layers, network = layer_sizes(recipe.model, recipe.data), read_network(name)
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
    kept = workload.activation_bytes * (BF16_KEPT if recipe.planned_precision == "bf16" else 1.0)
    return replace(
        workload,
        activation_bytes=round(kept),
        decoder="Pillow" if recipe.data.decoder == "pillow" else "libjpeg-turbo",
        # Images of other data sets are assumed to have ImageNet's ratio of image to crop size.
        image_pixels=max(1, round(IMAGE_PIXELS * (side / SIDE) ** 2)),
        optimizer_copies=recipe.optim.state_copies + (recipe.ema_decay is not None),
        precision=recipe.planned_precision,
        norms=recipe.optim.name in TAKE_NORMS,
        backend="gloo" if recipe.comm.backend == "gloo" else "ccl",
        compression=recipe.comm.compression,
        bucket_mib=None if recipe.comm.bucket_mib == "auto" else recipe.comm.bucket_mib,
    )


def for_evaluation(recipe: Recipe) -> Recipe:
    """Adapt a recipe to an evaluation, whose images need not fill a global batch or come in blocks."""
    changes: dict[str, object] = {
        "batch": BatchSection(local=1),
        "evaluate": recipe.evaluate.model_copy(update={"batch": recipe.evaluate.batch or recipe.batch.local}),
        "data": recipe.data.model_copy(update={"images_per_epoch": None, "last_batch": "drop", "block_mib": 0.0}),
        "plan": recipe.plan.model_copy(update={"balance": "equal"}),
    }
    if recipe.engine == "ipex":  # only affects training steps, and may not be installed where runs are evaluated
        changes["engine"] = "auto"
    return recipe.model_copy(update=changes)


def for_measurement(recipe: Recipe) -> Recipe:
    """Return the recipe without evaluation, sweep and weight averaging, so that only steps take time, in the precision
    that it is planned for."""
    without = {"evaluate": EvaluateSection(), "sweep": SweepSection(), "ema_decay": None}
    return recipe.as_planned().model_copy(update=without)


def remedy(recipe: Recipe, *, ppn: int, nodes: int, shortage: OutOfMemory, workers: str = "plan.ppn=") -> str:
    """Advise a local batch that fits by the planner's estimate, with the same global batch; if the current one should
    have fitted, half of it. Also name the command that measures the largest. `ppn` workers ran on each of `nodes`
    hosts; `workers` is the option that sets their number.
    """
    batch = largest_local_batch(recipe.batch, ppn * nodes)
    measure = f"cputrain sweep {recipe.name} --find-batch measures the largest that trains"
    fits = largest_batch(workload_of(recipe), int(USABLE * shortage.limit_bytes / ppn))
    smaller = fits if fits < batch else batch // 2
    if smaller < 1:
        return f"use fewer workers ({workers}{max(1, ppn // 2)}), or a smaller data.crop"
    same = images_per_step(recipe.batch, ppn * nodes)
    return f"set batch.local={smaller} batch.global={same}, which keeps the global batch: {measure}"
