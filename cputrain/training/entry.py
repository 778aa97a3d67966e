"""The entry of a rank for `train`: from joining the process group to the last line of output."""

import json
import resource
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from affinity.kernel.bound_plan import PLAN_VARIABLE
from affinity.kernel.observe import Observed
from affinity.planner.plan import WorkerPlan
from affinity.ranks.rank import Rank
from cputrain.comm.group import all_gather, end_group, no_exit_limit, run_on_main_rank
from cputrain.data.staging import staged
from cputrain.files import write_atomic, write_text
from cputrain.launch.startup import Startup
from cputrain.measurements import keep_bf16_gain
from cputrain.recipe.schema import Recipe
from cputrain.report.page import write_report
from cputrain.runs.attempt import is_restarted, lock_name_in
from cputrain.runs.events import EventLog, SilentEvents, time_spent
from cputrain.runs.folder import ENVIRONMENT, PLAN, check_folder, finished, make_folder
from cputrain.runs.lock import locked
from cputrain.runs.metric_files import open_logs
from cputrain.training.engine import possible_bf16_speedups
from cputrain.training.environment import binding_record, describe_environment
from cputrain.training.loop import TrainResult
from cputrain.training.measured_engine import with_measured_engine
from cputrain.training.preemption import end_by, ignore_preemption
from cputrain.training.sampling import sample_usage
from cputrain.training.session import Session, start_session
from cputrain.training.start import start_training
from cputrain.training.startup_lines import startup_lines
from cputrain.training.summary import summary_lines
from cputrain.training.task import OwnTask


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
