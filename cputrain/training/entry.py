"""One rank of a training, from its start to its end."""

import json
import resource
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from cputrain.affinity.kernel.bound_plan import PLAN_VARIABLE
from cputrain.affinity.kernel.observe import Observed
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.ranks.rank import Rank
from cputrain.affinity.terminal import redraws
from cputrain.affinity.wording import GIB, counted
from cputrain.checkpoints.folder import remove_partial
from cputrain.comm.group import all_gather, end_group, no_exit_limit, run_on_main_rank
from cputrain.data.staging import staged
from cputrain.files import write_atomic, write_text
from cputrain.launch.rank_process import Startup
from cputrain.measurements import keep_bf16_gain
from cputrain.models.weights import load_initial_weights
from cputrain.optim.build import build_optimizer
from cputrain.recipe.schema import Recipe
from cputrain.report.page import write_report
from cputrain.runs.events import EventLog, SilentEvents, TimeSpent, time_spent
from cputrain.runs.folder import (
    CHECKPOINTS,
    ENVIRONMENT,
    PLAN,
    check_folder,
    finished,
    is_restarted,
    lock_name_in,
    locked,
    make_folder,
)
from cputrain.runs.metric_files import open_logs
from cputrain.training.binding import sample_usage
from cputrain.training.engine import autocast, optimize_training, possible_bf16_speedups, prepare_model
from cputrain.training.environment import binding_record, describe_environment, mean_local_batch
from cputrain.training.log import REDRAW_S, Progress, TrainingLog
from cputrain.training.loop import TrainingLoop, TrainResult
from cputrain.training.metrics import Accuracy
from cputrain.training.preemption import Preemption, end_by, ignore_preemption
from cputrain.training.saving.restore import Loaded, Position, check_savable, find_newest, put_back, set_damaged_aside
from cputrain.training.session import Session, choose_winograd, start_session, with_measured_engine
from cputrain.training.startup_lines import startup_lines
from cputrain.training.step import TrainState, make_train_state
from cputrain.training.task import OwnTask, sum_of


def summary_lines(
    result: TrainResult, steps: int, spent: TimeSpent, kind: str, peak_bytes: int, estimate_bytes: int | None
) -> list[str]:
    """Times, accuracies and memory of a training that has `steps` in all its epochs; `kind` is the recipe's data.kind,
    the bytes are of one worker."""
    accuracy = result.accuracy
    if accuracy is None:
        return [f"stopped by a signal  after step {result.step:,}, checkpoint saved: continue with --resume"]
    resumed = spent.starts > 1
    of_last = ", of the last start" if resumed else ""
    starts = f" over {spent.starts} starts" if resumed else ""
    lines = [f"ended by max_steps   after step {result.step:,} of {steps:,}"] if result.step < steps else []
    lines += [
        f"total training time  {result.trained_s:.1f} s (updates only{of_last})",
        f"time to train        {spent.training_s:.1f} s{starts} (with evaluations and checkpoints)",
    ]
    if resumed:
        lines.append(f"wall time            {spent.wall_s:.1f} s (from the first start to the end, waits included)")
    lines += _accuracy_lines(accuracy, kind)
    if (test := result.test) and test.top1 is not None:
        lines += [
            f"test top-1           {test.top1:.2f} %",
            f"test top-5           {test.top5:.2f} %  ({test.images} {kind}, each once, with the last weights)",
        ]
    estimated = f" (estimated {estimate_bytes / GIB:.2f})" if estimate_bytes else ""
    return [*lines, f"peak memory          {peak_bytes / GIB:.2f} GiB per worker{estimated}"]


def _accuracy_lines(accuracy: Accuracy, kind: str) -> list[str]:
    if accuracy.top1 is not None:
        return [
            f"top-1                {accuracy.top1:.2f} %",
            f"top-5                {accuracy.top5:.2f} %  ({accuracy.images} {kind}, each once)",
        ]
    if accuracy.images:
        return [f"validation loss      {accuracy.loss:.4f}  ({accuracy.images} {kind}, each once)"]
    return [f"data                 {kind}: nothing to evaluate"]


