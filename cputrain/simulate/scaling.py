"""The rows of a prediction: a job on each number of hosts, beside the ideal, with its range and its cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from affinity.errors import InputError
from affinity.planner.profiles import is_phi
from affinity.wording import either
from cputrain.models.sizes import COPIES
from cputrain.recipe.derivation import TrainingSizes, derive
from cputrain.recipe.schema import Recipe
from cputrain.recipe.schema.data import LINE
from cputrain.simulate.assumptions import ASSUMPTIONS, CONSTANTS, Constants
from cputrain.simulate.compute import work_of
from cputrain.simulate.layers import BYTES
from cputrain.simulate.predict import RATE_RANGE, Job, core_flops_of, job_setup, speed_at
from cputrain.simulate.setup import Setup, Speed
from cputrain.simulate.timeline import Step, seconds_at, step_of

IMAGENET_TRAIN, IMAGENET_VAL, POINTS = 1_281_167, 50_000, 100
SECONDS_PER_HOUR, JOULES_PER_KWH = 3600.0, 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A job on `nodes` hosts with `workers` ranks together. `low` and `high` bound images/s; `efficiency` is relative
    to as many single hosts. `time_to_train_s`, `node_hours` and `energy_kwh` are None where images or watts are not
    known.
    """

    nodes: int
    workers: int
    images_per_s: float
    low: float
    high: float
    efficiency: float
    step_s: float
    exposed_s: float
    straggler_s: float
    global_batch: int
    time_to_train_s: float | None
    node_hours: float | None
    energy_kwh: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A job's machine under one set of assumptions."""

    job: Job
    constants: Constants
    speed: Speed

    def step(self, setup: Setup) -> Step:
        """The step of a setup of this job."""
        return step_of(setup, self.speed, self.constants)

    def images_per_s(self, setup: Setup) -> float:
        """Images/s of all hosts."""
        return setup.global_batch / seconds_at(setup, self.constants)(self.speed)


def model_of(job: Job, constants: Constants = CONSTANTS) -> Model:
    """The job's machine, as fast as its reference says under these assumptions."""
    return Model(
        job=job, constants=constants, speed=speed_at(core_flops_of(job.reference, constants), machine=job.machine)
    )


def rows_of(job: Job, nodes: Sequence[int], *, watts: float | None = None) -> tuple[Row, ...]:
    """A row for each number of hosts, with the range of its images/s. Raises InputError where one does not fit."""
    model, setups = model_of(job), [job_setup(job, count) for count in nodes]
    single = model.images_per_s(job_setup(job, 1))
    rates = [model.images_per_s(setup) for setup in setups]
    deviations = _deviations(job, setups, rates)
    return tuple(
        _row(model, setup, rate, (low, high), single, watts)
        for setup, rate, (low, high) in zip(setups, rates, deviations, strict=True)
    )


def _row(
    model: Model, setup: Setup, rate: float, deviation: tuple[float, float], single: float, watts: float | None
) -> Row:
    step = model.step(setup)
    seconds = time_to_train(model, setup, step.step_s)
    return Row(
        nodes=setup.hosts,
        workers=setup.ranks,
        images_per_s=rate,
        low=rate - deviation[0],
        high=rate + deviation[1],
        efficiency=rate / (setup.hosts * single),
        step_s=step.step_s,
        exposed_s=step.exposed_s,
        straggler_s=step.straggler_s,
        global_batch=setup.global_batch,
        time_to_train_s=seconds,
        node_hours=None if seconds is None else setup.hosts * seconds / SECONDS_PER_HOUR,
        energy_kwh=None if seconds is None or watts is None else watts * setup.hosts * seconds / JOULES_PER_KWH,
    )


def _deviations(job: Job, setups: list[Setup], rates: list[float]) -> list[tuple[float, float]]:
    """How far images/s may fall and rise: each assumption at both ends of its range, alone, and the squares added."""
    falls, rises = [0.0] * len(rates), [0.0] * len(rates)
    for other_job, constants in _alternatives(job):
        other = model_of(other_job, constants)
        for i, setup in enumerate(setups):
            linked = replace(setup, link=other_job.link) if setup.link is not None else setup
            change = other.images_per_s(linked) - rates[i]
            (rises if change > 0 else falls)[i] += change * change
    return [(fall**0.5, rise**0.5) for fall, rise in zip(falls, rises, strict=True)]


