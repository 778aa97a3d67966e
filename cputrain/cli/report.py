"""cputrain report: a run's folder -> report.html."""

from pathlib import Path

import click

from cputrain.report.page import write_report


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
def command(run: Path) -> None:
    """Write RUN/report.html again; the run may still be going on."""
    click.echo(write_report(run))
