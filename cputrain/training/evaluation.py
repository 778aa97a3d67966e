"""Evaluation of each image once (loss, top-1, top-5, predictions), and one rank of `cputrain eval`."""

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor, nn

from cputrain.affinity.errors import InputError
from cputrain.affinity.wording import plural
from cputrain.comm.group import all_gather, all_reduce_sum, end_group
from cputrain.data.formats.dataset import SyntheticImages, summarize_corrupt
from cputrain.data.formats.source import DatasetSummary
from cputrain.data.loader import GRAY, Batch
from cputrain.data.order import Indices
from cputrain.data.pixels import center_crop
from cputrain.manifest import read_manifest
from cputrain.models.networks import build_model
from cputrain.models.settings import ModelSettings
from cputrain.report.page import Predicted, class_accuracies, confused_classes, confusion_text, write_eval_page
from cputrain.rows import Column, Rows
from cputrain.training.batches import evaluation_batches, evaluation_shares
from cputrain.training.corrupt_images import CorruptImageCheck
from cputrain.training.engine import autocast, evaluation_network, plan_network, prepare_model, with_operators_of
from cputrain.training.progress import EvaluationBar
from cputrain.training.session import Session
from cputrain.training.snapshot import load_eval_model
from cputrain.training.step import Accuracy, count_correct

MAX_PAIRS = 1000  # most frequent pairs of confused classes in the JSON output
COLUMNS = (  # table for several checkpoints
    Column("checkpoint", "checkpoint", str),
    Column("step", "step", ","),
    Column("top-1 %", "accuracy.top1", ".2f"),
    Column("top-5 %", "accuracy.top5", ".2f"),
    Column("loss", "accuracy.loss", ".4f"),
    Column("s", "seconds", ".1f"),
)


@dataclass(slots=True, kw_only=True)
class PredictionLog:
    """This rank's predictions, collected batch by batch, without damaged images."""

    parts: list[np.ndarray] = field(default_factory=list)

    def add(self, outputs: Tensor, losses: Tensor, batch: Batch, numbers: Indices) -> None:
        """Add a batch: outputs (N, classes), losses (N,) and image indices (N,)."""
        shares = torch.softmax(outputs.double(), dim=1)
        highest, predicted = shares.max(dim=1)
        of_label = shares.gather(1, batch.labels[:, None])[:, 0]
        columns = (torch.from_numpy(np.asarray(numbers)), batch.labels, predicted, losses, of_label, highest)
        rows = torch.stack([each.double() for each in columns], dim=1)[batch.weights > 0]
        self.parts.append(rows.numpy())

    def gathered(self) -> Predicted:
        """Gather the predictions of all ranks, ordered by image index. Every rank must call this."""
        rows = np.concatenate(self.parts) if self.parts else np.empty((0, len(Predicted.__dataclass_fields__)))
        rows = np.concatenate(all_gather(rows))
        image, label, predicted, loss, of_label, highest = rows[rows[:, 0].argsort()].T
        return Predicted(
            image=image.astype(np.int64),
            label=label.astype(np.int64),
            predicted=predicted.astype(np.int64),
            loss=loss,
            label_share=of_label,
            predicted_share=highest,
        )


