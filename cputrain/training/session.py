"""What all ranks share in a training: group, data, task, engine."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.kernel.observe import Observed
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.planner.records import ENGINE, Records, read_records
from cputrain.affinity.planner.request import tuning_name
from cputrain.affinity.ranks.rank import Rank
from cputrain.affinity.topology.sysfs import read_machine
from cputrain.affinity.wording import counted
from cputrain.comm.group import CommGroup, all_gather, start_group
from cputrain.data.formats.dataset import Dataset, OwnSamples, Points, check_labels
from cputrain.data.formats.places import SPLITS
from cputrain.data.formats.shards import images_per_block
from cputrain.data.from_recipe import open_recipe_data
from cputrain.data.loader import choose_normalize
from cputrain.data.pixels.decode import Decode, choose_decoder, decode_by_pillow
from cputrain.launch.recipe_request import request_of
from cputrain.measurements import keep, new_record
from cputrain.models.winograd import ConvolutionShape, WinogradKernels, covered_shapes, use_winograd
from cputrain.recipe.derivation import TrainingSizes, derive
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import TrainingScale
from cputrain.training.binding import Binding, check_comm_threads, facts_of, start_threads
from cputrain.training.damage import check_sample
from cputrain.training.engine import (
    ENGINES,
    LEAST_GAIN,
    WINOGRAD,
    Engine,
    choose_engine,
    measured_speedups,
    same_engine,
    shape_key,
    winograd_kernels,
)
from cputrain.training.task import OwnTask, Task, recipe_task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of the job: this one, the process group, and every rank's local batch.

    A local batch is the most images of one backward pass, recipe.batch.local on average; the images of a step are split
    over the ranks in proportion.
    """

    this: Rank
    group: CommGroup
    local_batches: tuple[int, ...]

    @property
    def is_main_rank(self) -> bool:
        """Whether this is rank 0, the only rank that prints and writes the run's folder."""
        return self.this.rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionData:
    """The open data set, and the functions that decode and normalize its images.

    `decoder` describes `decode`; `block_length` images of the training set are read at once, 0 for one by one.
    """

    dataset: Dataset
    decode: Decode
    decoder: str
    normalize: Callable[[torch.Tensor], torch.Tensor]
    block_length: int

    @property
    def features(self) -> int | None:
        """The length of an input row for data of points; None for images."""
        return self.dataset.train.x.shape[1] if isinstance(self.dataset.train, Points) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A rank that is bound, has its data open and has joined the process group."""

    recipe: Recipe
    sizes: TrainingSizes
    ranks: Ranks
    data: SessionData
    task: Task
    binding: Binding
    engine: Engine

    @property
    def scale(self) -> TrainingScale:
        """What a resumed run compares with its earlier starts."""
        dataset = self.data.dataset
        return TrainingScale.of(
            self.sizes,
            workers=self.ranks.this.world_size,
            train_images=len(dataset.train),
            classes=dataset.classes,
        )


def start_session(
    recipe: Recipe,
    rank: Rank,
    worker: WorkerPlan,
    observed: Observed,
    env: Mapping[str, str],
    *,
    check: bool,
    phase: Callable[[str], None],
    own: OwnTask | None = None,
    splits: tuple[str, ...] = SPLITS,
) -> Session:
    """Set torch's threads, open the data, join the process group; `phase` hears what begins. `own` is what a user's own
    code trains in place of the recipe's network and data; `splits` are those of which images will be read.

    Raises InputError where the data or the launcher does not fit the recipe, images cannot be read, or a rank has other
    versions, settings or images; with `check`, RunError where OpenMP's threads, the first large allocation or oneCCL's
    threads are not where the plan puts them.
    """
    binding = start_threads(worker, observed, check=check)
    torch.manual_seed(recipe.seed)
    phase("opening data")
    dataset = own.dataset if own else open_recipe_data(recipe)
    if own is None:
        check_labels(dataset)
    phase("loading native kernels")
    engine = choose_engine("eager" if own and recipe.engine == "auto" else recipe.engine, recipe.precision, env)
    sizes = derive(
        recipe,
        ppn=rank.local_world_size,
        nodes=rank.world_size // rank.local_world_size,
        images=len(dataset.train),
    )
    data = _session_data(recipe, dataset, sizes, env)
    task = own.task(recipe) if own else recipe_task(recipe, len(dataset.classes), data.features, data.normalize)
    phase(f"connecting {counted(rank.world_size, 'rank')}")
    group = start_group(rank, worker, recipe.comm.backend, recipe.comm.timeout_s, env, facts_of(recipe, dataset))
    if check:
        check_comm_threads(worker, rank, group.backend, env)
    ranks = Ranks(this=rank, group=group, local_batches=_local_batches(recipe, worker, sizes))
    if not recipe.data.generated:
        used = {split: images for split, images in dataset.splits.items() if split in splits}
        check_sample(used, data.decode, recipe.data.crop, recipe.data.max_damaged, rank)
    engine = same_engine(all_gather((engine.name, engine.why)), engine)
    return Session(recipe=recipe, sizes=sizes, ranks=ranks, data=data, task=task, binding=binding, engine=engine)


def _session_data(recipe: Recipe, dataset: Dataset, sizes: TrainingSizes, env: Mapping[str, str]) -> SessionData:
    encoded = not isinstance(dataset.train, Points | OwnSamples)
    decode, decoder = (
        choose_decoder(recipe.data.decoder, env) if encoded else (decode_by_pillow, f"none: {recipe.data.kind}")
    )
    return SessionData(
        dataset=dataset,
        decode=decode,
        decoder=decoder,
        normalize=choose_normalize(recipe.data.mean, recipe.data.std, recipe.data.decoder, env)
        if encoded
        else (lambda x: x),
        block_length=images_per_block(dataset.train, recipe.data.block_mib, sizes.steps_per_epoch),
    )


def _local_batches(recipe: Recipe, worker: WorkerPlan, sizes: TrainingSizes) -> tuple[int, ...]:
    """Every rank's local batch: the recipe's, or with plan.balance the plan's. Raises InputError."""
    own = recipe.batch.local if recipe.plan.balance == "equal" else worker.local_batch or 0
    batches = tuple(all_gather(own))
    if sum(batches) != recipe.batch.local * len(batches):
        raise InputError(
            f"the plan's local batches {batches} are not {recipe.batch.local} on average: plan with this recipe"
        )
    images = sizes.used_images_per_epoch // sizes.steps_per_epoch
    if images * min(batches) // sum(batches) < sizes.accumulation_steps:
        raise InputError(
            f"a step's {images} images, split in proportion to {batches}, leave a rank without an image in some of "
            f"the step's {counted(sizes.accumulation_steps, 'accumulation step')}: set plan.balance=equal"
        )
    return batches


