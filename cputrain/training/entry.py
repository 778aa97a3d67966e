"""Training in one rank, start to end: of a recipe, or of a user's network, loss and samples with `cputrain.train`."""

import faulthandler
import json
import os
import resource
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from cputrain.affinity.errors import InputError, SettingsError, as_argument
from cputrain.affinity.filesystem import write_bytes
from cputrain.affinity.kernel.binding import bind_process, bind_thread
from cputrain.affinity.kernel.bound_plan import (
    PLAN_VARIABLE,
    WORKER_VARIABLE,
    bound_worker,
    plan_for_rank,
    plan_in_memory,
)
from cputrain.affinity.ranks.rank import Rank, rank_from_env
from cputrain.affinity.terminal import CODES
from cputrain.affinity.wording import first_named, plural
from cputrain.checkpoint.folder import remove_partial
from cputrain.comm.group import abandon_group, all_gather, end_group, no_exit_limit, run_on_main_rank
from cputrain.comm.hooks import AllReduceHook
from cputrain.data.formats.dataset import Collate, Dataset, UserSamples
from cputrain.data.formats.shards import staged
from cputrain.files import CHECKPOINTS, ENVIRONMENT, PLAN, write_text
from cputrain.kernels.evidence import restore as restore_layers
from cputrain.kernels.rewriting import left_to_torch
from cputrain.launch.local import request_of
from cputrain.launch.rank_process import RankContext, StartOptions, rank_context, run_rank
from cputrain.measurements import save_bf16_gain
from cputrain.models.networks import inputs_note
from cputrain.models.weights import HALF, load_initial_weights, normalization_of
from cputrain.mpi.supervise.run import free_port
from cputrain.mpi.supervise.signals import end_by
from cputrain.mpi.usage import FOLDER as USAGE
from cputrain.mpi.usage import Sampler
from cputrain.optim import build_optimizer
from cputrain.recipe.loading import load_recipe, recipe_of
from cputrain.recipe.schema import USER_SAMPLES, DataSection, ModelSection, Recipe
from cputrain.report.page import write_report
from cputrain.runs.events import EventLog, SilentEvents, check_log_formats, open_events, time_spent
from cputrain.runs.folder import (
    check_folder,
    continues_run,
    finished,
    locked,
    make_folder,
    with_same_global_batch,
    wording_for,
)
from cputrain.runs.trackers import Trackers
from cputrain.training.engine import bf16_speedups, convert_weights, has_bf16, optimize_training, prepare_model
from cputrain.training.log import (
    REDRAW_S,
    Progress,
    TrainingLog,
    binding_record,
    describe_environment,
    startup_lines,
    summary_lines,
)
from cputrain.training.loop import TrainingLoop
from cputrain.training.saving import (
    Loaded,
    Position,
    check_learner,
    lacks_buffers,
    load_newest,
    rename_damaged,
    restore,
)
from cputrain.training.session import Session, plan_network, start_session, with_measured_engine
from cputrain.training.signals import Preemption, handlers_restored, ignore_preemption
from cputrain.training.state import (
    Learner,
    TrainState,
    copies_of_buffers,
    make_dense,
    make_train_state,
    restore_buffers,
)
from cputrain.training.step import Loss, Task, TrainResult, UserTask
from cputrain.training.watchers import TrackerCheck
from cputrain.variables import is_restarted, lock_name_in


