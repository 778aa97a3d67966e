"""Trainings measured by `cputrain bench model`: one for each network, image size and precision of a machine."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from affinity.planner.records import TRAINING, Record, Records
from affinity.topology.machine import Machine
from cputrain.measurements import new_record
from cputrain.recipe.schema import Recipe

LONGEST_S = 1e6  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of a worker's layer in one step, forward and backward; it has so many values in its weights.

    The layers without weights that follow it in the forward pass count with it.
    """

    weights: int
    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Images/s of one host in training (median, lowest and highest step), and the plan that it was measured with.

    `layers` are those with weights in the order of the forward pass; empty where they were not timed.
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
    images_per_s: float
    low: float
    high: float
    layers: tuple[LayerSeconds, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraining:
    """A training rate and where it is from."""

    rate: Measurement
    source: str


def training_record(machine: Machine, measured: Measurement, *, command: str) -> Record:
    """The record of a training rate."""
    name = f"{measured.network} at {measured.crop}, {measured.precision}"
    return new_record(machine, TRAINING, name, asdict(measured), command=command)


def find(records: Records, recipe: Recipe) -> MeasuredTraining | None:
    """The training rate to predict a recipe from: in its precision, of its own network and image size before others."""
    found = [(_rate_of(record), record) for record in records.of(TRAINING)]
    fitting = [(rate, record) for rate, record in found if rate is not None and rate.precision == recipe.precision]
    if not fitting:
        return None
    model, crop = recipe.model.name, recipe.data.crop
    rate, record = max(fitting, key=lambda each: (each[0].network == model, each[0].crop == crop, each[1].date))
    what = f"{rate.network} at {rate.crop}"
    return MeasuredTraining(rate=rate, source=f"{what}, measured on {record.date} with {', '.join(record.versions)}")


def unreadable(records: Records) -> list[str]:
    """A line about each training rate that is not used because it has other fields than this version's."""
    others = [record for record in records.of(TRAINING) if _rate_of(record) is None]
    return [
        f"what `{record.command}` measured on {record.date} is not used (it has other fields than now): run it again"
        for record in others
    ]


def _rate_of(record: Record) -> Measurement | None:
    """The rate in a record; None where it has other fields."""
    values, layers = dict(record.values), record.values.get("layers")
    if not isinstance(layers, list) or not all(_is_of(LayerSeconds, each) for each in layers):
        return None
    timed = tuple(LayerSeconds(**each) for each in layers)
    values["layers"] = timed
    if not _is_of(Measurement, values) or values["images_per_s"] <= 0:
        return None
    if not all(0 < each.forward < LONGEST_S and 0 < each.backward < LONGEST_S for each in timed):
        return None
    return Measurement(**values)


def _is_of(wanted: type[LayerSeconds | Measurement], values: Any) -> bool:
    """Whether values have the fields of a class, and their types."""
    names = {field.name: field.type for field in fields(wanted)}
    if not isinstance(values, dict) or values.keys() != names.keys():
        return False
    return all(_fits(value, names[key]) for key, value in values.items())


def _fits(value: Any, kind: object) -> bool:
    """Whether a value is of a field's type; a tuple's items are checked elsewhere."""
    if kind is float:
        return type(value) in (int, float)
    return isinstance(value, kind if isinstance(kind, type) else tuple)