def evaluate(
    model: nn.Module,
    session: Session,
    split: str = "val",
    on_batch: Callable[[], None] = lambda: None,
    predictions: PredictionLog | None = None,
) -> Accuracy:
    """Evaluate a model on a split, each image once, without damaged images. Calls `on_batch` after each batch;
    `predictions` collects the predicted class of each image if the task is a classification."""
    recipe, task = session.recipe, session.task
    loss_sum, correct1, correct5, count = 0.0, 0.0, 0.0, 0.0
    damaged: list[str] = []
    parts = [model] if task.loss_module is None else [model, task.loss_module]
    for part in parts:
        part.eval()
    # Not in inference mode: a network may keep tensors of an evaluation that its training then uses, such as caches.
    with torch.no_grad():
        network = evaluation_network(model, session.engine, recipe.precision) if task.traceable else model
        shares = evaluation_shares(session, split)
        for share, batch in zip(shares, evaluation_batches(session, split), strict=True):
            with autocast(recipe.precision):
                outputs = network(task.inputs(batch))
            if isinstance(outputs, Tensor) and outputs.dtype == torch.bfloat16:
                outputs = outputs.float()
            # A network may enable gradients, for a derivative that it returns.
            losses = task.losses(outputs, batch.labels, 0.0).detach().expand(len(batch.weights))
            loss_sum += float((losses * batch.weights).sum())
            if task.classifies:
                correct1 += count_correct(outputs, batch.labels, batch.weights, 1)
                correct5 += count_correct(outputs, batch.labels, batch.weights, 5)
            count += float(batch.weights.sum())
            damaged += batch.damaged
            if predictions is not None and task.classifies:
                predictions.add(outputs, losses, batch, share)
            on_batch()
    for part in parts:
        part.train()
    loss_sum, correct1, correct5, count = all_reduce_sum(loss_sum, correct1, correct5, count)
    classified = count > 0 and task.classifies
    return Accuracy(
        loss=loss_sum / count if count else math.nan,
        top1=100 * correct1 / count if classified else None,
        top5=100 * correct5 / count if classified else None,
        images=int(count),
        damaged=tuple(damaged),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Result of evaluating a checkpoint on all ranks, and its duration in seconds. `predicted` is None if the labels
    are not classes."""

    checkpoint: Path
    step: int
    accuracy: Accuracy
    damaged: tuple[str, ...]
    seconds: float
    predicted: Predicted | None


def check_checkpoints(paths: tuple[Path, ...], model: ModelSettings, crop: int, data: DatasetSummary) -> None:
    """Raise InputError if a path is not a checkpoint, or is one of another network."""
    network = build_model(model, len(data.classes), crop, data.features)
    for path in paths:
        load_eval_model(path, network)


def eval_rank(
    session: Session,
    checkpoints: tuple[Path, ...],
    *,
    as_json: bool,
    bar: bool,
    page: Path | None,
) -> None:
    """Evaluate checkpoints one after another as one rank; rank 0 prints, and writes the page of the last checkpoint."""
    recipe = session.recipe
    session.context.startup.done()
    network = build_model(recipe.model, len(session.dataset.classes), recipe.data.crop, session.features)
    record = read_manifest(checkpoints[0]).training
    engine, plan, _ = plan_network(
        with_operators_of(record, session.engine, session.context.env),
        network,
        session.task.example,
        recipe.batch.local,
        recipe.precision,
        session.context.env,
        winograd=recipe.model.winograd,
        stored=record.winograd,
    )
    prepare_model(network, engine, recipe.precision, plan)
    progress: dict[str, Any] = {"bar": bar, "lines": sys.stderr if as_json else sys.stdout}
    results = []
    for path in checkpoints:
        if session.is_main_rank and len(checkpoints) > 1 and not as_json:
            print(path, flush=True)
        results.append(_evaluate(path, network, session, **progress))
        if session.is_main_rank and not as_json:
            print(result_text(results[-1], recipe.data.kind, session.dataset.classes), flush=True)
    if session.is_main_rank and page is not None:
        written = _write_page(page, results[-1], session)
        print(written, file=sys.stderr if as_json else sys.stdout, flush=True)
    if session.is_main_rank and as_json:
        print(json.dumps(results_as_json(session, results), indent=1), flush=True)
    elif session.is_main_rank and len(results) > 1:
        print("\n" + Rows(COLUMNS, results).text(numbers=False), flush=True)
    end_group(session.group)


def _evaluate(path: Path, network: nn.Module, session: Session, *, bar: bool, lines: TextIO) -> EvalResult:
    step = load_eval_model(path, network)
    if len(set(all_gather((path, step)))) > 1:
        raise InputError(f"the ranks find different files at {path}: copy it to a file system shared by all hosts")
    started = time.perf_counter()
    steps = len(evaluation_shares(session, "val"))  # no rank has more than rank 0
    progress = EvaluationBar(steps, shown=session.is_main_rank, bar=bar, lines=lines)
    log = PredictionLog()
    with closing(progress):
        accuracy = evaluate(network, session, on_batch=progress.step, predictions=log)
    share = session.recipe.data.max_damaged
    check = CorruptImageCheck(splits=session.dataset.splits, share=share, wait=lambda: None)
    check.evaluation("val", accuracy)
    predicted = log.gathered() if accuracy.top1 is not None else None
    damaged = tuple(sorted(name for names in all_gather(accuracy.damaged) for name in names))
    seconds = time.perf_counter() - started
    return EvalResult(
        checkpoint=path, step=step, accuracy=accuracy, damaged=damaged, seconds=seconds, predicted=predicted
    )


def _write_page(page: Path, result: EvalResult, session: Session) -> Path:
    """Write the HTML page of an evaluation. Raises InputError if the labels are not classes."""
    recipe, images = session.recipe, session.dataset.val
    if result.predicted is None:
        raise InputError(f"--report {page} needs classes, which {recipe.data.kind} do not have: remove --report")
    decode = images.decode if isinstance(images, SyntheticImages) else session.decode

    def thumbnail(number: int) -> np.ndarray:
        pixels = np.full((1, recipe.data.crop, recipe.data.crop, 3), GRAY, dtype=np.uint8)
        decode([images.read(number)], center_crop(recipe.data.short_side, recipe.data.crop), pixels)
        return np.asarray(pixels[0])

    accuracy = result.accuracy
    return write_eval_page(
        page,
        title=f"{recipe.name}, step {result.step:,}",
        rows=[
            ("top-1", f"{accuracy.top1:.2f} %"),
            ("top-5", f"{accuracy.top5:.2f} %"),
            ("loss", f"{accuracy.loss:.4f}"),
            ("images", f"{accuracy.images:,}"),
            ("damaged images", f"{len(result.damaged):,}"),
        ],
        predicted=result.predicted,
        classes=session.dataset.classes,
        name_of=images.name,
        thumbnail=thumbnail,
    )


def result_text(result: EvalResult, kind: str, classes: tuple[str, ...] = ()) -> str:
    """Format the result of one checkpoint; `kind` is the recipe's data.kind."""
    accuracy = result.accuracy
    percents = {"top-1": accuracy.top1, "top-5": accuracy.top5}
    figures = [f"{name} {value:.2f} %" for name, value in percents.items() if value is not None]
    lines = [
        "  ".join([f"step {result.step:,}", *figures, f"loss {accuracy.loss:.4f}"]),
        f"{accuracy.images:,} {kind}, each once, {result.seconds:.1f} s "
        f"({accuracy.images / result.seconds:.1f} a second)",
    ]
    if result.predicted is not None and len(result.predicted.label):
        lines.append(confusion_text(result.predicted, classes))
    if result.damaged:
        skipped = f"{plural(len(result.damaged), 'damaged image')} skipped: {summarize_corrupt(result.damaged)}"
        lines.insert(0, f"warning: {skipped}")
    return "\n".join(lines)


def results_as_json(session: Session, results: list[EvalResult]) -> dict[str, object]:
    """Return the JSON output. Accuracies are in percent; `batch` is the images of one worker's forward pass."""
    classes = session.dataset.classes

    def of_classes(predicted: Predicted | None) -> dict[str, object]:
        if predicted is None:
            return {}
        confused = confused_classes(predicted, classes)[:MAX_PAIRS]
        accuracies = class_accuracies(predicted, classes)
        return {"classes": list(map(asdict, accuracies)), "confused": list(map(asdict, confused))}

    return {
        "workers": session.rank.world_size,
        "batch": session.recipe.evaluation_batch,
        "results": [
            {
                "checkpoint": str(result.checkpoint),
                "step": result.step,
                "top1": result.accuracy.top1,
                "top5": result.accuracy.top5,
                "loss": result.accuracy.loss if math.isfinite(result.accuracy.loss) else None,
                "images": result.accuracy.images,
                "damaged": list(result.damaged),
                "seconds": result.seconds,
                **of_classes(result.predicted),
            }
            for result in results
        ],
    }