def start_training(
    session: Session, events: EventLog, env: Mapping[str, str], *, resume: bool, prepared: bool, quiet: bool
) -> TrainingLoop:
    """Build the training; with `resume`, restore the run's newest good checkpoint if it has one. `prepared`: a
    launcher has made the run's folder, and sends the ranks the preemption signal when they have to stop. Raises
    InputError."""
    recipe, sizes, ranks = session.recipe, session.sizes, session.ranks
    folder = recipe.folder / CHECKPOINTS
    if ranks.is_main_rank:
        remove_partial(folder)
    found = find_newest(folder, ranks.this.rank) if resume else None
    state, notes = build_state(session, found.loaded if found else None, env)
    check_savable(state.network)
    position = found.loaded.position if found else Position()
    progress = Progress(
        sizes.images_until(position.step),
        sizes.images_until(sizes.last_step(recipe.max_steps)),
        unit=" img" if recipe.data.unit == "images" else f" {recipe.data.unit}",
        shown=ranks.is_main_rank,
        bar=not quiet and (redraws(sys.stderr, env) or not sys.stderr.isatty()),
        redraw_s=float(env.get("TQDM_MININTERVAL", REDRAW_S)),
    )
    last_step = sizes.last_step(recipe.max_steps)
    log = TrainingLog(recipe=recipe, progress=progress, events=events, last_step=last_step, quiet=quiet)
    for note in notes:
        progress.line(note)
    if found:
        set_damaged_aside(found, log.warn, position.step, ranks.this.rank)
    loop = TrainingLoop(
        session=session,
        state=state,
        log=log,
        preemption=Preemption(ranks.group.keys, is_main_rank=ranks.is_main_rank, prepared=prepared),
        position=position,
    )
    loop.saver.try_out(position)
    return loop


def build_state(session: Session, loaded: Loaded | None, env: Mapping[str, str]) -> tuple[TrainState, list[str]]:
    """The network and its optimizer, new or as in a checkpoint; and lines about where the weights are from."""
    recipe, notes = session.recipe, []
    network = session.task.build()
    if recipe.model.weights is not None and loaded is None:
        path = Path(recipe.model.weights)
        # DDP sends rank 0's weights to all ranks
        if line := run_on_main_rank(lambda: load_initial_weights(network, path)):
            notes.append(line)
    prepare_model(network, session.engine, recipe.precision)
    winograd = choose_winograd(
        session, network, mean_local_batch(session), env, loaded.manifest.training.winograd if loaded else None
    )
    if winograd is not None:
        notes.append(f"convolutions by Winograd's algorithm: {counted(len(winograd), 'layer')}")
    optimizer = build_optimizer(network, recipe.optim)
    network, optimizer = optimize_training(network, optimizer, session.engine)
    if loaded is None:
        return replace(make_train_state(recipe, network, optimizer), winograd=winograd), notes
    measured = loaded.manifest.training.bucket_mib if loaded.same_ranks and recipe.comm.bucket_mib == "auto" else None
    state = replace(make_train_state(recipe, network, optimizer, measured), winograd=winograd)
    if session.ranks.this.world_size > 2:
        _rebuild_buckets(state, session)
    put_back(loaded, state, recipe.optim.name)
    return state, notes


def _rebuild_buckets(state: TrainState, session: Session) -> None:
    """Make DDP put gradients into the buckets that it has from its second step on: sums of more than two ranks are
    rounded differently in others. It takes a backward pass, after which everything is restored."""
    with autocast(session.recipe.precision):
        outputs = state.ddp(session.task.example(mean_local_batch(session)))
    sum_of(outputs).backward()  # type: ignore[no-untyped-call]
    state.optimizer.zero_grad()
    state.all_reduce.reset()