def start_training(session: Session, events: EventLog, options: StartOptions) -> TrainingLoop:
    """Build a training, restored from the newest checkpoint with options.resume. Raises InputError if the state cannot
    be saved or the checkpoint does not fit."""
    env, rank = session.context.env, session.rank.rank
    recipe, sizes = session.recipe, session.sizes
    folder = recipe.folder / CHECKPOINTS
    if session.is_main_rank:
        remove_partial(folder)
    found = load_newest(folder, rank, wording_for(recipe)) if options.resume else None
    state, notes = build_state(session, found)
    position = found.position if found else Position()
    # Under cputrain's launcher the job redraws the bar or prints it as lines; a notebook redraws it, too.
    redrawn = session.context.startup.redrawn or "ipykernel" in sys.modules
    progress = Progress(
        sizes.images_until(position.step),
        sizes.images_until(sizes.last_step(recipe.max_steps)),
        unit=" img" if recipe.data.unit == "images" else f" {recipe.data.unit}",
        shown=session.is_main_rank,
        bar=not options.quiet,
        redrawn=redrawn,
        redraw_s=float(env.get("TQDM_MININTERVAL", REDRAW_S)),
    )
    log = TrainingLog(
        recipe=recipe,
        progress=progress,
        events=events,
        last_step=sizes.last_step(recipe.max_steps),
        steps_per_epoch=sizes.steps_per_epoch,
        quiet=options.quiet,
    )
    for note in notes:
        progress.line(note)
    if found:
        rename_damaged(found, log.warn, position.step, rank)
    loop = TrainingLoop(
        session=session,
        state=state,
        log=log,
        preemption=Preemption(session.group.keys, is_main_rank=session.is_main_rank, prepared=options.prepared),
        position=position,
    )
    try:
        loop.saver.try_out(position)
    except InputError:
        progress.close()
        raise
    return loop


def build_state(
    session: Session, loaded: Loaded | None, all_reduce: AllReduceHook | None = None
) -> tuple[TrainState, list[str]]:
    """Build network and optimizer, or restore them from a checkpoint; also return lines about the initial weights and
    Winograd layers. `all_reduce` replaces the recipe's communication hook."""
    recipe, task, notes = session.recipe, session.task, []
    network = task.build()
    if not task.traceable:
        notes += prepare_own_network(network, task, recipe.precision)
    if recipe.model.weights is not None and loaded is None:
        path = Path(recipe.model.weights)
        # DDP sends rank 0's weights to all ranks
        if line := run_on_main_rank(lambda: load_initial_weights(network, path)):
            notes.append(line)
        if (settings := normalization_of(path)) and (recipe.data.mean, recipe.data.std) != (HALF, HALF):
            notes.append(f"{path.name} expects images normalized by 0.5, as by transform_input: set {settings}")
    if loaded is None and (note := inputs_note(network, recipe.model.name, recipe.data)):
        notes.append(note)
    stored = loaded.manifest.training.winograd if loaded else None
    engine, plan, winograd = plan_network(session, network, session.mean_local_batch, stored)
    prepare_model(network, engine, recipe.precision, plan)
    if session.engine.kernels is not None and (left := left_to_torch(network)):
        notes.append(left)
    learner = Learner(network, task.losses, recipe.precision, task.loss_module)
    check_learner(learner)
    if winograd:
        notes.append(f"convolutions by Winograd's algorithm: {plural(len(winograd), 'layer')}")
    optimizer = build_optimizer(network, recipe.optim, task.loss_module)
    learner.network, optimizer = optimize_training(network, optimizer, session.engine)
    measured = None
    if loaded is not None and loaded.same_ranks and recipe.comm.bucket_mib == "auto":
        measured = loaded.manifest.training.bucket_mib
    state = make_train_state(recipe, learner, optimizer, measured, all_reduce)
    state.winograd = winograd
    if loaded is None:
        return state, notes
    if session.rank.world_size > 2 or lacks_buffers(state.network, loaded):
        _rebuild_buckets(state, session)
    notes += restore(loaded, state, recipe.optim.name)
    return state, notes


def prepare_own_network(network: nn.Module, task: Task, precision: str) -> list[str]:
    """Convert a user's network and loss to the precision of weights, initialize lazy modules by a forward pass of an
    example, and make sparse gradients dense; return lines about changes. Raises InputError if a layer stays lazy."""
    parts = [network] if task.loss_module is None else [network, task.loss_module]
    for part in parts:
        convert_weights(part, precision)
    learner = Learner(network, task.losses, precision, task.loss_module)
    if _lazy_names(learner):
        learner.eval()  # without a change of statistics, and for layers that need more than one sample
        with torch.no_grad():
            learner(*task.example(2), 0.0)
        learner.train()
    if _lazy_names(learner):  # used in training only
        _initialize_in_training(learner, task)
    if names := _lazy_names(learner):
        raise InputError(f"the network's forward pass does not initialize {first_named(names)}: remove these layers")
    if not learner.trained():
        raise InputError("no parameter of the network requires a gradient: set requires_grad of those to train")
    dense = make_dense(learner)
    note = f"gradients of {first_named(dense)} are dense: sparse ones cannot be summed over ranks by every backend"
    return [note] if dense else []


