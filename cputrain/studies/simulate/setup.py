"""A recipe's layers and setup under a plan, and the measured training rates that predictions start from."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.records import TRAINING, Record, Records
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.wording import join_or
from cputrain.measurements import new_record
from cputrain.predict.collectives import Link
from cputrain.predict.host import setup_of_plan
from cputrain.predict.layers import NOT_MEASURED, Layer, keep_network, layer_of, read_network
from cputrain.predict.step_time import Setup, Work
from cputrain.recipe.derivation import largest_local_batch, passes_per_step
from cputrain.recipe.schema import OWN_NETWORKS, TIMM, Recipe
from cputrain.recipe.workload import layer_sizes, workload_of


def layers_of(recipe: Recipe) -> tuple[Layer, ...]:
    """Return the layers of a recipe's network. Raises InputError if the network's sizes are unknown."""
    sizes = layer_sizes(recipe)
    if sizes is None:
        known = join_or(OWN_NETWORKS)
        raise InputError(
            f"simulate does not know the layers of model.name={recipe.model.name}; set model.name to {known}, or to "
            "another classifier of torchvision or timm"
        )
    return tuple(layer_of(size, first=number == 0) for number, size in enumerate(sizes))


def trace_unknown(recipe: Recipe) -> None:
    """Trace the network of a recipe if it is timm's and has no file of sizes, at the recipe's crop.

    Imports torch and timm. Raises InputError if timm does not have the network or it does not accept this crop.
    """
    name = recipe.model.name
    if name.startswith(TIMM) and read_network(name) is None:
        from cputrain.models.tracing import table_of  # torch, which other networks do not need here

        keep_network(name, table_of(name, recipe.data.crop))


Seconds = Annotated[float, Meta(gt=0, lt=1e6)]  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer of a worker in one step, forward and backward; `weights` is the number of its weights.

    Includes the layers without weights that follow it in the forward pass.
    """

    weights: int
    forward: Seconds
    backward: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Training rate of one host (images/s: median, slowest and fastest step) and the plan that it was measured with.

    `layers` are the layers with weights, in the order of the forward pass; empty if they were not timed.
    """

    network: str
    crop: int
    precision: str
    optimizer: str
    local_batch: int
    workers: int
    threads: int
    comm_cores: int
    loader_cores: int
    backend: str
    images_per_s: Annotated[float, Meta(gt=0)]
    low: float
    high: float
    layers: tuple[LayerSeconds, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraining:
    """A training rate and its source."""

    rate: Measurement
    source: str


def training_record(machine: Machine, measured: Measurement, *, command: str) -> Record:
    """Create the record of a training rate."""
    name = f"{measured.network} at {measured.crop}, {measured.precision}"
    return new_record(machine, TRAINING, name, asdict(measured), command=command)


def find(records: Records, recipe: Recipe) -> MeasuredTraining | None:
    """Return the best rate to predict a recipe from: same precision, preferably the same network and image size."""
    found = [(_rate_of(record), record) for record in records.of(TRAINING)]
    fitting = [(rate, record) for rate, record in found if rate is not None and rate.precision == recipe.precision]
    if not fitting:
        return None
    model, crop = recipe.model.name, recipe.data.crop
    rate, record = max(fitting, key=lambda each: (each[0].network == model, each[0].crop == crop, each[1].date))
    what = f"{rate.network} at {rate.crop}"
    return MeasuredTraining(rate=rate, source=f"{what}, measured on {record.date} with {', '.join(record.versions)}")


def unreadable(records: Records) -> list[str]:
    """Return a line for each training rate that is ignored because its fields differ from this version's."""
    others = [record for record in records.of(TRAINING) if _rate_of(record) is None]
    return [
        f"the measurement of `{record.command}` on {record.date} is ignored (its fields have changed); run it again"
        for record in others
    ]


def _rate_of(record: Record) -> Measurement | None:
    """Parse the rate in a record; None if its fields differ from this version's."""
    if record.values.keys() != {field.name for field in fields(Measurement)}:
        return None
    try:
        return msgspec.convert(record.values, Measurement)
    except msgspec.ValidationError:
        return None


def setup_of(recipe: Recipe, plan: Plan, link: Link | None, algorithm: str | None = None) -> Setup:
    """Return the setup of a recipe's training under a plan, on the number of hosts that the plan was made for."""
    ranks = plan.request.nodes * len(plan.workers)
    planned = setup_of_plan(replace(plan, request=replace(plan.request, workload=workload_of(recipe))))
    return replace(
        planned,
        layers=layers_of(recipe),
        local_batch=largest_local_batch(recipe.batch, ranks),
        accumulation=passes_per_step(recipe.batch, ranks),
        algorithm=algorithm or planned.algorithm,
        link=link if plan.request.nodes > 1 else None,
        decoded_per_core_s=None if recipe.data.generated else planned.decoded_per_core_s,
    )


def set_slowness(layers: tuple[Layer, ...], work: Work, measured: Sequence[LayerSeconds]) -> tuple[Layer, ...]:
    """Set each layer's slowness so that layers have their measured shares of the total time of the model, `work`.

    Steps are slower while layers are timed, so only the ratios of the measured times count. Layers without weights get
    the slowness of the layer before them. Returns the layers unchanged if the measured network is a different one.
    """
    weighted = [i for i, layer in enumerate(layers) if layer.weights]
    if [sum(layers[i].weights) for i in weighted] != [each.weights for each in measured]:
        return layers
    predicted_s = sum(work.forward_s) + sum(work.backward_s)
    scale = predicted_s / sum(each.forward + each.backward for each in measured)
    found = list(layers)
    for (start, end), each in zip(pairwise([*weighted, len(layers)]), measured, strict=True):
        slowness = (
            scale * each.forward / sum(work.forward_s[start:end]),
            scale * each.backward / sum(work.backward_s[start:end]),
        )
        found[start:end] = [replace(layer, slowness=slowness) for layer in layers[start:end]]
    return tuple(found)


def reuse_slowness(layers: tuple[Layer, ...], measured: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the measured layers if they are the same layers, otherwise the layers unchanged."""
    plain = tuple(replace(layer, slowness=NOT_MEASURED) for layer in measured)
    return measured if plain == layers else layers
