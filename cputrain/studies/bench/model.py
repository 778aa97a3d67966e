"""`cputrain bench model`: training steps of a network in planned ranks, as a report and as a trace."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from cputrain.affinity.planner.records import Record
from cputrain.affinity.planner.request import training_name
from cputrain.affinity.topology.machine import name_cpus
from cputrain.affinity.wording import plural, spread
from cputrain.data.settings import SYNTHETIC
from cputrain.measurements import rate_record, spread_of
from cputrain.studies.bench.figures import Figure, Report, Table, figure_of
from cputrain.studies.simulate.predict import setup_of
from cputrain.studies.simulate.setup import LayerSeconds, Measurement, training_record
from cputrain.training.local import PlannedTraining, call_in_ranks, plan_steps

PARTS = ("data wait", "forward", "backward", "exposed communication", "optimizer", "other")
"""Parts of a step, in order; "other" is the time between them."""

GIGA = 1e9
SHOWN_LAYERS = 12  # slowest ones in the text; JSON has all
FORWARD, BACKWARD = "3 x 3 convolution forward", "3 x 3 convolution backward"
MATRIX = "matrix product"

Ranks = Sequence[dict[str, Any]]
"""Results of each rank: see recorder.measure."""

TRACKS = ("step", "layers", "all-reduce")
MICRO = 1e6  # microseconds in a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a rank measures: the number of warm-up steps, of timed steps and of steps with a record of every layer, and
    the precisions of the kernels that are timed afterwards as the processor's limits."""

    warm_up: int
    steps: int
    profiled: int
    limits: tuple[str, ...]
    quick: bool


def precisions(isa: tuple[str, ...]) -> tuple[str, ...]:
    """Return the precisions that the processor has instructions for; without them oneDNN converts bfloat16, slowly."""
    return ("float32", "bf16") if any("bf16" in flag for flag in isa) else ("float32",)