def _initialize_in_training(learner: Learner, task: Task) -> None:
    """Initialize lazy modules by a forward pass in training mode that leaves all buffers as they are."""
    buffers = copies_of_buffers(learner)

    def save(place: str, module: nn.Module, _inputs: Any) -> None:
        """Add a module's buffers once they are initialized."""
        for (inner, name), value in copies_of_buffers(module).items():
            if not inner:
                buffers.setdefault((place, name), value)

    lazy = {place: part for place, part in learner.named_modules() if any(map(is_lazy, part.buffers(recurse=False)))}
    hooks = [part.register_forward_pre_hook(partial(save, place)) for place, part in lazy.items()]
    with torch.no_grad():
        learner(*task.example(2), 0.0)
    for hook in hooks:
        hook.remove()
    restore_buffers(learner, buffers)


def _lazy_names(learner: Learner) -> list[str]:
    return [name for name, value in (learner.weights() | learner.all_buffers()).items() if is_lazy(value)]


def _rebuild_buckets(state: TrainState, session: Session) -> None:
    """Make DDP assign gradients to the buckets it uses from its second step on, so that sums over more than two ranks
    round as in an uninterrupted run; buffers that only a forward pass registers appear. This takes one pass; restore
    the state afterwards."""
    inputs, targets = session.task.example(session.mean_local_batch)
    with ExitStack() as stack:
        _, losses = state.forward(inputs, targets, session.recipe.label_smoothing, stack, reduces=True)
        losses.sum().backward()  # type: ignore[no-untyped-call]
    state.optimizer.zero_grad()
    state.all_reduce.reset()


def train_rank(
    context: RankContext, recipe: Recipe, options: StartOptions, own: UserTask | None = None
) -> TrainResult | None:
    """Train as one rank. Return the result, or None if the run in the recipe's folder is already finished. With `own`,
    a user's network and data, a finished run is restored instead, because the caller expects trained weights."""
    session = start_session(context, recipe, own=own)
    if own is None:  # engines are only measured for recipes' networks
        session = with_measured_engine(session)
    # After a restart, `resume` depends on the run folder, which another host's file system may show later.
    options = replace(options, resume=all_gather(options.resume)[0])
    with Trackers() as trackers:
        with ExitStack() as stack:
            message = None
            if not options.prepared:
                ends = options.resume and own is None
                message = run_on_main_rank(lambda: _make_run(session, stack, options, ends=ends))
            if finished_run := all_gather(message)[0]:
                if session.is_main_rank:
                    print(finished_run, flush=True)
                end_group(session.group)
                return None
            if not options.prepared:
                stack.enter_context(sample_usage(recipe.folder, context.rank, context.loader_pus))
            stack.enter_context(staged(session.data.dataset, recipe.data.stage_dir, context.rank, context.loader_pus))
            result = _run_training(session, options, trackers)
        peaks = all_gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        ignore_preemption()
        end_group(session.group)
        if session.is_main_rank:  # after the group has ended: waiting ranks would keep their cores busy
            with no_exit_limit():
                _print_summary(session, result, max(peaks))
                print(*(f"{line}\n" for line in trackers.finish()), sep="", end="", flush=True)  # with the report
    if result.ends_by:
        end_by(result.ends_by)
    return result


