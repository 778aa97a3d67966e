"""The entry of a rank for `eval`: from joining the process group to the last line of output."""

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import nn

from cputrain.affinity.errors import InputError
from cputrain.affinity.kernel.observe import Observed
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.ranks.rank import Rank
from cputrain.affinity.terminal import align_columns
from cputrain.affinity.wording import counted
from cputrain.comm.group import all_gather, end_group
from cputrain.data.formats.dataset import SyntheticImages, causes
from cputrain.data.formats.source import Survey
from cputrain.data.loader import GRAY
from cputrain.data.pixels.transform import center_crop
from cputrain.launch.rank_process import Startup
from cputrain.models.networks import build_model
from cputrain.recipe.schema import Recipe
from cputrain.report.eval_page import Predicted, class_accuracies, confused_classes, confusion_text, write_eval_page
from cputrain.training.damage import DamageCheck
from cputrain.training.engine import prepare_model
from cputrain.training.evaluation import PredictionLog, evaluate
from cputrain.training.feed import evaluation_batch, evaluation_steps, feed_of
from cputrain.training.log import EvaluationProgress
from cputrain.training.metrics import Accuracy
from cputrain.training.saving.restore import load_eval_model
from cputrain.training.session import Session, choose_winograd, start_session


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """A checkpoint's accuracy, damaged images and predictions over all ranks, and the seconds of the evaluation;
    without predictions where labels are no classes."""

    checkpoint: Path
    step: int
    accuracy: Accuracy
    damaged: tuple[str, ...]
    seconds: float
    predicted: Predicted | None


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
    page: Path | None,
    startup: Startup,
) -> None:
    """Evaluate checkpoints one after another as one rank; rank 0 prints, and writes the page of the last one."""
    if recipe.engine == "ipex":  # takes part in training steps alone, and is not installed wherever runs are evaluated
        recipe = recipe.model_copy(update={"engine": "auto"})
    session = start_session(recipe, rank, worker, observed, env, check=check, phase=startup.phase, splits=("val",))
    startup.done()
    network = build_model(recipe.model, len(session.data.dataset.classes), recipe.data.crop, session.data.features)
    prepare_model(network, session.engine, recipe.precision)
    choose_winograd(session, network, recipe.batch.local, env)
    progress: dict[str, Any] = {"bar": bar, "lines": sys.stderr if as_json else sys.stdout}
    results = []
    for path in checkpoints:
        if session.ranks.is_main_rank and len(checkpoints) > 1 and not as_json:
            print(path, flush=True)
        results.append(_evaluate(path, network, session, **progress))
        if session.ranks.is_main_rank and not as_json:
            print(result_text(results[-1], recipe.data.kind, session.data.dataset.classes), flush=True)
    if session.ranks.is_main_rank and page is not None:
        written = _write_page(page, results[-1], session)
        print(written, file=sys.stderr if as_json else sys.stdout, flush=True)
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
    steps = evaluation_steps(feed_of(session))
    progress = EvaluationProgress(steps, shown=session.ranks.is_main_rank, bar=bar, lines=lines)
    log = PredictionLog()
    with closing(progress):
        accuracy = evaluate(network, session, on_batch=progress.step, predictions=log)
    damage = DamageCheck(splits=session.data.dataset.splits, share=session.recipe.data.max_damaged, wait=lambda: None)
    damage.evaluation("val", accuracy)
    predicted = log.gathered() if accuracy.top1 is not None else None
    damaged = tuple(sorted(name for names in all_gather(accuracy.damaged) for name in names))
    seconds = time.perf_counter() - started
    return EvalResult(
        checkpoint=path, step=step, accuracy=accuracy, damaged=damaged, seconds=seconds, predicted=predicted
    )


def _write_page(page: Path, one: EvalResult, session: Session) -> Path:
    """Write the page of an evaluation. Raises InputError where labels are no classes."""
    recipe, data = session.recipe, session.data
    if one.predicted is None:
        raise InputError(f"--report {page}: {recipe.data.kind} have no classes: remove --report")
    images = data.dataset.val
    decode = images.decode if isinstance(images, SyntheticImages) else data.decode

    def thumbnail(number: int) -> np.ndarray:
        pixels = np.full((1, recipe.data.crop, recipe.data.crop, 3), GRAY, dtype=np.uint8)
        decode([images.read(number)], center_crop(recipe.data.short_side, recipe.data.crop), pixels)
        return np.asarray(pixels[0])

    accuracy = one.accuracy
    return write_eval_page(
        page,
        title=f"{recipe.name}, step {one.step:,}",
        rows=[
            ("top-1", f"{accuracy.top1:.2f} %"),
            ("top-5", f"{accuracy.top5:.2f} %"),
            ("loss", f"{accuracy.loss:.4f}"),
            ("images", f"{accuracy.images:,}"),
            ("damaged images", f"{len(one.damaged):,}"),
        ],
        predicted=one.predicted,
        classes=data.dataset.classes,
        name_of=images.name,
        thumbnail=thumbnail,
    )


MOST_PAIRS = 1000  # of confused classes in the JSON output, the most frequent
TABLE_HEAD = ("checkpoint", "step", "top-1 %", "top-5 %", "loss", "s")


def table_row(one: EvalResult) -> tuple[str, ...]:
    """A line of the table for several checkpoints."""
    percents = ("" if value is None else f"{value:.2f}" for value in (one.accuracy.top1, one.accuracy.top5))
    return (str(one.checkpoint), f"{one.step:,}", *percents, f"{one.accuracy.loss:.4f}", f"{one.seconds:.1f}")


def result_text(one: EvalResult, kind: str, classes: tuple[str, ...] = ()) -> str:
    """The lines about one checkpoint; `kind` is the recipe's data.kind."""
    accuracy = one.accuracy
    percents = {"top-1": accuracy.top1, "top-5": accuracy.top5}
    figures = [f"{name} {value:.2f} %" for name, value in percents.items() if value is not None]
    lines = [
        "  ".join([f"step {one.step:,}", *figures, f"loss {accuracy.loss:.4f}"]),
        f"{accuracy.images:,} {kind}, each once, {one.seconds:.1f} s ({accuracy.images / one.seconds:.1f} a second)",
    ]
    if one.predicted is not None and len(one.predicted.label):
        lines.append(confusion_text(one.predicted, classes))
    if one.damaged:
        lines.insert(0, f"warning: {counted(len(one.damaged), 'damaged image')} skipped: {causes(one.damaged)}")
    return "\n".join(lines)


def results_as_json(session: Session, results: list[EvalResult]) -> dict[str, object]:
    """The JSON output: accuracies in percent; `batch` is the number of images of one worker's forward pass."""
    return {
        "workers": session.ranks.this.world_size,
        "batch": evaluation_batch(session.recipe),
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
                **_classes_as_json(one.predicted, session.data.dataset.classes),
            }
            for one in results
        ],
    }


def _classes_as_json(predicted: Predicted | None, classes: tuple[str, ...]) -> dict[str, object]:
    """Accuracy of each class and the confused pairs, where there are classes."""
    if predicted is None:
        return {}
    return {
        "classes": [asdict(each) for each in class_accuracies(predicted, classes)],
        "confused": [asdict(each) for each in confused_classes(predicted, classes)[:MOST_PAIRS]],
    }
