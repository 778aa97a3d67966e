"""Session of a rank, for training, evaluation and measurements: threads, data, process group, task and engine; the
settings that must agree between ranks; and this rank's training and evaluation batches."""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import nn

from cputrain import __version__
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.kernel.binding import (
    Thread,
    memory_share,
    misallocated,
    misplaced,
    refuse,
    team_of,
    threads_of,
)
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.planner.records import ENGINE, Records, read_records
from cputrain.affinity.planner.request import tuning_name
from cputrain.affinity.ranks.rank import Rank
from cputrain.affinity.topology.machine import format_list, name_cpus
from cputrain.affinity.topology.sysfs import read_machine
from cputrain.affinity.wording import plural
from cputrain.comm import ccl
from cputrain.comm.group import CommGroup, all_gather, start_group
from cputrain.data.formats.dataset import (
    Dataset,
    Images,
    PiecewiseImages,
    Points,
    SyntheticImages,
    UserSamples,
    check_labels,
    is_too_damaged,
    refusal,
)
from cputrain.data.formats.shards import crc32c, images_per_block, split_checksum
from cputrain.data.formats.source import SPLITS
from cputrain.data.from_recipe import open_recipe_data, training_transform
from cputrain.data.loader import Batch, ImageLoader, choose_normalize, own_batches, point_batches, read_and_decode
from cputrain.data.order import BatchSampler, Indices, SequentialSampler, ShuffledSampler
from cputrain.data.pixels import Decode, Pixels, Transform, center_crop, choose_decoder, decode_by_pillow
from cputrain.kernels.apply import agreed
from cputrain.kernels.convolution import covered_shapes
from cputrain.kernels.evidence import random_numbers_kept
from cputrain.kernels.measure import measured
from cputrain.kernels.plan import WINOGRAD, Gain, KernelPlan, plan_kernels
from cputrain.launch.local import request_of
from cputrain.launch.rank_process import RankContext
from cputrain.manifest import ScaleRecord
from cputrain.recipe.derivation import TrainingSizes, derive
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import flat
from cputrain.training.engine import (
    ENGINES,
    Engine,
    choose_engine,
    same_engine,
    target_for,
    with_winograd,
)
from cputrain.training.step import Task, UserTask, recipe_task

logger = logging.getLogger(__name__)

FIRST_ALLOCATION = 16 << 20  # float32 values (64 MiB), far more than a page or a core's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionData:
    """The open data set, and the functions that decode and normalize its images.

    `decoder` describes `decode`. Training images are read in blocks of `block_length`, or one by one if it is 0.
    """

    dataset: Dataset
    decode: Decode
    decoder: str
    normalize: Callable[[torch.Tensor], torch.Tensor]
    block_length: int

    @property
    def features(self) -> int | None:
        """Number of values of an input row if the data are points; None for images."""
        return self.dataset.train.x.shape[1] if isinstance(self.dataset.train, Points) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """State of a bound rank that has opened its data and joined the process group.

    `local_batches` has each rank's maximum number of images in a backward pass, recipe.batch.local on average; a
    step's images are split over the ranks in proportion. `team` are the threads of the first parallel region;
    `memory_share` is each NUMA node's share of the first large allocation.
    """

    context: RankContext
    recipe: Recipe
    sizes: TrainingSizes
    group: CommGroup
    local_batches: tuple[int, ...]
    data: SessionData
    task: Task
    engine: Engine
    team: tuple[Thread, ...]
    memory_share: dict[int, float]

    @property
    def rank(self) -> Rank:
        """This process's rank."""
        return self.context.rank

    @property
    def is_main_rank(self) -> bool:
        """Whether this is rank 0, the only rank that prints and writes to the run folder."""
        return self.rank.rank == 0

    @property
    def mean_local_batch(self) -> int:
        """This rank's mean number of images in a backward pass, rounded."""
        share = self.local_batches[self.rank.rank] / sum(self.local_batches)
        return round(self.sizes.global_batch * share / self.sizes.accumulation_steps)

    @property
    def scale(self) -> ScaleRecord:
        """Sizes that a resumed run compares with those of its earlier starts."""
        dataset = self.data.dataset
        return ScaleRecord(
            workers=self.rank.world_size,
            global_batch=self.sizes.global_batch,
            train_images=len(dataset.train),
            classes=len(dataset.classes),
        )


