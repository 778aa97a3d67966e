"""One rank of a training, from its start to its end."""

import json
import os
import resource
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from cputrain.affinity.errors import InputError
from cputrain.affinity.kernel.binding import bind_thread
from cputrain.affinity.kernel.bound_plan import PLAN_VARIABLE
from cputrain.affinity.ranks.rank import Rank
from cputrain.affinity.terminal import redraws
from cputrain.affinity.wording import counted
from cputrain.checkpoints import remove_partial
from cputrain.comm.group import all_gather, end_group, no_exit_limit, run_on_main_rank
from cputrain.data.formats.shards import staged
from cputrain.files import CHECKPOINTS, ENVIRONMENT, PLAN, write_atomic, write_text
from cputrain.launch.rank_process import RankContext, StartOptions
from cputrain.measurements import keep_bf16_gain
from cputrain.models.weights import HALF, load_initial_weights, normalization_of
from cputrain.mpi.supervise.signals import end_by
from cputrain.mpi.usage import FOLDER as USAGE
from cputrain.mpi.usage import Sampler
from cputrain.optim import build_optimizer
from cputrain.recipe.schema import Recipe
from cputrain.report.page import write_report
from cputrain.runs.events import EventLog, SilentEvents, open_events, time_spent
from cputrain.runs.folder import check_folder, finished, locked, make_folder
from cputrain.training.engine import autocast, bf16_speedups, has_bf16, optimize_training, prepare_model
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
from cputrain.training.saving import Loaded, Position, check_savable, find_newest, put_back, set_damaged_aside
from cputrain.training.session import Session, choose_winograd, start_session, with_measured_engine
from cputrain.training.signals import Preemption, ignore_preemption
from cputrain.training.step import OwnTask, TrainResult, TrainState, make_train_state, sum_of
from cputrain.variables import is_restarted, lock_name_in


