"""The measured training rates that predictions start from, and the slowness of each layer in them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from cputrain.affinity.planner.records import TRAINING, Record, Records
from cputrain.affinity.topology.machine import Machine
from cputrain.measurements import new_record
from cputrain.models.settings import TIMM
from cputrain.predict.layers import NOT_MEASURED, Layer, keep_network, read_network
from cputrain.predict.step_time import Work

Seconds = Annotated[float, Meta(gt=0, lt=1e6)]  # of a layer


def trace_unknown(name: str, crop: int) -> None:
    """Trace a network if it is timm's and has no file of sizes, at this crop.

    Imports torch and timm. Raises InputError if timm does not have the network or it does not accept the crop.
    """
    if name.startswith(TIMM) and read_network(name) is None:
        from cputrain.models.tracing import table_of  # torch, which other networks do not need here

        keep_network(name, table_of(name, crop))


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


def find_measured_rate(records: Records, precision: str, network: str, crop: int) -> MeasuredTraining | None:
    """Return the best rate to predict a training from: same precision, preferably the same network and image size."""
    rated = [(_rate_of(record), record) for record in records.of(TRAINING)]
    fitting = [(rate, record) for rate, record in rated if rate is not None and rate.precision == precision]
    if not fitting:
        return None
    rate, record = max(fitting, key=lambda pair: (pair[0].network == network, pair[0].crop == crop, pair[1].date))
    what = f"{rate.network} at {rate.crop}"
    return MeasuredTraining(rate=rate, source=f"{what}, measured on {record.date} with {', '.join(record.versions)}")


def outdated_measurements(records: Records) -> list[str]:
    """Return a line for each training rate that is ignored because its fields differ from this version's."""
    outdated = [record for record in records.of(TRAINING) if _rate_of(record) is None]
    return [
        f"the measurement of `{record.command}` on {record.date} is ignored (its fields have changed); run it again"
        for record in outdated
    ]


def _rate_of(record: Record) -> Measurement | None:
    """Parse the rate in a record; None if its fields differ from this version's."""
    if record.values.keys() != {field.name for field in fields(Measurement)}:
        return None
    try:
        return msgspec.convert(record.values, Measurement)
    except msgspec.ValidationError:
        return None


def set_slowness(layers: tuple[Layer, ...], work: Work, measured: Sequence[LayerSeconds]) -> tuple[Layer, ...]:
    """Set each layer's slowness so that layers have their measured shares of the total time of the model, `work`.

    Steps are slower while layers are timed, so only the ratios of the measured times count. Layers without weights get
    the slowness of the layer before them. Returns the layers unchanged if the measured network is a different one.
    """
    weighted = [i for i, layer in enumerate(layers) if layer.weights]
    if [sum(layers[i].weights) for i in weighted] != [times.weights for times in measured]:
        return layers
    predicted_s = sum(work.forward_s) + sum(work.backward_s)
    scale = predicted_s / sum(times.forward + times.backward for times in measured)
    slowed = list(layers)
    for (start, end), times in zip(pairwise([*weighted, len(layers)]), measured, strict=True):
        slowness = (
            scale * times.forward / sum(work.forward_s[start:end]),
            scale * times.backward / sum(work.backward_s[start:end]),
        )
        slowed[start:end] = [replace(layer, slowness=slowness) for layer in layers[start:end]]
    return tuple(slowed)


def reuse_slowness(layers: tuple[Layer, ...], measured: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return the measured layers if they are the same layers, otherwise the layers unchanged."""
    plain = tuple(replace(layer, slowness=NOT_MEASURED) for layer in measured)
    return measured if plain == layers else layers