NO_LAYERS = Engine(name="eager", why="the network has no Conv2d or BatchNorm2d layer, which the native kernels are for")


def start_session(
    context: RankContext, recipe: Recipe, *, own: UserTask | None = None, splits: tuple[str, ...] = SPLITS
) -> Session:
    """Start the planned threads, open the data and join the process group. `own` replaces the recipe's network and data
    by a user's; `splits` are the splits whose images will be read.

    Raises InputError if the data or the launcher does not fit the recipe, images cannot be read, or versions, settings
    or images differ between ranks. With context.check, raises RunError if OpenMP's or oneCCL's threads or the first
    large allocation are not where the plan puts them.
    """
    rank, worker, env, phase = context.rank, context.worker, context.env, context.startup.phase
    team, share = start_threads(context)
    torch.manual_seed(recipe.seed)
    phase("opening data")
    dataset = own.dataset if own else open_recipe_data(recipe)
    if own is None:
        check_labels(dataset)
    phase("loading native kernels")
    if own is None or recipe.engine != "auto" or _has_images(own.network):
        engine = choose_engine(recipe.engine, recipe.precision, env)
    else:
        engine = NO_LAYERS  # whose kernels would be compiled for nothing
    sizes = derive(
        recipe,
        ppn=rank.local_world_size,
        nodes=rank.world_size // rank.local_world_size,
        images=len(dataset.train),
    )
    data = _session_data(recipe, dataset, sizes, env)
    task = own.task(recipe) if own else recipe_task(recipe, len(dataset.classes), data.features, data.normalize)
    phase(f"connecting {plural(rank.world_size, 'rank')}")
    group = start_group(rank, worker, recipe.comm.backend, recipe.comm.timeout_s, env, job_settings(recipe, dataset))
    if context.check and group.backend == ccl.BACKEND:
        refuse(worker, misplaced_comm_threads(rank.local_rank, env, threads_of(os.getpid())))
    local_batches = _local_batches(recipe, worker, sizes)
    if not recipe.data.generated:
        used = {split: images for split, images in dataset.splits.items() if split in splits}
        check_sample(used, data.decode, recipe.data.crop, recipe.data.max_damaged, rank)
    return Session(
        context=context,
        recipe=recipe,
        sizes=sizes,
        group=group,
        local_batches=local_batches,
        data=data,
        task=task,
        engine=same_engine(all_gather((engine.name, engine.why)), engine),
        team=team,
        memory_share=share,
    )


def start_threads(context: RankContext) -> tuple[tuple[Thread, ...], dict[int, float]]:
    """Start torch's threads as planned; return the threads of the first parallel region, and each NUMA node's share of
    the first large allocation. With context.check, raises RunError if either is not as planned."""
    worker, check = context.worker, context.check
    torch.set_num_threads(worker.intra_op)
    first = torch.empty(FIRST_ALLOCATION)
    team = team_of(lambda: _touch(first))
    share = memory_share(first.data_ptr())
    if check:
        bound = context.observed.memory_policy == worker.memory_policy
        refuse(worker, misplaced(worker, team) + (misallocated(worker, share) if bound else []))
    if torch.get_num_interop_threads() != worker.inter_op:  # can only be set once in a process
        # A script that was not bound by a plan may have started its inter-op threads already, and keeps them.
        with nullcontext() if check else suppress(RuntimeError):
            torch.set_num_interop_threads(worker.inter_op)
    return team, share


def _touch(values: torch.Tensor) -> None:
    """Write all values in a parallel region, so that each thread touches its pages first."""
    values.fill_(1.0)


