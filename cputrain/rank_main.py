"""What a rank does for `train` and for `eval`, from its process group to its last line."""

import json
import os
import resource
from contextlib import nullcontext
from pathlib import Path

from affinity.bind import PLAN_VARIABLE
from affinity.memory import GIB
from affinity.observe import Observed
from affinity.plan import WorkerPlan
from cputrain.checkpoint import load_judged
from cputrain.comm.group import end_group, gather, on_rank_0
from cputrain.data.stage import staged
from cputrain.engine import prepare_model
from cputrain.evaluate import evaluate
from cputrain.events import Events
from cputrain.files import write_atomic
from cputrain.models.build import build_model
from cputrain.run_folder import ENVIRONMENT, PLAN, check_folder, make_folder
from cputrain.sampling import sampled
from cputrain.schema import Recipe
from cputrain.session import Session, binding_record, describe_environment, start_session
from cputrain.train import Outcome, train
from mpi.rank import Rank


def train_rank(
    recipe: Recipe,
    rank: Rank,
    worker: WorkerPlan,
    observed: Observed,
    *,
    resume: bool,
    overwrite: bool,
    prepared: bool,
    check: bool,
) -> None:
    """Train as one rank.

    With `prepared` the launcher has made the run's folder and samples the ranks' use of resources; else rank 0 checks
    and makes the folder, and each rank samples itself.
    """
    session = start_session(recipe, rank, worker, observed, check=check)
    if not prepared:
        on_rank_0(lambda: _make_run(recipe, resume=resume, overwrite=overwrite))
    sampling = nullcontext() if prepared else sampled(recipe.folder, rank, session.loader_pus)
    with sampling, staged(session.dataset, recipe.data.stage, rank, session.loader_pus):
        outcome = _train(session, resume=resume)
    peaks = gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if session.leads:
        _say_end(session, outcome, max(peaks))
    end_group(session.group)


def _train(session: Session, *, resume: bool) -> Outcome:
    recipe, rank = session.recipe, session.rank
    bindings = gather(binding_record(session))
    if session.leads:
        write_atomic(recipe.folder / ENVIRONMENT, json.dumps(describe_environment(session), indent=1).encode())
        with Events(recipe.folder) as events:
            events.write(
                "start", recipe=recipe.name, workers=rank.world_size, backend=session.group.backend, bindings=bindings
            )
            outcome = train(session, events, resume=resume)
            accuracy = outcome.accuracy
            events.write(
                "end",
                step=outcome.step,
                top1=accuracy.top1 if accuracy else None,
                top5=accuracy.top5 if accuracy else None,
                steps=outcome.step,
                images=session.numbers.images_until(outcome.step),
                time_to_train_s=outcome.total_s,
                status="done" if accuracy else "stopped",
            )
        return outcome
    return train(session, None, resume=resume)


def eval_rank(
    recipe: Recipe, rank: Rank, worker: WorkerPlan, observed: Observed, checkpoint: Path, *, check: bool
) -> None:
    """Evaluate a checkpoint as one rank; rank 0 prints."""
    session = start_session(recipe, rank, worker, observed, check=check)
    network = build_model(recipe.model, len(session.dataset.classes), recipe.data.crop)
    prepare_model(network, recipe.engine, recipe.precision)
    load_judged(checkpoint, network)
    accuracy = evaluate(network, session)
    damaged = sorted(name for names in gather(accuracy.damaged) for name in names)
    if session.leads:
        if damaged:
            print(f"warning: {len(damaged)} damaged image(s) left out: {'; '.join(damaged[:3])}")
        print(f"top-1 {accuracy.top1:.2f} %  top-5 {accuracy.top5:.2f} %  loss {accuracy.loss:.4f}")
        print(f"{accuracy.images:,} images, each once")
    end_group(session.group)


def _make_run(recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
    check_folder(recipe, resume=resume, overwrite=overwrite)
    make_folder(recipe, None, overwrite=overwrite)
    write_atomic(recipe.folder / PLAN, Path(os.environ[PLAN_VARIABLE]).read_bytes())


def _say_end(session: Session, outcome: Outcome, peak_bytes: int) -> None:
    from cputrain.report.page import write_report  # matplotlib: a second that only the end needs

    accuracy = outcome.accuracy
    if accuracy is None:
        print(f"stopped by SIGUSR1    after step {outcome.step}, which is saved: --resume goes on from there")
        return
    print(f"total training time  {outcome.trained_s:.1f} s (updates only)")
    print(f"time to train        {outcome.total_s:.1f} s (with evaluations and checkpoints)")
    print(f"top-1                {accuracy.top1:.2f} %")
    print(f"top-5                {accuracy.top5:.2f} %  ({accuracy.images} images, each once)")
    estimate = session.worker.memory_bytes
    beside = f" (estimated {estimate / GIB:.2f})" if estimate else ""
    print(f"peak memory          {peak_bytes / GIB:.2f} GiB per worker{beside}")
    print(f"report               {write_report(session.recipe.folder)}")
