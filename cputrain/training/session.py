"""Start of a rank, for training, evaluation and measurements: threads, data, process group, task and engine; and the
settings that must agree between ranks."""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cputrain import __version__
from cputrain.affinity.binding import (
    Thread,
    memory_share,
    misallocated_memory,
    misplaced_threads,
    raise_binding_error,
    team_of,
    threads_of,
)
from cputrain.affinity.errors import InputError
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.rank import Rank
from cputrain.affinity.topology.machine import format_list, name_cpus
from cputrain.affinity.topology.sysfs import this_machine
from cputrain.affinity.wording import plural
from cputrain.comm import ccl
from cputrain.comm.group import CommGroup, all_gather, start_group
from cputrain.data.formats.dataset import Dataset, Points, UserSamples, check_labels
from cputrain.data.formats.shards import crc32c, images_per_block, split_checksum
from cputrain.data.formats.source import SPLITS
from cputrain.data.from_settings import open_data
from cputrain.data.loader import choose_normalize
from cputrain.data.pixels import Decode, choose_decoder, decode_by_pillow
from cputrain.data.settings import DataSettings
from cputrain.launch.rank_process import RankContext
from cputrain.manifest import ScaleRecord
from cputrain.models.networks import build_model, check_network
from cputrain.recipe.derivation import TrainingSizes, derive, schedule_of
from cputrain.recipe.request import request_of
from cputrain.recipe.resume import first_precision
from cputrain.recipe.schema import Recipe
from cputrain.runs.folder import flat
from cputrain.schedule import Schedule
from cputrain.training.corrupt_images import check_sample
from cputrain.training.engine import (
    Engine,
    agree_on_engine,
    agree_on_operators,
    choose_engine,
    register_operators,
    to_weight_dtype,
    with_measured_engine,
)
from cputrain.training.precision import Trial, choose_precision
from cputrain.training.task import Task, UserTask, build_mixup, sample_losses