def misplaced_comm_threads(local_rank: int, env: Mapping[str, str], threads: tuple[Thread, ...]) -> list[str]:
    """Return a line if this rank's oneCCL threads are not on the CPUs that the plan lists in CCL_WORKER_AFFINITY; an
    empty list if they are, or if the variable is not a list of CPUs."""
    if not re.fullmatch(r"\d+(,\d+)*", env.get("CCL_WORKER_AFFINITY", "")):
        return []
    count = int(env.get("CCL_WORKER_COUNT", "1"))
    planned = [int(pu) for pu in env["CCL_WORKER_AFFINITY"].split(",")][local_rank * count :][:count]
    empty = sorted(pu for pu in planned if (pu,) not in [thread.pus for thread in threads])
    if not empty:
        return []
    return [f"oneCCL threads planned on {name_cpus(planned)}, none found on {format_list(empty)}"]


PLACES = ("data.path", "data.stage_dir", "output")  # paths may differ between hosts; the data is compared


def job_settings(recipe: Recipe, dataset: Dataset) -> dict[str, str]:
    """Return everything that must be the same on all ranks: versions, settings, sizes and checksums, by name."""
    settings = flat(recipe.model_dump(mode="json", by_alias=True))
    facts = {"cputrain": __version__, "torch": torch.__version__.partition("+")[0]}
    facts |= {key: json.dumps(value) for key, value in settings.items() if key not in PLACES}
    if recipe.data.generated:  # from the seed, or by the user's code
        return facts | {f"{split} {recipe.data.unit}": f"{len(images):,}" for split, images in dataset.splits.items()}
    names = crc32c("\n".join(dataset.classes).encode(errors="surrogateescape"))
    facts["classes"] = f"{len(dataset.classes):,} (checksum {names:08x})"
    for split, images in dataset.splits.items():
        checksum = split_checksum(images, str(recipe.data.path))
        facts[f"{split} images"] = f"{len(images):,} (checksum {checksum:08x})"
    return facts


def _session_data(recipe: Recipe, dataset: Dataset, sizes: TrainingSizes, env: Mapping[str, str]) -> SessionData:
    encoded = not isinstance(dataset.train, Points | UserSamples)
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
    """Return every rank's local batch: the recipe's, or the plan's if plan.balance is not "equal". Raises InputError if
    the plan's do not fit the recipe or leave a rank without images."""
    own = recipe.batch.local if recipe.plan.balance == "equal" else worker.local_batch or 0
    batches = tuple(all_gather(own))
    if sum(batches) != recipe.batch.local * len(batches):
        raise InputError(
            f"the mean of the plan's local batches {batches} is not {recipe.batch.local}: plan with this recipe"
        )
    images = sizes.used_images_per_epoch // sizes.steps_per_epoch
    if images * min(batches) // sum(batches) < sizes.accumulation_steps:
        raise InputError(
            f"{plural(images, 'image')} a step, split in proportion to {batches}, leave a rank without images in some "
            f"of {plural(sizes.accumulation_steps, 'accumulation step')}: set plan.balance=equal"
        )
    return batches


def _has_images(network: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d | nn.BatchNorm2d) for layer in network.modules())


def with_measured_engine(session: Session) -> Session:
    """Return the session with the engine that was measured as fastest on rank 0's host, if engine=auto and every rank
    can use it. All ranks must call this."""
    recipe, env = session.recipe, session.context.env
    if recipe.engine != "auto":
        return session
    # Records are of the whole host, while this rank is bound to a part of it.
    records = read_records(read_machine(Path("/")), env) if session.is_main_rank else Records()
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
    """Return the fastest measured engine for the recipe's network, precision and batch, and the reason; None if there
    is no measurement."""
    name = tuning_name(request_of(recipe))
    for record in records.of(ENGINE):
        engine, why = record.values.get("engine"), record.values.get("why")
        if name is not None and record.name == name and engine in ENGINES and isinstance(why, str):
            return engine, f"{why} ({record.command}, {record.date})"
    return None