def _run_training(session: Session, options: StartOptions, trackers: Trackers) -> TrainResult:
    recipe, startup = session.recipe, session.context.startup
    bindings = all_gather(binding_record(session))
    if not session.is_main_rank:
        return start_training(session, SilentEvents(), options).run()
    startup.phase("measuring this CPU")
    environment = describe_environment(session)
    write_text(recipe.folder / ENVIRONMENT, json.dumps(environment, indent=1))
    speedups = bf16_speedups() if recipe.precision == "float32" and has_bf16() else []
    if speedups:
        save_bf16_gain(speedups, session.context.env)
    startup.phase("building the network and the optimizer")
    with open_events(recipe) as events:
        training = start_training(session, events, options)
        if training.state.winograd is not None:
            environment["winograd"] = list(training.state.winograd)
            write_text(recipe.folder / ENVIRONMENT, json.dumps(environment, indent=1))
        ready = startup.done()
        if not options.quiet:
            lines = startup_lines(environment, ranks=session.rank.world_size, bf16_speedup=median(speedups or [1.0]))
            notes = () if options.prepared else session.data.dataset.notes
            print("\n".join((*notes, *lines, ready)), flush=True)
        events.write(
            "start",
            recipe=recipe.name,
            data=recipe.data.kind,
            backend=session.group.backend,
            bindings=bindings,
            last_step=session.sizes.last_step(recipe.max_steps),
            steps_per_epoch=session.sizes.steps_per_epoch,
            **session.scale.model_dump(),
        )
        trackers.start(recipe.folder, recipe.log, session.context.loader_pus, session.context.env)
        training.watchers.append(TrackerCheck(trackers=trackers, warn=training.log.warn))
        result = training.run()
        _write_end(events, session, result)
    return result


def _write_end(events: EventLog, session: Session, result: TrainResult) -> None:
    accuracy, test = result.accuracy, result.test
    spent = time_spent(session.recipe.folder, result.ended)
    events.write(
        "end",
        step=result.step,
        data=session.recipe.data.kind,
        top1=accuracy.top1 if accuracy else None,
        top5=accuracy.top5 if accuracy else None,
        val_loss=accuracy.loss if accuracy else None,
        test_top1=test.top1 if test else None,
        test_top5=test.top5 if test else None,
        steps=result.step,
        images=session.sizes.images_until(result.step),
        time_to_train_s=spent.training_s,
        wall_time_s=spent.wall_s,
        starts=spent.starts,
        trained_until=result.ended["time"],
        trained_until_monotonic_s=result.ended["monotonic_s"],
        status="done" if accuracy else "stopped",
    )


def _make_run(session: Session, stack: ExitStack, options: StartOptions, *, ends: bool) -> str | None:
    """Check, lock (until `stack` closes) and create the run folder. With `ends`, if the run is finished, write nothing
    and return a message."""
    recipe, env = session.recipe, session.context.env
    restarted, job = is_restarted(env), lock_name_in(env)
    replaces = {"resume": options.resume, "overwrite": options.overwrite}
    resumption = check_folder(recipe, session.scale, **replaces, restarted=restarted, job=job)
    if ends and (message := finished(recipe.folder, session.sizes.last_step(recipe.max_steps))):
        return message
    if resumption:
        print(resumption, flush=True)
    stack.enter_context(locked(recipe.folder, restarted=restarted, job=job))
    make_folder(recipe, **replaces)
    write_bytes(recipe.folder / PLAN, Path(env[PLAN_VARIABLE]).read_bytes())
    return None


def _print_summary(session: Session, result: TrainResult, peak_bytes: int) -> None:
    folder = session.recipe.folder
    estimate = session.context.worker.memory_bytes
    steps, spent = session.sizes.total_steps, time_spent(folder)
    print("\n".join(summary_lines(result, steps, spent, session.recipe, peak_bytes, estimate)))
    if result.accuracy is not None:
        print(f"report               {write_report(folder)}")


POLL_S = 0.5


