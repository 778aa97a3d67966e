"""A network's layers, the measured times of this host, and the host that is simulated.

Tests compare the tables of layers with torch's own networks.
"""

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
from cputrain.models.sizes import COPIES, workload_of
from cputrain.mpi.fabric import FABRICS
from cputrain.recipe.derivation import largest_local_batch, passes_per_step
from cputrain.recipe.schema import LINE, Recipe
from cputrain.simulate.assumptions import Link

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
