"""The entry of a rank for `eval`: from joining the process group to the last line of output."""

import json
import math
import sys
import time
from collections.abc import Mapping
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
from affinity.wording import counted
from cputrain.comm.group import all_gather, end_group
from cputrain.data.formats.survey import Survey
from cputrain.models.build import build_model
from cputrain.recipe.schema import Recipe
from cputrain.training.engine import prepare_model
from cputrain.training.evaluation import evaluate
from cputrain.training.feed import evaluation_batch, evaluation_steps
from cputrain.training.metrics import Accuracy
from cputrain.training.progress import EvaluationProgress
from cputrain.training.saving.restore import load_eval_model
from cputrain.training.session import Session, start_session


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """A checkpoint's accuracy over all ranks, the damaged images of all ranks, and the seconds of the evaluation."""

    checkpoint: Path
    step: int
    accuracy: Accuracy
    damaged: tuple[str, ...]
    seconds: float


def check_checkpoints(paths: tuple[Path, ...], recipe: Recipe, found: Survey) -> None:
    """Raise InputError for a file that is not a checkpoint, or not of the recipe's network."""
    network = build_model(recipe.model, len(found.classes), recipe.data.crop, found.features)
    for path in paths:
        load_eval_model(path, network)


def eval_rank(
    recipe: Recipe,
    rank: Rank,
    worker: WorkerPlan,
    observed: Observed,
    env: Mapping[str, str],
    checkpoints: tuple[Path, ...],
    *,
    check: bool,
    as_json: bool,
    bar: bool,
) -> None:
    """Evaluate checkpoints one after another as one rank; rank 0 prints."""
    session = start_session(recipe, rank, worker, observed, env, check=check)
    network = build_model(recipe.model, len(session.data.dataset.classes), recipe.data.crop, session.data.features)
    prepare_model(network, session.engine, recipe.precision)
    progress: dict[str, Any] = {"bar": bar, "lines": sys.stderr if as_json else sys.stdout}
    results = []
    for path in checkpoints:
        if session.ranks.is_main_rank and len(checkpoints) > 1 and not as_json:
            print(path, flush=True)
        results.append(_evaluate(path, network, session, **progress))
        if session.ranks.is_main_rank and not as_json:
            print(result_text(results[-1], recipe.data.kind), flush=True)
    if session.ranks.is_main_rank and as_json:
        print(json.dumps(results_as_json(session, results), indent=1), flush=True)
    elif session.ranks.is_main_rank and len(results) > 1:
        print("\n" + align_columns([TABLE_HEAD, *map(table_row, results)]), flush=True)
    end_group(session.ranks.group)


def _evaluate(path: Path, network: nn.Module, session: Session, *, bar: bool, lines: TextIO) -> EvalResult:
    step = load_eval_model(path, network)
    if len(set(all_gather((path, step)))) > 1:
        raise InputError(f"the ranks find different files at {path}: copy it to a file system that all hosts share")
    started = time.perf_counter()
    progress = EvaluationProgress(evaluation_steps(session), shown=session.ranks.is_main_rank, bar=bar, lines=lines)
    with closing(progress):
        accuracy = evaluate(network, session, on_batch=progress.step)
    damaged = tuple(sorted(name for names in all_gather(accuracy.damaged) for name in names))
    seconds = time.perf_counter() - started
    return EvalResult(checkpoint=path, step=step, accuracy=accuracy, damaged=damaged, seconds=seconds)


TABLE_HEAD = ("checkpoint", "step", "top-1 %", "top-5 %", "loss", "s")


def table_row(one: EvalResult) -> tuple[str, ...]:
    """A line of the table for several checkpoints."""
    percents = ("" if value is None else f"{value:.2f}" for value in (one.accuracy.top1, one.accuracy.top5))
    return (str(one.checkpoint), f"{one.step:,}", *percents, f"{one.accuracy.loss:.4f}", f"{one.seconds:.1f}")


def result_text(one: EvalResult, kind: str) -> str:
    """The lines about one checkpoint; `kind` is the recipe's data.kind."""
    accuracy = one.accuracy
    percents = {"top-1": accuracy.top1, "top-5": accuracy.top5}
    figures = [f"{name} {value:.2f} %" for name, value in percents.items() if value is not None]
    lines = [
        "  ".join([f"step {one.step:,}", *figures, f"loss {accuracy.loss:.4f}"]),
        f"{accuracy.images:,} {kind}, each once, {one.seconds:.1f} s ({accuracy.images / one.seconds:.1f} a second)",
    ]
    if one.damaged:
        lines.insert(0, f"warning: {counted(len(one.damaged), 'damaged image')} skipped: {'; '.join(one.damaged[:3])}")
    return "\n".join(lines)


def results_as_json(session: Session, results: list[EvalResult]) -> dict[str, object]:
    """The JSON output: accuracies in percent; `batch` is the number of images of one worker's forward pass."""
    return {
        "workers": session.ranks.this.world_size,
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