def _alternatives(job: Job) -> list[tuple[Job, Constants]]:
    found = []
    for assumption in ASSUMPTIONS:
        if assumption.name in _unused(job):
            continue
        for value in (assumption.low, assumption.high):
            found.append((job, replace(CONSTANTS, **{assumption.name: value})))
    for latency in job.link.latency_range_s:
        found.append((replace(job, link=replace(job.link, latency_s=latency)), CONSTANTS))
    for factor in (1 - RATE_RANGE, 1 + RATE_RANGE):
        reference = replace(job.reference, images_per_s=factor * job.reference.images_per_s)
        found.append((replace(job, reference=reference), CONSTANTS))
    return found


def _unused(job: Job) -> set[str]:
    """The assumptions that the job's images/s do not depend on."""
    phi = {"phi_step_variation", "phi_core_move_bytes_per_s"}
    xeon = {"step_variation", "core_move_bytes_per_s"}
    gloo = set() if job.recipe.comm.backend == "gloo" else {"gloo_move_bytes_per_s"}
    return {"checkpoint_bytes_per_s", "evaluation_start_s"} | (xeon if is_phi(job.machine) else phi) | gloo


def time_to_train(model: Model, setup: Setup, step_s: float) -> float | None:
    """Seconds from the first step to the last checkpoint; None where the number of training images is unknown."""
    recipe, images = model.job.recipe, training_images(model.job.recipe)
    if images is None:
        return None
    sizes = derive(recipe, ppn=setup.workers, nodes=setup.hosts, images=images)
    steps = sizes.last_step(recipe.max_steps)
    epochs = steps / sizes.steps_per_epoch
    return steps * step_s + _evaluations_s(model, setup, sizes, epochs) + _checkpoints_s(model, setup, epochs)


def training_images(recipe: Recipe) -> int | None:
    """Training images as far as the recipe knows them without its data."""
    if recipe.data.images_per_epoch or recipe.data.train_images:
        return recipe.data.train_images or recipe.data.images_per_epoch
    if recipe.data.generated:
        return POINTS if recipe.data.path == LINE else IMAGENET_TRAIN
    return None


def _evaluations_s(model: Model, setup: Setup, sizes: TrainingSizes, epochs: float) -> float:
    """Evaluations of as large a share of images as ImageNet's validation images are."""
    if model.job.recipe.data.generated:
        return 0.0
    work = work_of(setup, model.speed, model.constants)
    images = sizes.images_per_epoch * IMAGENET_VAL / IMAGENET_TRAIN
    each = model.constants.evaluation_start_s + images / setup.ranks * sum(work.forward_s) / setup.local_batch
    return each * _times(model.job.recipe.evaluate.every_epochs, epochs)


def _checkpoints_s(model: Model, setup: Setup, epochs: float) -> float:
    weights = sum(BYTES * sum(layer.weights) for layer in setup.layers)
    size = weights * (1 + COPIES[model.job.recipe.optim.name])
    return size / model.constants.checkpoint_bytes_per_s * _times(model.job.recipe.checkpoint.every_epochs, epochs)


def _times(every: int | None, epochs: float) -> int:
    return 1 if every is None else max(1, int(epochs // every))


def check_global_batch(job: Job, nodes: Sequence[int]) -> None:
    """Raise InputError where the workers do not divide a fixed global batch, with the nearest numbers that do."""
    batch = job.recipe.batch.global_
    if batch is None:
        return
    for count in nodes:
        workers = job_setup(job, count).workers
        if batch % (count * workers) == 0:
            continue
        fitting = [n for n in range(1, batch // workers + 1) if batch % (n * workers) == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - count))[:2])
        if not near:
            raise InputError(f"batch.global={batch} does not divide among {workers} workers per host: set plan.ppn")
        raise InputError(
            f"batch.global={batch} does not divide among {count} hosts of {workers} workers: the nearest numbers of "
            f"hosts are {either([str(n) for n in near])}"
        )