FIRST_ALLOCATION = 16 << 20  # float32 values (64 MiB), far more than a page or a core's cache
NO_LAYERS = Engine(name="eager", why="the network has no Conv2d or BatchNorm2d layer, which the native kernels are for")
PLACES = ("data.path", "data.stage_dir", "output")  # paths may differ between hosts; the data is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """State of a bound rank that has opened its data and joined the process group.

    `decoder` describes `decode`. Training images are read in blocks of `block_length`, or one by one if it is 0.
    `local_batches` has each rank's maximum number of images in a backward pass, recipe.batch.local on average; a
    step's images are split over the ranks in proportion. `precision_why` is the reason for the recipe's precision if it
    was chosen at this start, else "". `team` are the threads of the first parallel region;
    `memory_share` is each NUMA node's share of the first large allocation.
    """

    context: RankContext
    recipe: Recipe
    precision_why: str
    sizes: TrainingSizes
    schedule: Schedule
    group: CommGroup
    local_batches: tuple[int, ...]
    dataset: Dataset
    decode: Decode
    decoder: str
    normalize: Callable[[torch.Tensor], torch.Tensor]
    block_length: int
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
    def features(self) -> int | None:
        """Number of values of an input row if the data are points; None for images."""
        return _features_of(self.dataset)

    @property
    def scale(self) -> ScaleRecord:
        """Sizes that a resumed run compares with those of its earlier starts."""
        return ScaleRecord(
            workers=self.rank.world_size,
            global_batch=self.sizes.global_batch,
            train_images=len(self.dataset.train),
            classes=len(self.dataset.classes),
        )


def start_session(
    context: RankContext,
    recipe: Recipe,
    *,
    user_task: UserTask | None = None,
    splits: tuple[str, ...] = SPLITS,
    measured: bool = False,
    resume: bool = False,
) -> Session:
    """Start the planned threads, open the data, join the process group and choose the engine, with `measured` the one
    that was measured as fastest, and with precision=auto the precision, with `resume` that of the run in the recipe's
    folder. `user_task` replaces the recipe's network and data by a user's; `splits` are the splits whose images will be
    read.

    Raises InputError if the data or the launcher does not fit the recipe, images cannot be read, or versions, settings
    or images differ between ranks. With context.check, raises RunError if OpenMP's or oneCCL's threads or the first
    large allocation are not where the plan puts them.
    """
    rank, worker, env, phase = context.rank, context.worker, context.env, context.startup.phase
    asked, recipe = recipe, recipe.as_planned()
    team, share = start_threads(context)
    torch.manual_seed(recipe.seed)
    if user_task is None:
        check_network(recipe.model.name)  # before the data is read, which may take minutes
    phase("opening data")
    if user_task is None:
        dataset = open_data(recipe.data, classes=recipe.model.classes, side=recipe.largest_crop, seed=recipe.seed)
        check_labels(dataset)
    else:
        dataset = user_task.dataset
    phase("loading native kernels")
    engine = _engine_of(recipe.engine, recipe.precision, user_task, env)
    problem = register_operators(engine, env)
    sizes = derive(
        recipe,
        ppn=rank.local_world_size,
        nodes=rank.world_size // rank.local_world_size,
        images=len(dataset.train),
    )
    decode, decoder, normalize = _choose_decoding(recipe.data, dataset, env)
    block_length = images_per_block(dataset.train, recipe.data.block_mib, sizes.steps_per_epoch)
    task = _task_of(recipe, user_task, dataset, normalize)
    phase(f"connecting {plural(rank.world_size, 'rank')}")
    group = start_group(rank, worker, recipe.comm.backend, recipe.comm.timeout_s, env, job_settings(asked, dataset))
    if context.check and group.backend == ccl.BACKEND:
        raise_binding_error(worker, misplaced_comm_threads(rank.local_rank, env, threads_of(os.getpid())))
    local_batches = _local_batches(recipe.batch.local, recipe.plan.balance, worker, sizes)
    if not recipe.data.generated:
        used = {split: images for split, images in dataset.splits.items() if split in splits}
        check_sample(used, decode, recipe.data.crop, recipe.data.max_damaged, rank)
    session = Session(
        context=context,
        recipe=recipe,
        precision_why="",
        sizes=sizes,
        schedule=schedule_of(recipe.schedule, recipe.phases, sizes),
        group=group,
        local_batches=local_batches,
        dataset=dataset,
        decode=decode,
        decoder=decoder,
        normalize=normalize,
        block_length=block_length,
        task=task,
        engine=agree_on_operators(all_gather(problem), agree_on_engine(all_gather((engine.name, engine.why)), engine)),
        team=team,
        memory_share=share,
    )
    if asked.precision == "auto":
        session = _with_chosen_precision(session, user_task, resume=resume)
    if measured and recipe.engine == "auto":
        chosen = session.recipe
        engine = with_measured_engine(session.engine, request_of(chosen), chosen.precision, env)
        session = replace(session, engine=_with_operators_as(session.engine, engine, env))
    return session


def _with_chosen_precision(session: Session, user_task: UserTask | None, *, resume: bool) -> Session:
    """Return the session of a recipe with precision=auto, begun in float32, in the precision that all ranks choose."""
    session.context.startup.phase("choosing the precision")
    recipe, env = session.recipe, session.context.env
    first = first_precision(recipe.folder) if resume and session.is_main_rank else None
    trial = Trial(
        model=recipe.model,
        optim=recipe.optim,
        engine_setting=recipe.engine,
        task=session.task,
        engine=session.engine,
        images=session.mean_local_batch,
        side=recipe.data.crop,
        workers=session.rank.local_world_size,
        cpus=tuple(all_gather(this_machine().model)),
        env=env,
    )
    choice = choose_precision(trial, first)
    if choice.precision == recipe.precision:
        return replace(session, precision_why=choice.why)
    recipe = recipe.model_copy(update={"precision": choice.precision})
    engine = _engine_of(recipe.engine, recipe.precision, user_task, env)
    return replace(
        session,
        recipe=recipe,
        precision_why=choice.why,
        task=_task_of(recipe, user_task, session.dataset, session.normalize),
        engine=_with_operators_as(session.engine, agree_on_engine(all_gather((engine.name, engine.why)), engine), env),
    )


def _with_operators_as(before: Engine, engine: Engine, env: Mapping[str, str]) -> Engine:
    """Return another engine, with kernels below torch's operators if it has them and the ranks had agreed on them."""
    engine = replace(engine, operators=engine.operators and before.operators)
    register_operators(engine, env)
    return engine


