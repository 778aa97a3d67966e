"""cputrain report: the page of a run, or of several runs compared."""

from pathlib import Path

import click

from affinity.errors import InputError
from affinity.wording import first_named
from cputrain.report.page import write_report
from cputrain.report.run import contains_run
from cputrain.runs.folder import REPORT


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="the page  [default: RUN/report.html; of several runs comparison.html]",
)
def command(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write the page of a run, which may be running or interrupted, as one HTML file.

    Several RUNs, or the folder of a sweep, give one page that compares them: overlaid curves, a table of results and
    differing settings, and the study of worker counts where these differ. The tables are also written as .md and .csv
    beside it. Of several, as in runs/*, those that contain no run are left out.
    """
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--output {output} does not end in .html: the page is HTML, the tables get .md and .csv")
    if len(runs) == 1 and not (found := _runs_in(runs[0])):
        click.echo(write_report(runs[0], output))
        return
    from cputrain.sweep.comparison import write_comparison  # as heavy as a sweep: only for several

    sweep = runs[0] if len(runs) == 1 else None
    folders = found if sweep else _folders_of(runs)
    default = sweep / REPORT if sweep else Path("comparison.html")
    title = sweep.resolve().name if sweep else "Comparison"
    for path in write_comparison(folders, output or default, title):
        click.echo(path)


def _folders_of(runs: tuple[Path, ...]) -> tuple[Path, ...]:
    """The folders of the runs among several paths, those of a sweep for its folder.

    What is there but is no run is left out and named, as long as there are runs.
    """
    found = {path: _runs_in(path) for path in runs}
    others = [path for path in runs if path.exists() and not found[path] and not contains_run(path)]
    if len(others) < len(found):
        if others:
            click.echo(f"left out, as there is no run in them: {first_named([str(path) for path in others])}", err=True)
        found = {path: folders for path, folders in found.items() if path not in others}
    return tuple(dict.fromkeys(each for path, folders in found.items() for each in folders or (path,)))


def _runs_in(folder: Path) -> tuple[Path, ...]:
    """The runs inside a folder that is none itself."""
    from cputrain.sweep.compared_runs import runs_in

    return () if contains_run(folder) else runs_in(folder)