def plan_network(
    session: Session, network: nn.Module, images: int, stored: tuple[str, ...] | None = None
) -> tuple[Engine, KernelPlan | None, dict[str, float | None] | None]:
    """Plan the kernels of a network for `images` a pass, in which convolutions use Winograd's algorithm if they are
    faster with it, or those of a checkpoint (`stored`) do.

    Returns the engine with all kernels that the plan uses, the plan, None if the engine is not native, and the speedups
    of the layers by Winograd's algorithm, None if it cannot be used. All ranks must call this.
    """
    recipe, env = session.recipe, session.context.env
    engine = with_winograd(session.engine, recipe.model.winograd, recipe.precision, env)
    if engine.kernels is None:
        return engine, None, None
    target, missing = target_for(recipe.precision), engine.kernels.missing
    has_kernels = engine is not session.engine and WINOGRAD not in missing
    problem = missing.get(WINOGRAD, "") if engine is not session.engine else ""
    of_ranks = all_gather((problem, has_kernels))
    problems = [f"rank {rank}: {each}" for rank, (each, _) in enumerate(of_ranks) if each]
    gains: dict[str, Gain] = {}
    used = all(has for _, has in of_ranks)
    if used and stored is not None:
        gains = dict.fromkeys(stored, (None, "as in the checkpoint"))
    elif used and engine.kernels.convolutions is not None:
        try:
            with random_numbers_kept():  # which a user's data may draw
                shapes = covered_shapes(network, session.task.example(1)[0])
        except InputError as error:
            shapes, problems = {}, [str(error)]
        gain = measured(set(shapes.values()), images, target, engine.kernels.convolutions, env)
        gains = {name: gain(shape) for name, shape in shapes.items()}
    if problems and session.is_main_rank:
        logger.warning("cputrain: Winograd's algorithm is not used for convolutions: %s", problems[0])
    plan = agreed(plan_kernels(network, target, gains, missing), missing)
    return engine, plan, plan.speedups(WINOGRAD) if used else None


SAMPLE_IMAGES, SAMPLE_BLOCKS = 32, 4  # images of a split to try before the first step, in 4 blocks if read in blocks
SIGMAS = 6  # standard deviations above data.max_damaged


def check_sample(splits: Mapping[str, Images], decode: Decode, side: int, share: float, rank: Rank) -> None:
    """Try to decode a sample of each split's images, divided over the ranks. All ranks must call this.

    Raises InputError on every rank if the sample shows that more than `share` of the split is damaged.
    """
    tried = {split: _spread(images) for split, images in splits.items() if len(images)}
    mine = {
        split: _problems(splits[split], numbers[rank.rank :: rank.world_size], decode, side)
        for split, numbers in tried.items()
    }
    of_ranks = all_gather(mine)
    for split, numbers in tried.items():
        damaged = sorted(problem for of_rank in of_ranks for problem in of_rank[split])
        count, images = len(numbers), len(splits[split])
        expected = count * share + SIGMAS * math.sqrt(count * share * (1 - share))
        if is_too_damaged(len(damaged), images, share) or len(damaged) > max(expected, 1) or len(damaged) == count:
            raise refusal(split, damaged, count, images, share)