def _engine_of(name: str, precision: str, user_task: UserTask | None, env: Mapping[str, str]) -> Engine:
    if user_task is None or name != "auto" or _has_images(user_task.network):
        return choose_engine(name, precision, env)
    return replace(NO_LAYERS, operators=precision != "float64")  # kernels of layers would be compiled for nothing


def _task_of(
    recipe: Recipe, user_task: UserTask | None, dataset: Dataset, normalize: Callable[[Tensor], Tensor]
) -> Task:
    if user_task:
        return user_task.task(recipe.precision)
    return recipe_task(recipe, len(dataset.classes), _features_of(dataset), normalize)


def recipe_task(recipe: Recipe, classes: int, features: int | None, normalize: Callable[[Tensor], Tensor]) -> Task:
    """Return the task of a recipe, for images or, with `features`, for rows of that many values."""
    augment = recipe.data.augment
    shape = (3, recipe.data.crop, recipe.data.crop) if features is None else (features,)

    def losses(outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return sample_losses(recipe.loss, outputs, targets, smoothing)

    def example(count: int) -> tuple[Tensor, Tensor]:
        return to_weight_dtype(torch.zeros(count, *shape), recipe.precision), torch.zeros(count, dtype=torch.int64)

    return Task(
        build=lambda: build_model(recipe.model, classes, recipe.data.crop, features),
        inputs=lambda batch: to_weight_dtype(normalize(batch.images), recipe.precision),
        losses=losses,
        example=example,
        classifies=features is None,
        traceable=True,
        mix=build_mixup(augment.mixup, augment.cutmix, recipe.model.classes or classes, recipe.seed),
        label_smoothing=recipe.label_smoothing,
    )


def _features_of(dataset: Dataset) -> int | None:
    return dataset.train.x.shape[1] if isinstance(dataset.train, Points) else None


def _choose_decoding(
    data: DataSettings, dataset: Dataset, env: Mapping[str, str]
) -> tuple[Decode, str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the functions that decode and normalize images, the first with its description."""
    if isinstance(dataset.train, Points | UserSamples):
        return decode_by_pillow, f"none: {data.kind}", lambda x: x
    return (*choose_decoder(data.decoder, env), choose_normalize(data.mean, data.std, data.decoder, env))


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
        raise_binding_error(
            worker, misplaced_threads(worker, team) + (misallocated_memory(worker, share) if bound else [])
        )
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


def _local_batches(local: int, balance: str, worker: WorkerPlan, sizes: TrainingSizes) -> tuple[int, ...]:
    """Return every rank's local batch: `local`, the recipe's, or the plan's if `balance` is not "equal". Raises
    InputError if the plan's do not fit the recipe or leave a rank without images."""
    batches = tuple(all_gather(local if balance == "equal" else worker.local_batch or 0))
    if sum(batches) != local * len(batches):
        raise InputError(f"the mean of the plan's local batches {batches} is not {local}: plan with this recipe")
    images = sizes.used_images_per_epoch // sizes.steps_per_epoch
    if images * min(batches) // sum(batches) < sizes.accumulation_steps:
        raise InputError(
            f"{plural(images, 'image')} a step, split in proportion to {batches}, leave a rank without images in some "
            f"of {plural(sizes.accumulation_steps, 'accumulation step')}: set plan.balance=equal"
        )
    return batches


def _has_images(network: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d | nn.BatchNorm2d) for layer in network.modules())
