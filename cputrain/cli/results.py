"""`cputrain report`, `watch`, `predict` and `export`."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cputrain.affinity.bound_plan import bound_worker, exec_bound, plan_in_memory
from cputrain.affinity.errors import InputError, RunError
from cputrain.affinity.planner.plan import WorkerPlan
from cputrain.affinity.start import isolated_command
from cputrain.affinity.terminal import printable_lines, redraws, shows_color
from cputrain.affinity.wording import first_named, plural
from cputrain.checkpoint.files import is_checkpoint
from cputrain.cli.output import amount_option, format_option, number_option, path_option
from cputrain.files import RECIPE, REPORT
from cputrain.runs.events import FILE
from cputrain.runs.folder import checkpoints_of, run_of
from cputrain.training.local import plan_inference

if TYPE_CHECKING:
    from cputrain.inference import Prediction

BATCH = 32  # images in a forward pass
MAX_NAME_LENGTH = 60  # characters of an image's name in the aligned column
FORMATS = ("safetensors", "state-dict", "torchscript", "onnx")


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@path_option(
    "--output",
    dir_okay=False,
    suffixes=(".html", ".htm"),
    why="the page is HTML, the tables get .md and .csv",
    metavar="FILE.html",
    help="write the page to FILE.html  [default: RUN/report.html, or comparison.html for several runs]",
)
def report_command(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write the report of a run, finished, running or interrupted, as one HTML file.

    For several RUNs, or the folder of a sweep, the page compares them: overlaid curves, a table of results and
    differing settings, and scaling if the numbers of workers differ. The tables are also written as .md and .csv next
    to it. Of several paths, as in runs/*, those without a run are skipped.
    """
    if len(runs) == 1 and not (runs_inside := _runs_in(runs[0])):
        from cputrain.report.page import write_report  # numpy, only needed here

        click.echo(write_report(runs[0], output))
        return
    from cputrain.studies.sweep.comparison import write_comparison  # slow to import, only needed for several runs

    sweep = runs[0] if len(runs) == 1 else None
    folders = runs_inside if sweep else _folders_of(runs)
    default = sweep / REPORT if sweep else Path("comparison.html")
    title = sweep.resolve().name if sweep else "Comparison"
    for path in write_comparison(folders, output or default, title):
        click.echo(path)


