"""What a rank does for `train`, from its process group to its last line."""

import json
import os
import resource
from contextlib import nullcontext
from pathlib import Path

from affinity.bind import PLAN_VARIABLE
from affinity.kernel.observe import Observed
from affinity.planner.plan import WorkerPlan
from affinity.ranks.rank import Rank
from affinity.units import GIB
from cputrain.comm.group import end_group, gather, on_rank_0
from cputrain.data.stage import staged
from cputrain.files import write_atomic
from cputrain.recipe.schema import Recipe
from cputrain.runs.events import Events, time_spent
from cputrain.runs.folder import ENVIRONMENT, PLAN, check_folder, finished, make_folder
from cputrain.runs.resume import Facts
from cputrain.training.in_use import start_lines
from cputrain.training.loop import Outcome, begin, train
from cputrain.training.sampling import sampled
from cputrain.training.session import Session, binding_record, describe_environment, start_session


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
    done = None if prepared else on_rank_0(lambda: _make_run(session, resume=resume, overwrite=overwrite))
    if said := gather(done)[0]:
        if session.leads:
            print(said, flush=True)
        end_group(session.group)
        return
    sampling = nullcontext() if prepared else sampled(recipe.folder, rank, session.loader_pus)
    with sampling, staged(session.dataset, recipe.data.stage, rank, session.loader_pus):
        outcome = _train(session, resume=resume)
    peaks = gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if session.leads:
        _say_end(session, outcome, max(peaks))
    end_group(session.group)


def _train(session: Session, *, resume: bool) -> Outcome:
    recipe = session.recipe
    bindings = gather(binding_record(session))
    if not session.leads:
        return train(begin(session, None, resume=resume))
    environment = describe_environment(session)
    write_atomic(recipe.folder / ENVIRONMENT, json.dumps(environment, indent=1).encode())
    parts = {name: environment[name] for name in ("backend", "backend_why", "decoder", "allocator")}
    print("\n".join(start_lines(**parts, ranks=session.rank.world_size)), flush=True)
    with Events(recipe.folder) as events:
        training = begin(session, events, resume=resume)
        events.write(
            "start",
            recipe=recipe.name,
            data=recipe.data.kind,
            backend=session.group.backend,
            bindings=bindings,
            **_facts(session).as_fields(),
        )
        outcome = train(training)
        accuracy, test, spent = outcome.accuracy, outcome.test, time_spent(recipe.folder, outcome.ended)
        events.write(
            "end",
            step=outcome.step,
            data=recipe.data.kind,
            top1=accuracy.top1 if accuracy else None,
            top5=accuracy.top5 if accuracy else None,
            val_loss=accuracy.loss if accuracy else None,
            test_top1=test.top1 if test else None,
            test_top5=test.top5 if test else None,
            steps=outcome.step,
            images=session.numbers.images_until(outcome.step),
            time_to_train_s=spent.training_s,
            wall_time_s=spent.wall_s,
            starts=spent.starts,
            trained_until=outcome.ended,
            status="done" if accuracy else "stopped",
        )
    return outcome


def _facts(session: Session) -> Facts:
    return Facts(
        workers=session.rank.world_size,
        global_batch=session.numbers.global_batch,
        train_images=len(session.dataset.train),
        classes=len(session.dataset.classes),
    )


def _make_run(session: Session, *, resume: bool, overwrite: bool) -> str | None:
    """Check and make the run's folder; of a run that is finished what to say of it, and nothing is written."""
    recipe = session.recipe
    resumption = check_folder(recipe, _facts(session), resume=resume, overwrite=overwrite)
    if resume and (said := finished(recipe.folder, session.numbers.last_step(recipe.max_steps))):
        return said
    if resumption:
        print(resumption, flush=True)
    make_folder(recipe, None, overwrite=overwrite)
    write_atomic(recipe.folder / PLAN, Path(os.environ[PLAN_VARIABLE]).read_bytes())
    return None


def _say_end(session: Session, outcome: Outcome, peak_bytes: int) -> None:
    from cputrain.report.page import write_report  # matplotlib: a second that only the end needs

    accuracy = outcome.accuracy
    if accuracy is None:
        print(f"stopped by SIGUSR1    after step {outcome.step}, which is saved: --resume goes on from there")
        return
    spent = time_spent(session.recipe.folder)
    several = spent.starts > 1
    print(f"total training time  {outcome.trained_s:.1f} s (updates only{', of the last start' if several else ''})")
    over = f" over {spent.starts} starts" if several else ""
    print(f"time to train        {spent.training_s:.1f} s{over} (with evaluations and checkpoints)")
    if several:
        print(f"wall time            {spent.wall_s:.1f} s (from the first start to the end, waits included)")
    kind = session.recipe.data.kind
    if accuracy.top1 is not None:
        print(f"top-1                {accuracy.top1:.2f} %")
        print(f"top-5                {accuracy.top5:.2f} %  ({accuracy.images} {kind}, each once)")
    elif accuracy.images:
        print(f"validation loss      {accuracy.loss:.4f}  ({accuracy.images} {kind}, each once)")
    else:
        print(f"data                 {kind}: nothing to evaluate")
    if (test := outcome.test) and test.top1 is not None:
        print(f"test top-1           {test.top1:.2f} %")
        print(f"test top-5           {test.top5:.2f} %  ({test.images} {kind}, each once, with the last weights)")
    estimate = session.worker.memory_bytes
    beside = f" (estimated {estimate / GIB:.2f})" if estimate else ""
    print(f"peak memory          {peak_bytes / GIB:.2f} GiB per worker{beside}")
    print(f"report               {write_report(session.recipe.folder)}")