def _spread(images: Images) -> Indices:
    """Return up to SAMPLE_IMAGES image indices, spread evenly over a split."""
    blocks = isinstance(images, PiecewiseImages) and images.usual_block
    run = SAMPLE_IMAGES // SAMPLE_BLOCKS if blocks else 1
    starts = np.linspace(0, max(0, len(images) - run), SAMPLE_IMAGES // run).astype(np.int64)
    return np.unique((starts[:, None] + np.arange(min(run, len(images)))).ravel())


def _problems(images: Images, numbers: Indices, decode: Decode, side: int) -> list[str]:
    def middle(encoded: Sequence[bytes], _numbers: Sequence[int], out: Pixels) -> list[str | None]:
        return decode(encoded, center_crop(side, side), out)

    out = np.empty((len(numbers), side, side, 3), dtype=np.uint8)
    return [problem for problem in read_and_decode(images, numbers, middle, out) if problem]


def training_batches(session: Session, epoch: int, first: int, stop: int) -> Iterator[Batch]:
    """Return this rank's batches for steps `first` to `stop` - 1, all in one epoch.

    The iterator raises RunError at a damaged image if data.on_error=raise.
    """
    sizes = session.sizes
    sampler = ShuffledSampler(
        images=len(session.data.dataset.train),
        used=sizes.used_images_per_epoch,
        steps=sizes.steps_per_epoch,
        seed=session.recipe.seed,
        shares=session.local_batches,
        rank=session.rank.rank,
        passes=sizes.accumulation_steps,
        block_length=session.data.block_length,
    )
    begin = first % sizes.steps_per_epoch
    steps = begin, begin + stop - first
    if isinstance(session.data.dataset.train, Points):
        return point_batches(session.data.dataset.train, sampler.batches(epoch, *steps))
    if isinstance(session.data.dataset.train, UserSamples):
        session.data.dataset.train.set_epoch(epoch)
        shares = sampler.batches(epoch, *steps)
        return own_batches(session.data.dataset.train, shares, cpus=session.context.loader_pus)
    transform = training_transform(session.recipe, epoch)
    batches = _loader(session, "train", sampler, transform).raw_batches(epoch, *steps)
    return _refuse_damaged(batches, session.rank.rank) if session.recipe.data.on_error == "raise" else batches


def _refuse_damaged(batches: Iterator[Batch], rank: int) -> Iterator[Batch]:
    for batch in batches:
        if batch.damaged:
            raise RunError(
                f"rank {rank} found the damaged image {batch.damaged[0]}: repair it, remove it, or set "
                "data.on_error=skip"
            )
        yield batch


def endless_batches(session: Session) -> Iterator[Batch]:
    """Yield this rank's training batches, epoch after epoch without end, for measurements."""
    for epoch in count():
        yield from training_batches(session, epoch % session.recipe.epochs, 0, session.sizes.steps_per_epoch)


def evaluation_batch(recipe: Recipe) -> int:
    """Return the images of one forward pass of an evaluation."""
    return recipe.evaluate.batch or recipe.batch.local


def evaluation_shares(session: Session, split: str) -> list[Indices]:
    """Return the image indices of each of this rank's batches."""
    return _evaluation_sampler(session, split).batches()


def evaluation_batches(session: Session, split: str) -> Iterator[Batch]:
    """Return this rank's batches of a split; each image is on exactly one rank, without padding."""
    images, sampler = session.data.dataset.splits[split], _evaluation_sampler(session, split)
    if isinstance(images, Points):
        return point_batches(images, sampler.batches())
    if isinstance(images, UserSamples):
        return own_batches(images, sampler.batches(), cpus=session.context.loader_pus)
    data = session.recipe.data
    transform = Transform(image_size=data.crop, short_side=data.short_side, crop="center")
    return _loader(session, split, sampler, transform).raw_batches(epoch=0)


def _evaluation_sampler(session: Session, split: str) -> SequentialSampler:
    return SequentialSampler(
        images=len(session.data.dataset.splits[split]),
        batch_size=evaluation_batch(session.recipe),
        rank=session.rank.rank,
        world_size=session.rank.world_size,
    )


def _loader(session: Session, split: str, sampler: BatchSampler, transform: Transform) -> ImageLoader:
    images = session.data.dataset.splits[split]
    return ImageLoader(
        session.data.dataset,
        split,
        sampler=sampler,
        transform=transform,
        decode=images.decode if isinstance(images, SyntheticImages) else session.data.decode,
        normalize=session.data.normalize,
        seed=session.recipe.seed,
        threads=session.context.loader_threads,
        cpus=session.context.loader_pus,
    )
