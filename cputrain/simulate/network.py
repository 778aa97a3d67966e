"""A network's layers, the measured times of this host, and the host that is simulated."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import Plan
from cputrain.affinity.planner.records import TRAINING, Record, Records
from cputrain.affinity.planner.request import is_phi
from cputrain.affinity.planner.rules import core_rates
from cputrain.affinity.topology.catalog import processor_facts
from cputrain.affinity.topology.machine import Machine
from cputrain.affinity.wording import either
from cputrain.measurements import new_record
from cputrain.models.sizes import COPIES, LayerSize, layer_sizes, workload_of
from cputrain.mpi.fabric import FABRICS
from cputrain.recipe.derivation import largest_local_batch, passes_per_step
from cputrain.recipe.schema import OWN_NETWORKS, Recipe
from cputrain.simulate.assumptions import Link

BYTES = 4  # float32
# Times that a layer's tensor is read or written, forward and backward. Batch-norm reads its input for the statistics
# and again to normalize; its backward pass reads input and gradient twice. An elementwise function is in place; a sum
# adds two tensors. Convolutions and products read their input and write their output, and twice so backward.
PASSES = {"norm": (3, 5), "act": (2, 3), "add": (3, 3), "copy": (2, 2), "pool": (1, 2)}


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
    """The layers of a recipe's network. Raises InputError for a network that was not traced."""
    sizes = layer_sizes(recipe, classes)
    if sizes is None:
        known = either(OWN_NETWORKS)
        raise InputError(
            f"model.name={recipe.model.name}: its layers are not known to simulate: set model.name to {known}, or to "
            "another classifier of torchvision"
        )
    return tuple(_layer(size, first=number == 0) for number, size in enumerate(sizes))


def _layer(size: LayerSize, *, first: bool) -> Layer:
    """A traced layer with the bytes that it moves; the first one has no gradient of its input."""
    if size.flop[0]:
        forward = backward = float(BYTES * (size.inputs + size.outputs))
        moved = forward, backward if first else 2 * backward
    else:
        tensor = BYTES * (size.inputs if size.kind == "pool" else size.outputs)
        forward, backward = (float(tensor * sum(PASSES[kind][way] for kind in size.kind.split("+"))) for way in (0, 1))
        moved = forward, backward
    forward_flop, backward_flop = size.flop
    return Layer(
        name=size.name,
        weights=size.weights,
        flop=(float(forward_flop), float(backward_flop)),
        moved_bytes=moved,
        reordered=size.kind == "conv",
    )


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


DEFAULT_BUCKETS = 0.0  # DDP's own: the first of 1 MiB, then 25 MiB
# Passes over the weights of an optimizer step: reads of weights, gradients and state, writes of weights and state.
# LARS and LAMB read weights and gradients once more, for their norms.
USUAL_CLOCK_RANGE = 0.33  # 2.1 to 2.8 GHz
PLAIN_PASSES, PASSES_PER_COPY, NORM_READS = 3, 2, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A training on `hosts` x `workers` ranks. Cores are those of one worker; `local_batch` are images of a backward
    pass, of which a step makes `accumulation`.

    `move_bytes_per_s` replaces the assumed speed at which a worker's cores move messages, where it is known. `link` is
    None on one host. `clock_range` is how much faster than their base clock all cores run at most: hosts differ by a
    part of it. `bucket_mib` is None for the size that the trainer finds by itself.
    """

    layers: tuple[Layer, ...]
    hosts: int
    workers: int
    threads: int
    comm_cores: int
    loader_cores: int
    local_batch: int
    accumulation: int = 1
    precision: str = "float32"
    compression: str = "none"
    optimizer_passes: int = 5
    bucket_mib: float | None = None
    backend: str = "ccl"
    algorithm: str = "ring"
    link: Link | None = None
    phi: bool = False
    clock_range: float = 0.0
    decoded_per_core_s: float | None = None
    move_bytes_per_s: float | None = None

    @property
    def ranks(self) -> int:
        """Workers of all hosts."""
        return self.hosts * self.workers

    @property
    def global_batch(self) -> int:
        """Images of a step."""
        return self.ranks * self.local_batch * self.accumulation

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a worker's gradients in float32."""
        return sum(layer.weight_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a host computes: FLOP/s of a core in convolutions and matrix products, and bytes/s of all its memory."""

    core_flops: float
    host_bytes_per_s: float


def setup_of(recipe: Recipe, plan: Plan, link: Link | None, algorithm: str | None = None) -> Setup:
    """A recipe's training under a plan, on as many hosts as the plan was made for."""
    hosts, workers = plan.request.nodes, len(plan.workers)
    rates = core_rates(plan.machine, workload_of(recipe), plan.measured)
    return Setup(
        layers=layers_of(recipe),
        hosts=hosts,
        workers=workers,
        # the worker with the fewest threads decides: every step waits for it
        threads=min(worker.intra_op for worker in plan.workers),
        comm_cores=min(len(_cores(plan, worker.comm_pus)) for worker in plan.workers),
        loader_cores=min(len(_cores(plan, worker.loader_pus)) for worker in plan.workers),
        local_batch=largest_local_batch(recipe.batch, hosts * workers),
        accumulation=passes_per_step(recipe.batch, hosts * workers),
        precision=recipe.precision,
        compression=recipe.comm.compression,
        optimizer_passes=optimizer_passes(recipe.optim.name),
        bucket_mib=None if recipe.comm.bucket_mib == "auto" else recipe.comm.bucket_mib,
        backend="gloo" if recipe.comm.backend == "gloo" else "ccl",
        algorithm=algorithm or usual_algorithm(link if hosts > 1 else None, recipe.comm.backend),
        link=link if hosts > 1 else None,
        phi=is_phi(plan.machine),
        clock_range=clock_range(plan.machine.model),
        decoded_per_core_s=None if recipe.data.generated else rates.decoded_per_s,
    )


def clock_range(model: str) -> float:
    """How much faster than its base clock a processor runs all cores at most: that of a Xeon 8160 where not known."""
    known = processor_facts(model).clock_range
    return USUAL_CLOCK_RANGE if known is None else known


def optimizer_passes(name: str) -> int:
    """Passes over the weights in an update."""
    return PLAIN_PASSES + PASSES_PER_COPY * COPIES[name] + (NORM_READS if name in ("lars", "lamb") else 0)


def usual_algorithm(link: Link | None, backend: str) -> str:
    """The algorithm that the fabric's settings choose for oneCCL; gloo has a ring only."""
    if link is None or backend == "gloo":
        return "ring"
    return next((value for name, value, _ in FABRICS[link.name].settings if name == "CCL_ALLREDUCE"), "ring")


def _cores(plan: Plan, pus: tuple[int, ...]) -> set[int]:
    """The cores of these PUs, by the first PU of each."""
    return {core.pus[0] for core in plan.machine.cores if not set(core.pus).isdisjoint(pus)}