def measure_training(
    planned: PlannedTraining, spec: Spec, env: Mapping[str, str], *, what: str
) -> list[dict[str, Any]]:
    """Train a few steps of a recipe in its planned workers; return what each rank measured, by rank.

    Replaces the run in the recipe's folder. Raises as `run_on_ranks` does; `what` names the training in messages.
    """
    arguments = {"spec": asdict(spec)}
    return call_in_ranks(planned, "cputrain.studies.bench.recorder:measure", arguments, env, what=what)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A measured training, with the results of its ranks."""

    planned: PlannedTraining
    command: str
    ranks: Ranks

    @property
    def images_per_s(self) -> list[float]:
        """Images/s of all workers, per step."""
        return [self.ranks[0]["images"] / step["seconds"] for step in self.ranks[0]["steps"]]


def measure_model(name: str, settings: tuple[str, ...], spec: Spec, env: Mapping[str, str]) -> MeasuredModel:
    """Train a few steps on this host, with generated images unless the settings name a data set.

    Raises InputError if the recipe does not fit this host, RunError if the training fails.
    """
    has_data = any(setting.startswith("data.path=") for setting in settings)
    images = () if has_data else (f"data.path={SYNTHETIC}",)
    with tempfile.TemporaryDirectory() as folder:
        output = f"output={Path(folder) / 'run'}"
        planned = plan_steps(name, (*settings, *images, output), env)
        ranks = measure_training(planned, spec, env, what=f"the training of {name}")
    return MeasuredModel(planned=planned, command=" ".join(("cputrain bench model", name, *settings)), ranks=ranks)


def model_report(measured: MeasuredModel) -> Report:
    """Return the figures and tables of a measured training."""
    recipe, first = measured.planned.recipe, measured.ranks[0]
    workers = measured.planned.plan.workers
    threads = spread([worker.intra_op for worker in workers], "thread")
    title = (
        f"{recipe.model.name} at {recipe.data.crop} x {recipe.data.crop}, {recipe.precision}: "
        f"{plural(len(workers), 'worker')} of {threads} each, {first['local_batch']} images each, "
        f"{first['backend']}, {first['engine']}; {plural(len(first['steps']), 'step')}"
    )
    figures = [*_limit_figures(measured), *_training_figures(measured)]
    return Report(title=title, figures=tuple(figures), tables=(_step_table(measured), *_layer_tables(measured)))


def model_records(measured: MeasuredModel) -> tuple[Record, ...]:
    """Return the records to store; empty for networks of unknown size and for images read from files."""
    recipe, plan = measured.planned.recipe, measured.planned.plan
    workload = plan.request.workload
    if workload is None or workload.assumed or not recipe.data.generated:
        return ()
    setup = setup_of(recipe, plan, None)
    value, low, high = spread_of(measured.images_per_s)
    measurement = Measurement(
        network=recipe.model.name,
        crop=recipe.data.crop,
        precision=recipe.precision,
        optimizer=recipe.optim.name,
        local_batch=setup.local_batch,
        workers=setup.workers,
        threads=setup.threads,
        comm_cores=setup.comm_cores,
        loader_cores=setup.loader_cores,
        backend=measured.ranks[0]["backend"],
        images_per_s=value,
        low=low,
        high=high,
        layers=layer_seconds(measured.ranks[0]["profiled"]),
    )
    training = training_record(plan.machine, measurement, command=measured.command)
    if workload.assumed:
        return (training,)
    scale = workload.gflop / plan.computing_cores
    name = training_name(workload.name, workload.precision)
    rate = rate_record(plan.machine, name, (scale * value, scale * low, scale * high), command=measured.command)
    return training, rate


def layer_seconds(profiled: Sequence[dict[str, Any]]) -> tuple[LayerSeconds, ...]:
    """Return the times of the layers with weights in the fastest recorded step, each with the weightless layers after
    it."""
    if not profiled or not profiled[0]["layers"]:
        return ()
    step = min(profiled, key=itemgetter("seconds"))
    weights = {layer["name"]: layer["weights"] for layer in step["layers"] if layer["weights"]}
    seconds = {name: {"forward": 0.0, "backward": 0.0} for name in weights}
    for direction in ("forward", "backward"):
        spans = [span for span in step["layer_spans"] if span[1] == direction]
        name = next(iter(weights))
        for span in spans if direction == "forward" else reversed(spans):
            name = span[0] if span[0] in weights else name
            seconds[name][direction] += span[3] - span[2]
    layers = tuple(LayerSeconds(weights=weights[name], **spent) for name, spent in seconds.items())
    # Frozen layers lack a backward pass.
    return layers if all(layer.forward and layer.backward for layer in layers) else ()


def _limit_figures(measured: MeasuredModel) -> list[Figure]:
    """Return each kernel's speed on one core; the limit is the fastest kernel in the same precision, closest to the
    peak."""
    figures = []
    for precision in dict.fromkeys(limit["precision"] for limit in measured.ranks[0]["limits"]):
        rates = {name: _core_rates(measured, name, precision) for name in (MATRIX, FORWARD, BACKWARD)}
        peaks = {name: spread_of(values)[0] for name, values in rates.items()}
        fastest = max(peaks, key=peaks.__getitem__)
        for name, values in rates.items():
            about = {} if name == fastest else {"limit": peaks[fastest], "limited_by": f"{fastest}, {precision}"}
            figures.append(figure_of(f"{name}, {precision}", values, "GFLOP/s of a core", **about))
    return figures


def _core_rates(measured: MeasuredModel, name: str, precision: str) -> list[float]:
    """Return GFLOP/s per core in each repeat of a kernel, the mean over the workers."""
    rates = [
        next(limit["flops"] for limit in rank["limits"] if (limit["name"], limit["precision"]) == (name, precision))
        for rank in measured.ranks
    ]
    return [sum(values) / GIGA / measured.planned.plan.computing_cores for values in zip(*rates, strict=True)]


def _training_figures(measured: MeasuredModel) -> list[Figure]:
    """Return images/s and GFLOP/s per core of whole steps; the limit is a training that only computes convolutions."""
    rate = figure_of("training", measured.images_per_s, "images/s")
    flop = _flop_per_image(measured)
    if flop is None:
        return [rate]
    cores, precision = measured.planned.plan.computing_cores, measured.planned.recipe.precision
    achieved = figure_of(
        "training", [flop * value / GIGA / cores for value in measured.images_per_s], "GFLOP/s of a core"
    )
    if not any(limit["precision"] == precision for limit in measured.ranks[0]["limits"]):
        return [achieved, rate]
    forward, backward = (spread_of(_core_rates(measured, name, precision))[0] for name in (FORWARD, BACKWARD))
    best = 3 / (1 / forward + 2 / backward)  # a training has twice as many operations backward as forward
    by = "3 x 3 convolutions alone"
    return [
        replace(achieved, limit=best, limited_by=by),
        replace(rate, limit=best * GIGA * cores / flop, limited_by=by),
    ]


def _flop_per_image(measured: MeasuredModel) -> float | None:
    """Return the floating-point operations per image and step; None if no layer was recorded."""
    profiled = measured.ranks[0]["profiled"]
    total: float = sum(
        layer["forward_flop"] + layer["backward_flop"] for step in profiled[:1] for layer in step["layers"]
    )
    images = measured.ranks[0]["images"] / len(measured.ranks)
    return total / images if total else None


def _step_table(found: MeasuredModel) -> Table:
    """Return the parts of a step of rank 0: median, range and share."""
    steps = found.ranks[0]["steps"]
    whole = median(step["seconds"] for step in steps)
    seconds = {part: [step["parts"][part] for step in steps] for part in PARTS}
    seconds["step"] = [step["seconds"] for step in steps]
    rows = ((part, spread_of(values)) for part, values in seconds.items())
    return Table(
        title="a step of rank 0",
        head=("part", "ms", "lowest", "highest", "% of the step"),
        rows=tuple((part, *(1e3 * each for each in found), 100 * found[0] / whole) for part, found in rows),
        drawn=1,
    )


def _layer_tables(measured: MeasuredModel) -> tuple[Table, ...]:
    """Return every layer of rank 0 in the fastest recorded step, the slowest layer first.

    For a Winograd layer, oneDNN's time is estimated from the speedup that was measured when Winograd was chosen.
    """
    profiled, winograd = measured.ranks[0]["profiled"], measured.ranks[0]["winograd"]
    if not profiled or not profiled[0]["layers"]:
        return ()
    step = min(profiled, key=itemgetter("seconds"))
    rows, of_kind = [], dict[str, list[float]]()
    for layer in step["layers"]:
        name, kind, forward, backward = (layer[key] for key in ("name", "kind", "forward_s", "backward_s"))
        both, speedup = forward + backward, winograd.get(name)
        rates = _gflops(layer["forward_flop"], forward), _gflops(layer["backward_flop"], backward)
        direct = None if speedup is None else 1e3 * both * speedup
        percent = 100 * both / step["seconds"]
        rows.append((name, kind, 1e3 * forward, rates[0], 1e3 * backward, rates[1], direct, percent))
        of_kind.setdefault(kind, []).append(both)
    rows.sort(key=lambda row: -row[-1])
    kinds = [
        (kind, str(len(values)), 1e3 * sum(values), 100 * sum(values) / step["seconds"])
        for kind, values in of_kind.items()
    ]
    kinds.sort(key=lambda row: -row[2])
    times = ("forward ms", "GFLOP/s", "backward ms", "GFLOP/s backward", "ms by oneDNN")
    head = ("layer", "kind", *times, "% of the step")
    by_kind = ("kind", "layers", "ms", "% of the step")
    return (
        Table(title="layers by kind", head=by_kind, rows=tuple(kinds), drawn=2),
        Table(title="layers", head=head, rows=tuple(rows), shown=SHOWN_LAYERS, drawn=len(head) - 1),
    )


def _gflops(flop: float, seconds: float) -> float | None:
    return flop / seconds / GIGA if flop and seconds > 0 else None


def trace_json(ranks: Sequence[dict[str, Any]]) -> str:
    """Return the profiled steps of all ranks in the Chrome trace format, in microseconds of the host's clock."""
    first = min(step["start"] for rank in ranks for step in rank["profiled"])
    events: list[dict[str, Any]] = []
    for rank in ranks:
        pid, name = rank["rank"], f"rank {rank['rank']} ({name_cpus(rank['pus'])})"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for track, title in enumerate(TRACKS):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": title}})
        for number, step in enumerate(rank["profiled"]):
            events += _events(pid, number, step, first)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(rank: int, number: int, step: dict[str, Any], first: float) -> list[dict[str, Any]]:
    """Return a step's slices; all-reduces are async begin and end events, as buckets may overlap and slices may not."""

    def event(kind: str, name: str, track: int, at: float, **about: Any) -> dict[str, Any]:
        where = {"name": name, "cat": TRACKS[track], "pid": rank, "tid": track}
        return {"ph": kind, **where, "ts": MICRO * (at - first), **about}

    def slice_of(name: str, track: int, start: float, end: float, **about: Any) -> dict[str, Any]:
        return event("X", name, track, start, dur=MICRO * max(end - start, 0.0), args=about)

    events = [
        slice_of(f"step {number}", 0, step["start"], step["end"]),
        *(slice_of(name, 0, start, end) for name, start, end in step["spans"]),
        *(slice_of(name, 1, start, end, direction=direction) for name, direction, start, end in step["layer_spans"]),
    ]
    for i, (size, start, end) in enumerate(step["buckets"]):
        name, bucket = f"bucket of {size:,} bytes", f"{rank}.{number}.{i}"
        events.append(event("b", name, 2, start, id=bucket, args={"bytes": size}))
        events.append(event("e", name, 2, end, id=bucket))
    return events
