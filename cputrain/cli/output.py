"""Standard streams, JSON output, number and path options, clock times and text charts, shared by the commands."""

import json
import math
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import click
from click.core import ParameterSource

from cputrain.affinity.errors import InputError
from cputrain.affinity.terminal import accept_any_text, discard_output, locale_encoding, redraws, status_of_signal

if TYPE_CHECKING:
    from cputrain.studies.bench.figures import Report

NAMES = ("stdin", "stdout", "stderr")
F = TypeVar("F", bound=Callable[..., Any])
WIDTH, HEIGHT = 64, 10  # of a curve, in characters
LEVELS = " ▁▂▃▄▅▆▇█"
CLOCK = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])")


class UnfailingStream:
    """stderr whose writes never fail: if the disk is full, the error cannot be shown and the command goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as much as possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush as much as possible."""
        with suppress(OSError):
            self._stream.flush()


def open_streams() -> None:
    """Open closed standard streams (`>&-`) on /dev/null, as the next opened file would get their descriptor and what is
    printed. Let them print any text, even characters that the locale lacks, and ignore errors of stderr."""
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        accept_any_text(stream, stream.encoding if "PYTHONIOENCODING" in os.environ else locale_encoding())
    if not isinstance(sys.stderr, UnfailingStream):
        sys.stderr = cast(TextIO, UnfailingStream(sys.stderr))


def print_line(text: str) -> None:
    """Print a line of a command that starts a job; warn on stderr if stdout is closed or full, as the job goes on."""
    try:
        click.echo(text)
    except OSError as error:
        discard_output(sys.stdout)
        click.echo(f"cputrain: stdout: {error.strerror}: the job goes on, and its output is in its logs", err=True)


def print_file(text: str) -> None:
    """Print the content of a file, such as a script: UTF-8 in any locale, file names byte for byte."""
    click.echo(text.encode(errors="surrogateescape"), nl=False)


def shows_bars() -> bool:
    """Whether to draw progress bars: stderr is a terminal that can redraw a line."""
    return redraws(sys.stderr, os.environ)


def is_closed() -> bool:
    """Whether the reader of stdout has closed it, as `| head` does."""
    watched = select.poll()
    watched.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in watched.poll(0))


def is_full(error: Exception) -> bool:
    """Whether an OSError came from writing to stdout; if so, report it on stderr."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    try:
        os.write(1, b"\n")
    except OSError:
        discard_output(sys.stdout)
        click.echo(f"cputrain: stdout: {error.strerror}", err=True)
        return True
    return False


def finished(status: int) -> int:
    """Flush stdout and return the command's exit status; as with other programs, SIGPIPE's status and no message if the
    reader has closed it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)
        return status or status_of_signal(signal.SIGPIPE)
    except OSError as error:
        discard_output(sys.stdout)
        click.echo(f"cputrain: stdout: {error.strerror}", err=True)
        return status or 1
    return status


def formats_option(*formats: str, **settings: Any) -> Callable[[F], F]:
    """Add --format as `output_format`: text and the given formats."""
    settings = {"default": "text", "show_default": True, "help": "choose the output format", **settings}
    return click.option("--format", "output_format", type=click.Choice(["text", *formats]), **settings)


def _inherited(context: click.Context, param: click.Parameter, value: str) -> str:
    """Return the format given here, or else to the group, as in `cputrain recipes --format json list`."""
    above = context.parent.params if context.parent is not None else {}
    given = context.get_parameter_source(str(param.name)) is not ParameterSource.DEFAULT
    return value if given else above.get("output_format", value)


format_option = formats_option(
    "json", callback=_inherited, help="choose the output; json: one object on stdout, everything else on stderr"
)


def number_option(
    *names: str, least: int | None = 1, most: int | None = None, metavar: str = "N", **settings: Any
) -> Callable[[F], F]:
    """Add an option that takes a whole number; --help shows its default, if any."""
    shown = "default" in settings
    return click.option(
        *names, type=click.IntRange(least, most), metavar=metavar, show_default=shown or None, **settings
    )


class FiniteRange(click.FloatRange):
    """A finite number in a range; click.FloatRange also accepts nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def amount_option(
    *names: str, least: float = 0, most: float | None = None, above: float | None = None, **settings: Any
) -> Callable[[F], F]:
    """Add an option that takes a finite number from `least` to `most`, or one larger than `above`; --help shows its
    default, if any."""
    kind = FiniteRange(least, most) if above is None else FiniteRange(above, most, min_open=True)
    shown = "default" in settings
    return click.option(*names, type=kind, show_default=shown or None, **settings)


def path_option(
    *names: str, dir_okay: bool = True, suffixes: tuple[str, ...] = (), why: str = "", **settings: Any
) -> Callable[[F], F]:
    """Add an option that takes a path, which does not have to exist. With `suffixes` it must end in one of them; `why`
    explains the first one in the message."""

    def checked(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
        if path is not None and path.suffix.lower() not in suffixes:
            raise InputError(f"{names[0]} {path} does not end in {suffixes[0]}: {why}")
        return path

    if suffixes:
        settings["callback"] = checked
    return click.option(*names, type=click.Path(path_type=Path, dir_okay=dir_okay), **settings)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    click.echo(json.dumps(value, indent=1))


def show_report(report: "Report", output_format: str) -> None:
    """Print the report of a benchmark as text, JSON or SVG."""
    from cputrain.affinity.planner.records import current_versions, machine_name
    from cputrain.affinity.topology.sysfs import this_machine
    from cputrain.studies.bench.figures import report_json, report_svg, report_text

    if output_format == "json":
        click.echo(report_json(report, machine=machine_name(this_machine()), versions=current_versions()))
    elif output_format == "svg":
        click.echo(report_svg(report))
    else:
        click.echo(report_text(report))


@contextmanager
def only_results_on_stdout(output_format: str) -> Iterator[None]:
    """With "json", redirect stdout to stderr inside the block, also for processes started there."""
    if output_format != "json":
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def sampled(value_at: Callable[[int], float], count: int) -> list[float]:
    """Return values at WIDTH evenly spaced places from 0 to `count` - 1."""
    return [value_at(round(i * (count - 1) / (WIDTH - 1))) for i in range(WIDTH)]


def curve(values: Sequence[float], last: str) -> str:
    """Draw a bar for each value, from 0 to the largest; `last` labels the end of the horizontal axis."""
    most = max(values)
    eighths = [round(8 * HEIGHT * value / most) if most > 0 else 0 for value in values]
    lines = []
    for row in reversed(range(HEIGHT)):
        label = f"{most:.4g}" if row == HEIGHT - 1 else "0" if row == 0 else ""
        lines.append(f"  {label:>8} │" + "".join(LEVELS[min(max(each - 8 * row, 0), 8)] for each in eighths).rstrip())
    lines.append(f"  {'':>8} └{'─' * len(values)}")
    lines.append(f"  {'':>8}  0{last:>{len(values) - 1}}")
    return "\n".join(lines)


def parse_clock(text: str) -> int:
    """Convert "1:30:00" or "2-00:00:00" to seconds. Raises InputError."""
    found = CLOCK.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise InputError(f"--time {text!r} is not a time limit: give HH:MM:SS or D-HH:MM:SS")
    return total
