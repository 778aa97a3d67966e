"""What a rank does for `eval`, from its process group to its last line."""

import json
import math
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from affinity.errors import InputError
from affinity.kernel.observe import Observed
from affinity.planner.plan import WorkerPlan
from affinity.ranks.rank import Rank
from affinity.text_table import align_columns
from cputrain.comm.group import end_group, gather
from cputrain.data.survey import Survey
from cputrain.models.build import build_model
from cputrain.recipe.schema import Recipe
from cputrain.training.checkpoint import load_judged
from cputrain.training.engine import prepare_model
from cputrain.training.evaluation import Accuracy, evaluate
from cputrain.training.feed import evaluation_batch, evaluation_steps
from cputrain.training.progress import EvaluationProgress
from cputrain.training.session import Session, start_session


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A checkpoint's accuracy over all ranks and how many seconds that took; `damaged` are all ranks' images."""

    checkpoint: Path
    step: int
    accuracy: Accuracy
    damaged: tuple[str, ...]
    seconds: float


def check_checkpoints(paths: tuple[Path, ...], recipe: Recipe, found: Survey) -> None:
    """Raise InputError where one of the files is no checkpoint or its weights are not those of the recipe's network."""
    network = build_model(recipe.model, len(found.classes), recipe.data.crop, found.features)
    for path in paths:
        load_judged(path, network)


def eval_rank(
    recipe: Recipe,
    rank: Rank,
    worker: WorkerPlan,
    observed: Observed,
    checkpoints: tuple[Path, ...],
    *,
    check: bool,
    as_json: bool,
    bar: bool,
) -> None:
    """Evaluate checkpoints one after another as one rank; rank 0 prints."""
    session = start_session(recipe, rank, worker, observed, check=check)
    network = build_model(recipe.model, len(session.dataset.classes), recipe.data.crop, session.features)
    prepare_model(network, recipe.engine, recipe.precision)
    progress: dict[str, Any] = {"bar": bar, "lines": sys.stderr if as_json else sys.stdout}
    results = []
    for path in checkpoints:
        if session.leads and len(checkpoints) > 1 and not as_json:
            print(path, flush=True)
        results.append(_evaluated(path, network, session, **progress))
        if session.leads and not as_json:
            print(said(results[-1], recipe.data.kind), flush=True)
    if session.leads and as_json:
        print(json.dumps(as_data(session, results), indent=1), flush=True)
    elif session.leads and len(results) > 1:
        print("\n" + align_columns([HEAD, *map(row, results)]), flush=True)
    end_group(session.group)


def _evaluated(path: Path, network: nn.Module, session: Session, *, bar: bool, lines: TextIO) -> Evaluated:
    step = load_judged(path, network)
    if len(set(gather((path, step)))) > 1:
        raise InputError(f"ranks find different checkpoints in {path}: put it where all hosts see it, unchanged")
    started = time.perf_counter()
    shown = EvaluationProgress(evaluation_steps(session), shown=session.leads, bar=bar, lines=lines)
    with closing(shown):
        accuracy = evaluate(network, session, step=shown.step)
    damaged = tuple(sorted(name for names in gather(accuracy.damaged) for name in names))
    seconds = time.perf_counter() - started
    return Evaluated(checkpoint=path, step=step, accuracy=accuracy, damaged=damaged, seconds=seconds)


HEAD = ("checkpoint", "step", "top-1 %", "top-5 %", "loss", "s")


def row(one: Evaluated) -> tuple[str, ...]:
    """A line of the table of several checkpoints."""
    percents = ("" if value is None else f"{value:.2f}" for value in (one.accuracy.top1, one.accuracy.top5))
    return (str(one.checkpoint), f"{one.step:,}", *percents, f"{one.accuracy.loss:.4f}", f"{one.seconds:.1f}")


def said(one: Evaluated, kind: str) -> str:
    """What came of one checkpoint; `kind` is the recipe's data.kind."""
    accuracy = one.accuracy
    percents = {"top-1": accuracy.top1, "top-5": accuracy.top5}
    figures = [f"{name} {value:.2f} %" for name, value in percents.items() if value is not None]
    lines = [
        "  ".join([f"step {one.step:,}", *figures, f"loss {accuracy.loss:.4f}"]),
        f"{accuracy.images:,} {kind}, each once, {one.seconds:.1f} s ({accuracy.images / one.seconds:.1f} a second)",
    ]
    if one.damaged:
        lines.insert(0, f"warning: {len(one.damaged)} damaged image(s) left out: {'; '.join(one.damaged[:3])}")
    return "\n".join(lines)


def as_data(session: Session, results: list[Evaluated]) -> dict[str, object]:
    """For machines: accuracies in percent; `batch` counts the images of one worker's forward pass."""
    return {
        "workers": session.rank.world_size,
        "batch": evaluation_batch(session),
        "results": [
            {
                "checkpoint": str(one.checkpoint),
                "step": one.step,
                "top1": one.accuracy.top1,
                "top5": one.accuracy.top5,
                "loss": one.accuracy.loss if math.isfinite(one.accuracy.loss) else None,
                "images": one.accuracy.images,
                "damaged": list(one.damaged),
                "seconds": one.seconds,
            }
            for one in results
        ],
    }