def with_measured_engine(session: Session, env: Mapping[str, str]) -> Session:
    """The session of a training with the engine that rank 0's machine has measured, where engine=auto and every rank
    can use it. To be called by all ranks."""
    recipe = session.recipe
    if recipe.engine != "auto":
        return session
    # of the whole host: this rank is bound to a part of it
    records = read_records(read_machine(Path("/")), env) if session.ranks.is_main_rank else Records()
    found = all_gather(measured_engine(recipe, records))[0]
    if found is None:
        return session
    name, why = found
    chosen, problem = session.engine, ""
    if name != chosen.name:
        try:
            chosen = choose_engine(name, recipe.precision, env)
        except (InputError, RunError) as error:
            problem = str(error)
    problems = [f"rank {rank}: {each}" for rank, each in enumerate(all_gather(problem)) if each]
    engine: Engine = replace(session.engine, why=problems[0]) if problems else replace(chosen, why=why)
    return replace(session, engine=engine)


def measured_engine(recipe: Recipe, records: Records) -> tuple[str, str] | None:
    """The engine that was measured for a recipe's network, precision and batch, and why; None where none was."""
    name = tuning_name(request_of(recipe))
    for record in records.of(ENGINE):
        engine, why = record.values.get("engine"), record.values.get("why")
        if name is not None and record.name == name and engine in ENGINES and isinstance(why, str):
            return engine, f"{why} ({record.command}, {record.date})"
    return None


def choose_winograd(
    session: Session, network: nn.Module, images: int, env: Mapping[str, str], stored: tuple[str, ...] | None = None
) -> tuple[str, ...] | None:
    """Let the layers of a prepared network that are faster so compute by Winograd's algorithm; their names, None where
    none are to be chosen. `images`: of one pass; `stored`: the layers that a checkpoint names, which are taken.

    To be called by all ranks, which measure at the same time what no earlier start on rank 0's host has measured. What
    rank 0 has seen counts for all.
    """
    recipe, problem, kernels = session.recipe, "", None
    try:
        kernels = winograd_kernels(recipe.model.winograd, session.engine, recipe.precision, env)
    except (InputError, RunError) as error:
        problem = str(error)
    problems = [f"rank {rank}: {each}" for rank, each in enumerate(all_gather(problem)) if each]
    if problems and session.ranks.is_main_rank:
        logger.warning("cputrain: convolutions stay direct: %s", problems[0])
    if kernels is None or problems:
        return None
    shapes = covered_shapes(network, session.task.example(1))
    if stored is None:
        gains = _winograd_gains(session, set(shapes.values()), images, kernels, env)
        stored = tuple(name for name, shape in shapes.items() if gains[shape_key(shape, images)] >= LEAST_GAIN)
    chosen = tuple(name for name in all_gather(stored)[0] if name in shapes)
    for name in chosen:
        use_winograd(network.get_submodule(name), kernels)
    return chosen


def _winograd_gains(
    session: Session, shapes: set[ConvolutionShape], images: int, kernels: WinogradKernels, env: Mapping[str, str]
) -> dict[str, float]:
    """Rank 0's measurements, of earlier starts and now."""
    precision = session.recipe.precision
    name = f"{precision}, {counted(torch.get_num_threads(), 'thread')}"
    known: dict[str, float] = {}
    if session.ranks.is_main_rank:
        machine = read_machine(Path("/"))
        records = [record for record in read_records(machine, env).of(WINOGRAD) if record.name == name]
        known = {key: value for record in records for key, value in record.values.items() if isinstance(value, float)}
    known = all_gather(known)[0]
    gains = measured_speedups(shapes, images, precision, kernels, known)
    if session.ranks.is_main_rank and gains != known:
        with suppress(RunError):  # measured again at the next start
            keep(new_record(machine, WINOGRAD, name, gains, command="cputrain train"), env)
    return all_gather(gains)[0]