@contextmanager
def sample_usage(folder: Path, rank: Rank, pus: Collection[int]) -> Iterator[None]:
    """Record resource usage of this rank, and of the host on local rank 0, in the run folder, in a thread on `pus`."""
    sampler = Sampler(folder / USAGE, {rank.rank: os.getpid()}, whole_host=rank.local_rank == 0)
    done = threading.Event()

    def sample() -> None:
        bind_thread(tuple(pus))
        while not done.wait(POLL_S):
            sampler.tick()

    thread = threading.Thread(target=sample, name="cputrain-usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sampler.close()


ALONE = Rank(rank=0, world_size=1, local_rank=0, local_world_size=1, convention="alone")
REPLACED_KEYS = ("model.", "data.", "loss", "label_smoothing")  # keys that the user's code replaces
KEPT_KEYS = ("data.last_batch", "data.images_per_epoch")  # exceptions, which still apply


def train(
    network: nn.Module,
    loss: Loss,
    train_data: Any,
    val_data: Any = (),
    *,
    test_data: Any = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    recipe: str | None = None,
    classes: Sequence[str] | None = None,
    collate: Collate = default_collate,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> TrainResult:
    """Train your own network with the plan, DDP, optimizers, schedules, checkpoints and report of a recipe.

    The same script works in one process and on many ranks: `cputrain launch -- python mine.py`, torchrun, mpirun, srun.
    Every rank calls this with the same arguments, from its main thread.

    network: trained in place; called with the inputs of a batch. All ranks start from rank 0's initial weights; call
        torch.manual_seed before you build it to get the same weights in every run.
    loss: called with the outputs and targets of N samples; returns their losses, shape (N,), or the mean, shape ().
        Parameters and buffers of a loss that is a module, or a method or functools.partial of one, are trained, summed
        and saved like the network's.
    train_data, val_data, test_data: map-style datasets, such as torch Datasets, that return (input, target) pairs, the
        same on all ranks. A thread reads the samples in an order that is shuffled by seed and epoch. Random
        augmentation must depend on sample and epoch only (`set_epoch(epoch)` is called if it exists); otherwise a
        resumed training differs. Without val_data nothing is evaluated.
    settings: recipe keys, {"epochs": 3, "optim.name": "lars"} or ["epochs=3"]; `output` is the run folder. Keys of
        model, images, loss and label_smoothing cannot be set, because your code replaces them.
    recipe: a recipe file or the name of a shipped recipe: its optimizer, schedule and sizes are used for keys that are
        not in settings, its network, data and loss are not.
    classes: class names, if targets are class indices (N,) int64 and outputs are logits (N, len(classes)); top-1 and
        top-5 are then computed.
    collate: makes the inputs and targets of a batch from a list of samples; torch's default stacks them.
    resume: continue from the newest checkpoint of the run in `output`. A rank that torchrun or cputrain launch has
        restarted always does.
    overwrite: delete the run in `output` first. quiet: print only warnings and the summary.

    Returns the result, the same on all ranks: `step`, `accuracy.loss`, `accuracy.top1` in percent (None without
    classes), `test`; `accuracy` is None if a signal stopped the training.
    Raises InputError if arguments do not fit, RunError if the training fails. With several ranks, the failing process
    prints its error and exits with status 2 or 1, so that the launcher ends the other ranks.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError("train was called in a thread, where signals cannot stop it: call it in the main thread")
    if dist.is_initialized():
        raise InputError(
            "train was called with a process group, but makes its own: call destroy_process_group() before"
        )
    training = _own_recipe(recipe, settings)
    env = os.environ  # of the launcher for this rank; torch reads there, too, what is set for a process alone
    check_log_formats(training.log, env)
    own = UserTask(
        network=network,
        loss=loss,
        dataset=_own_dataset(train_data, val_data, test_data, classes, collate),
        classifies=classes is not None,
    )
    try:
        with handlers_restored(), environment_restored(env):
            return _train_own(training, own, env, StartOptions(resume=resume, overwrite=overwrite, quiet=quiet))
    except SettingsError as error:
        error.wording = as_argument
        raise
    finally:
        restore_layers(network)


def _own_dataset(train: Any, val: Any, test: Any, classes: Sequence[str] | None, collate: Collate) -> Dataset:
    return Dataset(
        classes=tuple(map(str, classes or ())),
        train=UserSamples(train, collate, "training"),
        val=UserSamples(val, collate, "validation"),
        test=None if test is None else UserSamples(test, collate, "test"),
    )


def _train_own(training: Recipe, own: UserTask, env: MutableMapping[str, str], options: StartOptions) -> TrainResult:
    """Train as this process's rank, or as the only process if it was not launched as a rank."""
    rank = rank_from_env(env)
    if rank is None:
        rank = ALONE
        env["MASTER_PORT"] = str(free_port())
    if continues_run(training.folder, env, overwrite=options.overwrite):
        options = replace(options, resume=True, overwrite=False)
        training = with_same_global_batch(training, rank.world_size)
    if rank.rank == 0 and (note := note_on_ppn(training.plan.ppn, rank)):
        print(note, flush=True)
    context = _bind(training, rank, env, shown=not options.quiet)
    found: list[TrainResult] = []

    def work() -> None:
        result = train_rank(context, training, options, own)
        assert result is not None, "only a recipe's finished run returns None"
        found.append(result)

    if rank.world_size > 1:
        run_rank(rank, work, as_argument)
        return found[0]
    try:
        work()
    finally:
        abandon_group()  # left over if the training failed; a notebook may try again
    return found[0]


def note_on_ppn(ppn: int | str, rank: Rank) -> str:
    """Return a line if the setting plan.ppn differs from the number of ranks that were started, "" if not."""
    if ppn in ("auto", rank.local_world_size):
        return ""
    started = f"this script was started with {plural(rank.local_world_size, 'rank')} on this host"
    return f"plan.ppn={ppn} has no effect, because {started}: start it with cputrain launch --ppn {ppn}"


def _own_recipe(base: str | None, settings: Mapping[str, Any] | Sequence[str]) -> Recipe:
    """Build the recipe for own code from settings, and from `base` without its model, data and loss. Raises InputError
    for a setting that own code replaces."""
    if isinstance(settings, Mapping):
        settings = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    for setting in settings:
        key = setting.partition("=")[0]
        if key in ("resume", "overwrite", "quiet"):
            raise InputError(f"setting {key} is no recipe key: give train the argument {key}=True")
        if key.startswith(REPLACED_KEYS) and key not in KEPT_KEYS:
            raise InputError(f"setting {key} has no effect with your own network, loss and data: remove it")
    settings = (*settings, f"data.path={USER_SAMPLES}")
    recipe = load_recipe(base, settings) if base else recipe_of({}, Path("settings"), settings=settings)
    data = {key.removeprefix("data."): getattr(recipe.data, key.removeprefix("data.")) for key in KEPT_KEYS}
    without_images = {"crop": None, "train_crop": None}
    return recipe.model_copy(
        update={
            "model": ModelSection(),
            "data": DataSection().model_copy(update={"path": USER_SAMPLES, **data}),
            "phases": tuple(phase.model_copy(update=without_images) for phase in recipe.phases),
            "loss": "cross_entropy",
            "label_smoothing": 0.0,
        }
    )


def _bind(recipe: Recipe, rank: Rank, env: MutableMapping[str, str], *, shown: bool) -> RankContext:
    """Bind this process as a rank, or verify its binding if `cputrain launch` or affinity.bind has bound it.

    The threads of a process that is bound here are not checked: its libraries are loaded already, so that the plan's
    allocator and the pinning of each thread need `cputrain launch`.
    """
    worker = bound_worker(env)
    check = worker is not None
    if worker is None:
        request = replace(request_of(recipe), workload=None, allocator="glibc")
        from cputrain.predict.next_best import compare_plan  # bound ranks need no model

        plan, index = plan_for_rank(request, rank, (), env, compare=compare_plan)
        worker = plan.workers[index]
        bind_process(worker)
        env[PLAN_VARIABLE], env[WORKER_VARIABLE] = str(plan_in_memory(plan)), str(worker.local_rank)
    return rank_context(rank, worker, env, check=check, shown=shown)


@contextmanager
def environment_restored(env: MutableMapping[str, str]) -> Iterator[None]:
    """Restore environment variables and streams on exit, and cancel the limit on the time until the process exits."""
    variables = dict(env)
    streams = [(each, each.errors) for each in (sys.stdout, sys.stderr) if isinstance(each, TextIOWrapper)]
    for stream, _ in streams:
        stream.reconfigure(errors=CODES)  # a name that the locale cannot encode must not end the training
    try:
        yield
    finally:
        for stream, errors in streams:
            stream.reconfigure(errors=errors)
        faulthandler.cancel_dump_traceback_later()
        env.clear()
        env.update(variables)