def _folders_of(runs: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the run folders among several paths; the folder of a sweep stands for its runs.

    Existing paths without a run are skipped with a note, as long as there are runs.
    """
    from cputrain.report.run import contains_run

    runs_of = {path: _runs_in(path) for path in runs}
    empty = [path for path in runs if path.exists() and not runs_of[path] and not contains_run(path)]
    if len(empty) < len(runs_of):
        if empty:
            click.echo(f"skipped, as they contain no run: {first_named([str(path) for path in empty])}", err=True)
        runs_of = {path: folders for path, folders in runs_of.items() if path not in empty}
    return tuple(dict.fromkeys(folder for path, folders in runs_of.items() for folder in folders or (path,)))


def _runs_in(folder: Path) -> tuple[Path, ...]:
    """Return the runs inside a folder that is not a run itself."""
    from cputrain.report.run import contains_run
    from cputrain.studies.sweep.comparison import runs_in

    return () if contains_run(folder) else runs_in(folder)


@click.command("watch")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="print the current state and exit")
@amount_option("--interval", least=0.1, default=1.0, metavar="S", help="update every S seconds")
def watch_command(run: Path, once: bool, interval: float) -> None:
    """Show a run live: progress, curves, a heat map of step times by rank, binding, the last warnings.

    Only RUN/events.jsonl is read, so watch also works on a login node. It ends with the run, or with q or Ctrl-C, which
    do not affect the run. If the output is not a terminal, or TERM=dumb, it prints the state of the run once.
    """
    from rich.console import Console  # 0.1 s, only needed here
    from rich.live import Live

    from cputrain.report.watch import EventTail, WatchState, keys_pressed, watch_screen

    if not (run / FILE).is_file() and not (run / RECIPE).is_file():
        raise InputError(f"{run} contains no run ({FILE}): give the output folder of a training")
    tail, state = EventTail(run / FILE), WatchState()
    env = os.environ
    console = Console(no_color=not shows_color(sys.stdout, env))
    name = run.resolve().name

    def look() -> WatchState:
        events, replaced = tail.read()
        known = WatchState() if replaced else state
        known.add(events)
        return known

    state = look()
    if redraws(sys.stdout, env) and not once:
        with (
            keys_pressed() as pressed,
            Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live,
        ):
            while state.end is None:
                live.update(watch_screen(name, state, width=console.width, damaged=tail.damaged), refresh=True)
                if "q" in pressed(interval).lower():
                    break
                state = look()
    console.print(watch_screen(name, state, width=console.width, damaged=tail.damaged))


@click.command("predict")
@click.argument("checkpoint", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("paths", metavar="IMAGE...|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@number_option("--top", default=5, help="print the N most likely classes of each image")
@click.option("--last", is_flag=True, help="use the newest checkpoint of RUN instead of the best one")
@format_option
@number_option("--batch", default=BATCH, help="classify N images per forward pass")
def predict_command(
    checkpoint: Path, paths: tuple[Path, ...], top: int, last: bool, output_format: str, batch: int
) -> None:
    """Print the most likely classes of images according to a run's best checkpoint, or CHECKPOINT.

    Network, class names, crop and normalization are read from the checkpoint and equal an evaluation's. All images in
    FOLDER are used, at any depth. Files that are not images, or damaged, are listed on stderr; the others are
    classified. The exit status is then 1, or 2 if no image can be read.
    """
    from cputrain.data.formats.dataset import summarize_corrupt  # numpy, only needed here
    from cputrain.data.formats.folder import image_files

    source = find_checkpoint(checkpoint, last=last)
    images = image_files(paths)
    env = os.environ
    worker = bound_here(source, env)
    import torch  # after this process is bound

    from cputrain.inference import load_classifier, predict

    torch.set_num_threads(worker.intra_op)
    classifier = load_classifier(source, env)
    threads, cpus = len(worker.loader_pus) or 1, worker.loader_pus or worker.compute_pus
    predictions = predict(classifier, images, top=top, batch=batch, threads=threads, cpus=cpus)
    head = {"checkpoint": str(source), "step": classifier.step}
    failed = _write_json(head, predictions) if output_format == "json" else _write_text(images, predictions)
    if len(failed) == len(images):
        raise InputError(
            f"none of {plural(len(images), 'image')} can be read: {summarize_corrupt(failed)}; give other files"
        )
    if failed:
        raise RunError(f"{len(failed):,} of {len(images):,} images cannot be read: {summarize_corrupt(failed)}")


def find_checkpoint(named: Path, *, last: bool) -> Path:
    """Return the named checkpoint, or a run's best or newest one. Raises InputError."""
    if is_checkpoint(named):
        return named
    run = run_of(str(named))
    found, *others = checkpoints_of(run, () if run else (named,), last=last)
    if others:
        raise InputError(f"{named} has {len(others) + 1} checkpoints: name one, as in {others[-1]}")
    return found


def bound_here(checkpoint: Path, env: Mapping[str, str]) -> WorkerPlan:
    """Return the worker that this process is bound as: all cores of this machine, planned for the checkpoint's recipe.

    A process that is not bound yet restarts itself bound.
    """
    worker = bound_worker(env)
    if worker is None:
        plan = plan_inference(checkpoint, env)
        again = (*isolated_command("cputrain"), *sys.argv[1:])
        exec_bound(plan.workers[0], plan_in_memory(plan), again, env, rank=None, check=True)
    assert worker is not None
    return worker


def _write_text(images: list[str], predictions: Iterable["Prediction"]) -> list[str]:
    """Print a line per image; return the error lines of images that cannot be read."""
    failed: list[str] = []
    width = min(MAX_NAME_LENGTH, max(map(len, images)))
    for prediction in predictions:
        if prediction.error is not None:
            failed.append(_report(prediction))
            continue
        classes = "".join(f"  {_shown(name)} {100 * probability:.2f} %" for name, probability in prediction.top)
        click.echo(f"{_shown(prediction.image).ljust(width)}{classes}")
    return failed


def _write_json(head: dict[str, object], predictions: Iterable["Prediction"]) -> list[str]:
    """Print one JSON object with an image per line; return the error lines of images that cannot be read."""
    click.echo(json.dumps(head)[:-1] + ', "predictions": [')
    failed: list[str] = []
    for number, prediction in enumerate(predictions):
        if prediction.error is not None:
            failed.append(_report(prediction))
            entry: dict[str, object] = {"image": prediction.image, "error": prediction.error}
        else:
            top = [{"class": name, "probability": value} for name, value in prediction.top]
            entry = {"image": prediction.image, "top": top}
        click.echo(f"{',' if number else ' '}{json.dumps(entry)}")
    click.echo("]}")
    return failed


def _report(prediction: "Prediction") -> str:
    line = f"{_shown(prediction.image)}: {prediction.error}"
    click.echo(f"cputrain: {line}", err=True)
    return line


def _shown(name: str) -> str:
    """Escape a name from an untrusted checkpoint or folder and put it on one line."""
    return " ".join(printable_lines(name).split())


@click.command("export")
@click.argument("checkpoint", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--to", "format_name", type=click.Choice(FORMATS), help="write this format  [default: by the suffix of FILE]"
)
@click.option("--last", is_flag=True, help="use the newest checkpoint of RUN instead of the best one")
@path_option(
    "--images",
    multiple=True,
    metavar="IMAGE|FOLDER",
    help="compare the logits of these images  [default: validation images of the recipe's data]",
)
def export_command(
    checkpoint: Path, file: Path | None, format_name: str | None, last: bool, images: tuple[Path, ...]
) -> None:
    """Write the network of a run's best checkpoint, or of CHECKPOINT, to FILE, by default NAME.FORMAT here.

    The weights are those used in an evaluation: the moving average if there is one. FILE is only kept if its
    logits of some images match an evaluation's. An existing FILE is replaced.

    \b
    safetensors  .safetensors       weights under torchvision's names; network, classes, normalization in the header
    state-dict   .pt, .pth          weights under torchvision's names, for torch.load
    torchscript  .torchscript, .ts  for torch.jit.load, any batch size; cputrain.json inside has the rest
    onnx         .onnx              any batch size; the rest is in its metadata; needs pip install 'cputrain[onnx]'
    """
    source = find_checkpoint(checkpoint, last=last)
    if file is None:
        if format_name is None:
            raise click.UsageError(f"no format: give FILE, or --to {', '.join(FORMATS)}")
        file = Path(f"{checkpoint.resolve().name}.{'pt' if format_name == 'state-dict' else format_name}")
    from cputrain.data.formats.folder import image_files
    from cputrain.inference import choose_format, export  # torch, only needed here

    done = export(source, file, choose_format(file, format_name), os.environ, image_files(images))
    click.echo(
        f"{file}: {done.tensors} tensors of {source}; logits of {plural(done.images, 'image')} differ from an "
        f"evaluation's by at most {done.difference:.1g} of the largest one"
    )