def start_training(session: Session, events: EventLog, options: StartOptions) -> TrainingLoop:
    """Build the training. Raises InputError."""
    env, rank = session.context.env, session.rank.rank
    recipe, sizes = session.recipe, session.sizes
    folder = recipe.folder / CHECKPOINTS
    if session.is_main_rank:
        remove_partial(folder)
    found = find_newest(folder, rank) if options.resume else None
    state, notes = build_state(session, found)
    check_savable(state.network)
    position = found.position if found else Position()
    progress = Progress(
        sizes.images_until(position.step),
        sizes.images_until(sizes.last_step(recipe.max_steps)),
        unit=" img" if recipe.data.unit == "images" else f" {recipe.data.unit}",
        shown=session.is_main_rank,
        bar=not options.quiet and (redraws(sys.stderr, env) or not sys.stderr.isatty()),
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
        set_damaged_aside(found, log.warn, position.step, rank)
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


def build_state(session: Session, loaded: Loaded | None) -> tuple[TrainState, list[str]]:
    """The network and its optimizer, new or as in a checkpoint; and lines about where the weights are from."""
    recipe, notes = session.recipe, []
    network = session.task.build()
    if recipe.model.weights is not None and loaded is None:
        path = Path(recipe.model.weights)
        # DDP sends rank 0's weights to all ranks
        if line := run_on_main_rank(lambda: load_initial_weights(network, path)):
            notes.append(line)
        if (settings := normalization_of(path)) and (recipe.data.mean, recipe.data.std) != (HALF, HALF):
            notes.append(f"{path.name} is of images normalized by 0.5, torchvision's transform_input: set {settings}")
    prepare_model(network, session.engine, recipe.precision)
    stored = loaded.manifest.training.winograd if loaded else None
    chosen = choose_winograd(session, network, session.mean_local_batch, stored)
    winograd = None if chosen is None else tuple(chosen)
    if winograd is not None:
        notes.append(f"convolutions by Winograd's algorithm: {counted(len(winograd), 'layer')}")
    optimizer = build_optimizer(network, recipe.optim)
    network, optimizer = optimize_training(network, optimizer, session.engine)
    if loaded is None:
        return replace(make_train_state(recipe, network, optimizer), winograd=winograd), notes
    measured = loaded.manifest.training.bucket_mib if loaded.same_ranks and recipe.comm.bucket_mib == "auto" else None
    state = replace(make_train_state(recipe, network, optimizer, measured), winograd=winograd)
    if session.rank.world_size > 2:
        _rebuild_buckets(state, session)
    put_back(loaded, state, recipe.optim.name)
    return state, notes


def _rebuild_buckets(state: TrainState, session: Session) -> None:
    """Make DDP put gradients into the buckets that it has from its second step on: sums of more than two ranks are
    rounded differently in others. It takes a backward pass, after which everything is restored."""
    with autocast(session.recipe.precision):
        outputs = state.ddp(session.task.example(session.mean_local_batch))
    sum_of(outputs).backward()  # type: ignore[no-untyped-call]
    state.optimizer.zero_grad()
    state.all_reduce.reset()


def train_rank(
    context: RankContext, recipe: Recipe, options: StartOptions, own: OwnTask | None = None
) -> TrainResult | None:
    """Train as one rank; the result, None where the run in the recipe's folder is finished. `own` is a user's own
    network and data, whose run is never left alone: the network is to have its weights."""
    session = start_session(context, recipe, own=own)
    if own is None:  # what was measured are recipes' networks
        session = with_measured_engine(session)
    # after a restart it depends on the folder, which another host may see later
    options = replace(options, resume=all_gather(options.resume)[0])
    with ExitStack() as held:
        message = None
        if not options.prepared:
            ends = options.resume and own is None
            message = run_on_main_rank(lambda: _make_run(session, held, options, ends=ends))
        if finished_run := all_gather(message)[0]:
            if session.is_main_rank:
                print(finished_run, flush=True)
            end_group(session.group)
            return None
        if not options.prepared:
            held.enter_context(sample_usage(recipe.folder, context.rank, context.loader_pus))
        held.enter_context(staged(session.data.dataset, recipe.data.stage_dir, context.rank, context.loader_pus))
        result = _train(session, options)
    peaks = all_gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    ignore_preemption()
    end_group(session.group)
    if session.is_main_rank:  # without the others, which would keep their cores busy while they wait
        with no_exit_limit():
            _print_summary(session, result, max(peaks))
    if result.ends_by:
        end_by(result.ends_by)
    return result


def _train(session: Session, options: StartOptions) -> TrainResult:
    recipe, startup = session.recipe, session.context.startup
    bindings = all_gather(binding_record(session))
    if not session.is_main_rank:
        return start_training(session, SilentEvents(), options).run()
    startup.phase("measuring this CPU")
    environment = describe_environment(session)
    write_text(recipe.folder / ENVIRONMENT, json.dumps(environment, indent=1))
    speedups = bf16_speedups() if recipe.precision == "float32" and has_bf16() else []
    if speedups:
        keep_bf16_gain(speedups, session.context.env)
    startup.phase("building the network and the optimizer")
    with open_events(recipe) as events:
        training = start_training(session, events, options)
        if training.state.winograd is not None:
            environment["winograd"] = training.state.winograd
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


def _make_run(session: Session, held: ExitStack, options: StartOptions, *, ends: bool) -> str | None:
    """Check and make the run's folder, locked in `held`; with `ends`, return a message about a finished run and write
    nothing."""
    recipe, env = session.recipe, session.context.env
    restarted, job = is_restarted(env), lock_name_in(env)
    replaces = {"resume": options.resume, "overwrite": options.overwrite}
    resumption = check_folder(recipe, session.scale, **replaces, restarted=restarted, job=job)
    if ends and (message := finished(recipe.folder, session.sizes.last_step(recipe.max_steps))):
        return message
    if resumption:
        print(resumption, flush=True)
    held.enter_context(locked(recipe.folder, restarted=restarted, job=job))
    make_folder(recipe, None, overwrite=options.overwrite)
    write_atomic(recipe.folder / PLAN, Path(env[PLAN_VARIABLE]).read_bytes())
    return None


def _print_summary(session: Session, result: TrainResult, peak_bytes: int) -> None:
    folder = session.recipe.folder
    estimate = session.context.worker.memory_bytes
    steps, kind = session.sizes.total_steps, session.recipe.data.kind
    print("\n".join(summary_lines(result, steps, time_spent(folder), kind, peak_bytes, estimate)))
    if result.accuracy is not None:
        print(f"report               {write_report(folder)}")


POLL_S = 0.5


@contextmanager
def sample_usage(folder: Path, rank: Rank, pus: Collection[int]) -> Iterator[None]:
    """Sample this rank, and its host if it is the first rank there, into a run's folder, in a thread on these PUs."""
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
