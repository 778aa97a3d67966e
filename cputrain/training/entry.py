"""The entry of a rank for `train`: from joining the process group to the last line of output."""

import json
import resource
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from affinity.kernel.bound_plan import PLAN_VARIABLE
from affinity.kernel.observe import Observed
from affinity.planner.plan import WorkerPlan
from affinity.ranks.rank import Rank
from cputrain.comm.group import all_gather, end_group, no_exit_limit, run_on_main_rank
from cputrain.data.staging import staged
from cputrain.files import write_atomic
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import Events, SilentEvents, time_spent
from cputrain.runs.folder import ENVIRONMENT, PLAN, check_folder, finished, make_folder
from cputrain.training.engine import possible_bf16_speedup
from cputrain.training.environment import binding_record, describe_environment
from cputrain.training.loop import TrainResult
from cputrain.training.preemption import ignore_preemption
from cputrain.training.sampling import sample_usage
from cputrain.training.session import Session, start_session
from cputrain.training.start import start_training
from cputrain.training.startup_lines import startup_lines
from cputrain.training.summary import summary_lines


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
) -> None:
    """Train as one rank.

    With `prepared`, the launcher has made the run's folder and samples the ranks' use of resources; otherwise rank 0
    checks and makes the folder, and each rank samples itself.
    """
    session = start_session(recipe, rank, worker, observed, env, check=check)
    is_main_rank, loader_pus = session.ranks.is_main_rank, session.binding.loader_pus
    message = None
    if not prepared:
        message = run_on_main_rank(lambda: _make_run(session, env, resume=resume, overwrite=overwrite))
    if finished_run := all_gather(message)[0]:
        if is_main_rank:
            print(finished_run, flush=True)
        end_group(session.ranks.group)
        return
    sampling = nullcontext() if prepared else sample_usage(recipe.folder, rank, loader_pus)
    with sampling, staged(session.data.dataset, recipe.data.stage_dir, rank, loader_pus):
        result = _train(session, env, resume=resume, watched=prepared)
    peaks = all_gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    ignore_preemption()
    end_group(session.ranks.group)
    if is_main_rank:  # without the others, which would keep their cores busy while they wait
        with no_exit_limit():
            _print_summary(session, result, max(peaks))


def _train(session: Session, env: Mapping[str, str], *, resume: bool, watched: bool) -> TrainResult:
    recipe = session.recipe
    bindings = all_gather(binding_record(session))
    if not session.ranks.is_main_rank:
        return start_training(session, SilentEvents(), env, resume=resume, watched=watched).run()
    environment = describe_environment(session, env)
    write_atomic(recipe.folder / ENVIRONMENT, json.dumps(environment, indent=1).encode())
    in_use = {
        name: environment[name] for name in ("backend", "backend_why", "engine", "engine_why", "decoder", "allocator")
    }
    speedup = possible_bf16_speedup(recipe.precision)
    print("\n".join(startup_lines(**in_use, ranks=session.ranks.this.world_size, bf16_speedup=speedup)), flush=True)
    with Events(recipe.folder) as events:
        training = start_training(session, events, env, resume=resume, watched=watched)
        events.write(
            "start",
            recipe=recipe.name,
            data=recipe.data.kind,
            backend=session.ranks.group.backend,
            bindings=bindings,
            **session.scale.as_fields(),
        )
        result = training.run()
        _write_end(events, session, result)
    return result


def _write_end(events: Events, session: Session, result: TrainResult) -> None:
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
        trained_until=result.ended,
        status="done" if accuracy else "stopped",
    )


def _make_run(session: Session, env: Mapping[str, str], *, resume: bool, overwrite: bool) -> str | None:
    """Check and make the run's folder; for a finished run return a message about it and write nothing."""
    recipe = session.recipe
    resumption = check_folder(recipe, session.scale, resume=resume, overwrite=overwrite)
    if resume and (message := finished(recipe.folder, session.sizes.last_step(recipe.max_steps))):
        return message
    if resumption:
        print(resumption, flush=True)
    make_folder(recipe, None, overwrite=overwrite)
    write_atomic(recipe.folder / PLAN, Path(env[PLAN_VARIABLE]).read_bytes())
    return None


def _print_summary(session: Session, result: TrainResult, peak_bytes: int) -> None:
    from cputrain.report.page import write_report  # imports matplotlib, which takes a second

    folder = session.recipe.folder
    estimate = session.binding.worker.memory_bytes
    print("\n".join(summary_lines(result, time_spent(folder), session.recipe.data.kind, peak_bytes, estimate)))
    if result.accuracy is not None:
        print(f"report               {write_report(folder)}")
