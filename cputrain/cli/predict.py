"""cputrain predict: the classes of images, by a trained network."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from affinity.errors import InputError, RunError
from affinity.kernel.bound_plan import bound_worker, plan_in_memory
from affinity.kernel.exec_bound import exec_bound
from affinity.planner.plan import WorkerPlan
from affinity.planner.this_machine import plan_this_machine
from affinity.start import own_program
from affinity.terminal_text import printable_lines
from affinity.wording import counted
from cputrain.checkpoints.manifest import is_checkpoint
from cputrain.cli.json_output import format_option
from cputrain.data.damage import causes
from cputrain.data.formats.folder import image_files
from cputrain.launch.recipe_request import for_evaluation, request_of
from cputrain.recipe.schema import PlanSection
from cputrain.runs.folder import checkpoints_of, load_training, run_of

if TYPE_CHECKING:
    from cputrain.inference.predict import Prediction

BATCH = 32
LONGEST_NAME = 60


@click.command("predict")
@click.argument("checkpoint", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("paths", metavar="IMAGE...|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--top", type=click.IntRange(1), default=5, show_default=True, metavar="N", help="classes for each image")
@click.option("--last", is_flag=True, help="the newest checkpoint of RUN, not the best one")
@format_option
@click.option(
    "--batch", type=click.IntRange(1), default=BATCH, show_default=True, metavar="N", help="images in one forward pass"
)
def command(checkpoint: Path, paths: tuple[Path, ...], top: int, last: bool, output_format: str, batch: int) -> None:
    """Name the likeliest classes of images by a run's best checkpoint, or by CHECKPOINT.

    Network, class names, crop and normalization are in the checkpoint, and are those of an evaluation. All images
    in a FOLDER are taken, at any depth. A file that is no image, or a damaged one, is named on stderr; the others are
    classified, and the exit status is 1; it is 2 where none can be read.
    """
    found = find_checkpoint(checkpoint, last=last)
    images = image_files(paths)
    env = os.environ
    worker = bound_here(found, env)
    import torch  # after this process is bound

    from cputrain.inference.classifier import load_classifier
    from cputrain.inference.predict import predict

    torch.set_num_threads(worker.intra_op)
    classifier = load_classifier(found, env)
    threads, cpus = len(worker.loader_pus) or 1, worker.loader_pus or worker.compute_pus
    predictions = predict(classifier, images, top=top, batch=batch, threads=threads, cpus=cpus)
    head = {"checkpoint": str(found), "step": classifier.step}
    failed = _write_json(head, predictions) if output_format == "json" else _write_text(images, predictions)
    if len(failed) == len(images):
        raise InputError(f"none of {counted(len(images), 'image')} can be read: {causes(failed)}: name other files")
    if failed:
        raise RunError(f"{len(failed):,} of {len(images):,} images could not be read: {causes(failed)}")


def find_checkpoint(named: Path, *, last: bool) -> Path:
    """The checkpoint of that path, or the best or newest one of the run. Raises InputError."""
    if is_checkpoint(named):
        return named
    run = run_of(str(named))
    found, *others = checkpoints_of(run, () if run else (named,), last=last)
    if others:
        raise InputError(f"{named} has {len(others) + 1} checkpoints: name one, as in {others[-1]}")
    return found


def bound_here(checkpoint: Path, env: Mapping[str, str]) -> WorkerPlan:
    """The worker that this process is bound as: all of this machine's cores, by a plan for the checkpoint's recipe.

    A process that no plan has bound starts again, bound.
    """
    worker = bound_worker(env)
    if worker is None:
        recipe = for_evaluation(load_training(str(checkpoint))).model_copy(update={"plan": PlanSection(ppn=1)})
        plan = plan_this_machine(request_of(recipe), env)
        again = (*own_program("cputrain"), *sys.argv[1:])
        exec_bound(plan.workers[0], plan_in_memory(plan), again, env, rank=None, check=True)
    assert worker is not None
    return worker


def _write_text(images: list[str], predictions: Iterable["Prediction"]) -> list[str]:
    """A line for each image; those about images that could not be read."""
    failed: list[str] = []
    width = min(LONGEST_NAME, max(map(len, images)))
    for one in predictions:
        if one.error is not None:
            failed.append(_report(one))
            continue
        classes = "".join(f"  {_shown(name)} {100 * probability:.2f} %" for name, probability in one.top)
        click.echo(f"{_shown(one.image).ljust(width)}{classes}")
    return failed


def _write_json(head: dict[str, object], predictions: Iterable["Prediction"]) -> list[str]:
    """One JSON object, an image on each line; the lines about images that could not be read."""
    click.echo(json.dumps(head)[:-1] + ', "predictions": [')
    failed: list[str] = []
    for number, one in enumerate(predictions):
        if one.error is not None:
            failed.append(_report(one))
            entry: dict[str, object] = {"image": one.image, "error": one.error}
        else:
            entry = {"image": one.image, "top": [{"class": name, "probability": value} for name, value in one.top]}
        click.echo(f"{',' if number else ' '}{json.dumps(entry)}")
    click.echo("]}")
    return failed


def _report(one: "Prediction") -> str:
    line = f"{_shown(one.image)}: {one.error}"
    click.echo(f"cputrain: {line}", err=True)
    return line


def _shown(name: str) -> str:
    """A name, which may come from somebody else's checkpoint or folder, on one line."""
    return " ".join(printable_lines(name).split())
