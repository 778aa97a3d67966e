"""Page of a run's events, from the calls that write them: Events.write("name", field=value, ...)."""

import ast
from collections.abc import Iterator

from site_pages.imports import ROOT
from site_pages.text import code, table

INTRODUCTION = """# events.jsonl

A run logs its events to `events.jsonl` in its folder, one JSON object per line. Every event has its name in `event`,
Unix seconds in `time`, and seconds of a monotonic clock in `monotonic_s`, for differences within one start.
Losses that are NaN or infinite are null, and so are values that a run does not have. Accuracies are in percent. Lines
are only appended: a resumed run has one `start` for each start, and repeated steps appear again.
"""
# Fields that the calls write through dataclasses or conditions.
MORE_FIELDS = {"start": ("workers", "global_batch", "train_images", "classes")}
WHEN = {
    "start": "The network is built and the first step is about to begin.",
    "step": "One optimizer update.",
    "ranks": "The mean of each rank's last steps: after the first step, about every 10 seconds (0.1 "
    "seconds per rank if there are more than a hundred), and after the last step.",
    "ratios": "Norms and trust ratios of the layers, every `log_norms_every_steps` steps.",
    "epoch": "The end of an epoch, evaluated or not.",
    "checkpoint": "A checkpoint is written.",
    "warning": "Something that the user should know; the run continues.",
    "end": "The run is done, or stopped early with its state saved.",
}
MEANINGS = {
    "backend": "c10d backend: ccl or gloo",
    "best": "whether it is the best so far",
    "bindings": "for each rank, the planned binding and the one that the kernel reports",
    "cause": "why a rank is slow, according to its host's counters",
    "classes": "number of classes",
    "comm_wait_s": "seconds that rank 0 waited for gradients of other ranks in this step; in `ranks` a list",
    "data": "images, points or synthetic",
    "data_wait_s": "seconds that rank 0 waited for images in this step; in `ranks` a list",
    "epoch": "epochs done, with a fraction within an epoch",
    "factor": "step time of a slow rank, relative to the median rank",
    "global_batch": "images of a step over all workers",
    "host": "the host of a slow rank",
    "images": "training images so far; in a warning: names of the damaged images",
    "images_per_s": "training images per second, over all workers",
    "layers": "for each layer: norm of the weights, norm of the gradient, trust ratio",
    "loss": "mean training loss of rank 0's images in the step; no exchange sums it over the ranks",
    "path": "path of the checkpoint, relative to the run folder",
    "rank": "a rank that is slow",
    "rate": "learning rate",
    "recipe": "the recipe's name",
    "last_step": "the step after which the training ends",
    "seconds": "duration of the epoch; in `ranks` a list of the seconds of a step",
    "starts": "how often the run was started",
    "status": "done, or stopped",
    "step": "optimizer updates so far",
    "steps": "optimizer updates so far; in `ranks` the number of steps in the means",
    "steps_per_epoch": "optimizer updates of an epoch",
    "test_top1": "top-1 of the test images, evaluated once at the end",
    "test_top5": "top-5 of the test images",
    "time_to_train_s": "seconds of training over all starts, evaluations and checkpoints included",
    "top1": "top-1 of the validation images",
    "top5": "top-5 of the validation images",
    "train_images": "number of training images",
    "train_loss": "mean training loss of the epoch, over the images of all ranks",
    "train_top1": "top-1 of the training images of the epoch",
    "trained_until": "Unix seconds at which training ended, before the test images were evaluated",
    "trained_until_monotonic_s": "the same moment, as in `monotonic_s`",
    "val_loss": "loss of the validation images",
    "val_top1": "top-1 of the validation images",
    "val_top5": "top-5 of the validation images",
    "wall_time_s": "seconds from the first start to the end, waits in the queue included",
    "what": "the warning's text",
    "workers": "ranks of the job",
}


def events() -> str:
    """Return a section for each event: when it is written, and its fields. Raises KeyError if one is not described."""
    parts = [INTRODUCTION]
    found = written()
    for name in sorted(found, key=list(WHEN).index):
        rows = [[code(field), MEANINGS[field]] for field in found[name]]
        parts.append(f"## {name}\n\n{WHEN[name]}\n\n{table(['field', 'meaning'], rows)}\n")
    return "\n".join(parts)


def written() -> dict[str, tuple[str, ...]]:
    """Return the fields of each event in the order in which they are written."""
    found = {name: dict.fromkeys(fields) for name, fields in MORE_FIELDS.items()}
    for path in sorted((ROOT / "cputrain/training").rglob("*.py")):
        for call in _calls(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.literal_eval(call.args[0])
            fields = [keyword.arg for keyword in call.keywords if keyword.arg]
            found[name] = dict.fromkeys((*fields, *found.get(name, ())))
    return {name: tuple(fields) for name, fields in found.items()}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of a method `write` with a constant name and keywords, as only events have."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "write"
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Constant)
            and node.keywords
        ):
            yield node