def train_rank(
    recipe: Recipe,
    rank: Rank,
    worker: WorkerPlan,
    observed: Observed,
    env: Mapping[str, str],
    *,
    resume: bool,
    overwrite: bool,
    prepared: bool,
    check: bool,
    quiet: bool,
    startup: Startup,
    own: OwnTask | None = None,
) -> TrainResult | None:
    """Train as one rank; the result, None where the run in the recipe's folder is finished. `startup` tells what
    happens before the first step; `quiet` leaves warnings and the summary; `own` is a user's own network and data,
    whose run is never left alone: the network is to have its weights.

    With `prepared`, the launcher has made the run's folder, samples the ranks' use of resources and tells them when to
    stop; otherwise rank 0 checks and makes the folder, and each rank samples itself and handles signals.
    """
    session = start_session(recipe, rank, worker, observed, env, check=check, phase=startup.phase, own=own)
    if own is None:  # what was measured are recipes' networks
        session = with_measured_engine(session, env)
    is_main_rank, loader_pus = session.ranks.is_main_rank, session.binding.loader_pus
    resume = all_gather(resume)[0]  # after a restart it depends on the folder, which another host may see later
    with ExitStack() as held:
        message = None
        if not prepared:
            switches = {"resume": resume, "overwrite": overwrite, "ends": resume and own is None}
            message = run_on_main_rank(lambda: _make_run(session, env, held, **switches))
        if finished_run := all_gather(message)[0]:
            if is_main_rank:
                print(finished_run, flush=True)
            end_group(session.ranks.group)
            return None
        if not prepared:
            held.enter_context(sample_usage(recipe.folder, rank, loader_pus))
        held.enter_context(staged(session.data.dataset, recipe.data.stage_dir, rank, loader_pus))
        result = _train(session, env, startup, resume=resume, prepared=prepared, quiet=quiet)
    peaks = all_gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    ignore_preemption()
    end_group(session.ranks.group)
    if is_main_rank:  # without the others, which would keep their cores busy while they wait
        with no_exit_limit():
            _print_summary(session, result, max(peaks))
    if result.ends_by:
        end_by(result.ends_by)
    return result


def _train(
    session: Session, env: Mapping[str, str], startup: Startup, *, resume: bool, prepared: bool, quiet: bool
) -> TrainResult:
    recipe = session.recipe
    switches = {"resume": resume, "prepared": prepared, "quiet": quiet}
    bindings = all_gather(binding_record(session))
    if not session.ranks.is_main_rank:
        return start_training(session, SilentEvents(), env, **switches).run()
    startup.phase("measuring this CPU")
    environment = describe_environment(session, env)
    write_text(recipe.folder / ENVIRONMENT, json.dumps(environment, indent=1))
    in_use = {
        name: environment[name] for name in ("backend", "backend_why", "engine", "engine_why", "decoder", "allocator")
    }
    speedups = possible_bf16_speedups(recipe.precision)
    if speedups:
        keep_bf16_gain(speedups, env)
    startup.phase("building the network and the optimizer")
    with open_logs(recipe) as events:
        training = start_training(session, events, env, **switches)
        if training.state.winograd is not None:
            environment["winograd"] = training.state.winograd
            write_text(recipe.folder / ENVIRONMENT, json.dumps(environment, indent=1))
        ready = startup.done()
        if not quiet:
            lines = startup_lines(**in_use, ranks=session.ranks.this.world_size, bf16_speedup=median(speedups or [1.0]))
            notes = () if prepared else session.data.dataset.notes
            print("\n".join((*notes, *lines, ready)), flush=True)
        events.write(
            "start",
            recipe=recipe.name,
            data=recipe.data.kind,
            backend=session.ranks.group.backend,
            bindings=bindings,
            last_step=session.sizes.last_step(recipe.max_steps),
            steps_per_epoch=session.sizes.steps_per_epoch,
            **session.scale.as_fields(),
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


def _make_run(
    session: Session, env: Mapping[str, str], held: ExitStack, *, resume: bool, overwrite: bool, ends: bool
) -> str | None:
    """Check and make the run's folder, locked in `held`; with `ends`, return a message about a finished run and write
    nothing."""
    recipe, restarted, job = session.recipe, is_restarted(env), lock_name_in(env)
    resumption = check_folder(recipe, session.scale, resume=resume, overwrite=overwrite, restarted=restarted, job=job)
    if ends and (message := finished(recipe.folder, session.sizes.last_step(recipe.max_steps))):
        return message
    if resumption:
        print(resumption, flush=True)
    held.enter_context(locked(recipe.folder, restarted=restarted, job=job))
    make_folder(recipe, None, overwrite=overwrite)
    write_atomic(recipe.folder / PLAN, Path(env[PLAN_VARIABLE]).read_bytes())
    return None


def _print_summary(session: Session, result: TrainResult, peak_bytes: int) -> None:
    folder = session.recipe.folder
    estimate = session.binding.worker.memory_bytes
    steps, kind = session.sizes.total_steps, session.recipe.data.kind
    print("\n".join(summary_lines(result, steps, time_spent(folder), kind, peak_bytes, estimate)))
    if result.accuracy is not None:
        print(f"report               {write_report(folder)}")
